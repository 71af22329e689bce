// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace

Memory::Memory(const Layout& layout) : layout_(layout) {
  for (std::int64_t number = 0; number < layout.num_numbers(); ++number) {
    const GroupSpec& spec = layout.spec(number);
    const std::size_t cells = spec.kind == GroupKind::kRecurrent ? 1 : at(spec.block_size.value());
    const auto pages = [&](Blocks blocks) {
      std::vector<Page> made(at(blocks.value()) + 1);
      for (Page& page : made) {
        page.cells.resize(cells);
        spoil(page);
      }
      return made;
    };
    device_.push_back(pages(spec.num_blocks));
    host_.push_back(pages(spec.num_host_blocks));
  }
}

const Memory::Page& Memory::device(std::int64_t number, std::int32_t page) const {
  require(number >= 0 && number < layout_.num_numbers(), "group", number);
  require(page >= 0 && at(page) < device_[at(number)].size(), "group", number, "has no page", page);
  return device_[at(number)][at(page)];
}

const Memory::Page& Memory::host(std::int64_t number, std::int32_t page) const {
  require(number >= 0 && number < layout_.num_numbers(), "group", number);
  require(page >= 0 && at(page) < host_[at(number)].size(), "group", number, "has no host page", page);
  return host_[at(number)][at(page)];
}

Memory::Page& Memory::device(std::int64_t number, std::int32_t page) {
  return const_cast<Page&>(static_cast<const Memory&>(*this).device(number, page));
}

Memory::Page& Memory::host(std::int64_t number, std::int32_t page) {
  return const_cast<Page&>(static_cast<const Memory&>(*this).host(number, page));
}

void Memory::write(std::int64_t number, std::int32_t page, std::size_t cell, History history) {
  Page& target = device(number, page);
  require(page != 0, "group", number, "null page written");
  require(!target.is_target && target.num_readers == 0, "group", number, "page", page,
          "is written while a transfer uses it");
  target.cells[cell] = history;
  ++target.version;
}

void Memory::spoil(Page& page) {
  for (History& cell : page.cells) {
    cell = garbage();
  }
  ++page.version;
}

History Memory::garbage() { return scramble(0xBADBADBADULL + num_garbage_++); }

std::vector<History> Memory::image(std::int64_t number, std::span<const History> history) const {
  if (layout_.spec(number).kind == GroupKind::kRecurrent) {
    return {history.back()};
  }
  return {history.begin(), history.end()};
}

}  // namespace tokenspeed::control::sim
