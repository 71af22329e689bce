// SPDX-License-Identifier: Apache-2.0
#include "transport.h"

#include <algorithm>

#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

bool touches(const DeviceStep& step, const PageName& name) {
  return std::any_of(step.touched.begin(), step.touched.end(), [&](const auto& pages) { return pages.contains(name); });
}

}  // namespace

Transport::Transport(const Layout& layout, Memory& memory, const TransferMood& mood)
    : layout_(layout), memory_(memory), mood_(mood) {}

void Transport::begin(const StepPlan& plan, const Device& device, const Oracle& oracle, Random& random) {
  std::vector<std::int64_t> begun;
  const auto check_lease = [&](std::int64_t lease) {
    require(lease > 0, "lease", lease);
    if (std::find(begun.begin(), begun.end(), lease) == begun.end()) {
      require(!pending_.contains(lease), "lease", lease, "is in flight already");
      begun.push_back(lease);
    }
  };
  for (std::size_t index = 0; index < plan.load.num_rows(); ++index) {
    const auto row = plan.load.row(index);
    check_lease(row[0]);
    begin_load(row, image_of(plan, row, device, oracle), device);
  }
  for (std::size_t index = 0; index < plan.store.num_rows(); ++index) {
    check_lease(plan.store.row(index)[0]);
    begin_store(plan.store.row(index), device);
  }
  for (const std::int64_t lease : begun) {
    pending_[lease].fails = random.chance(mood_.fail_percent);
  }
}

// What the block must hold once it is loaded: the plan itself says whose it is and where it stands.
std::vector<History> Transport::image_of(const StepPlan& plan, std::span<const std::int32_t> row, const Device& device,
                                         const Oracle& oracle) const {
  const std::int64_t size = layout_.spec(row[1]).block_size.value();
  for (std::size_t index = 0; index < plan.page_delta.num_rows(); ++index) {
    const auto delta = plan.page_delta.row(index);
    const std::int64_t number = device.partition_of(delta[0]) * layout_.num_groups() + delta[1];
    if (number == row[1] && delta[3] == row[2]) {
      const Request* request = oracle.find(device.seated(delta[0]).key);
      const std::span<const History> history(request->history);
      require((delta[2] + 1) * size <= static_cast<std::int64_t>(history.size()), "block", delta[2], "loaded");
      return memory_.image(number, history.subspan(at(delta[2] * size), at(size)));
    }
  }
  throw Violation("a load into a page that this plan gives to nobody");
}

void Transport::begin_load(std::span<const std::int32_t> row, std::vector<History>&& image, const Device& device) {
  const PageName name(row[1], row[2]);
  Memory::Page& target = memory_.device(row[1], row[2]);
  require(row[2] != 0 && !target.is_target && target.num_readers == 0, "page", row[2], "of group", row[1],
          "is loaded while another transfer uses it");
  for (const DeviceStep& step : device.in_flight()) {
    require(!touches(step, name), "page", row[2], "of group", row[1], "is loaded while a step in flight has it");
  }
  target.is_target = true;
  if (row[3] != 0) {
    Memory::Page& source = memory_.host(row[1], row[3]);
    require(!source.is_target, "host page", row[3], "of group", row[1], "is read while it is written");
    ++source.num_readers;
  }
  pending_[row[0]].items.push_back(Item{
      .is_load = true, .number = row[1], .device = row[2], .host = row[3], .copied = false, .image = std::move(image)});
}

void Transport::begin_store(std::span<const std::int32_t> row, const Device& device) {
  const PageName name(row[1], row[2]);
  Memory::Page& source = memory_.device(row[1], row[2]);
  require(row[2] != 0 && !source.is_target, "page", row[2], "of group", row[1], "is stored while it is loaded");
  for (const DeviceStep& step : device.in_flight()) {
    require(!step.written.contains(name), "page", row[2], "of group", row[1], "is stored while a step writes it");
  }
  ++source.num_readers;
  if (row[3] != 0) {
    Memory::Page& target = memory_.host(row[1], row[3]);
    require(!target.is_target && target.num_readers == 0, "host page", row[3], "of group", row[1],
            "is written while another transfer uses it");
    target.is_target = true;
    memory_.spoil(target);
  }
  pending_[row[0]].items.push_back(Item{
      .is_load = false, .number = row[1], .device = row[2], .host = row[3], .copied = false, .image = source.cells});
}

std::vector<TransferDone> Transport::work(Random& random, bool all) {
  std::vector<TransferDone> done;
  for (auto& [lease, pending] : pending_) {
    if (pending.done || (!all && is_stuck(pending))) {
      continue;
    }
    if (all || random.chance(mood_.done_percent)) {
      finish(pending, random);
      done.push_back(TransferDone{.lease = LeaseId(lease), .ok = !pending.fails});
      if (random.chance(10)) {
        done.push_back(done.back());
      }
    } else if (random.chance(50)) {
      copy(pending.items[at(random.between(0, static_cast<std::int64_t>(pending.items.size()) - 1))]);
    }
  }
  if (!settled_.empty() && random.chance(10)) {
    const auto which = random.between(0, static_cast<std::int64_t>(settled_.size()) - 1);
    done.push_back(TransferDone{.lease = LeaseId(settled_[at(which)]), .ok = random.chance(50)});
  }
  if (random.chance(5)) {
    const std::int64_t unknown = random.between(-1, 400);
    if (!pending_.contains(unknown)) {
      done.push_back(TransferDone{.lease = LeaseId(unknown), .ok = random.chance(50)});
    }
  }
  return done;
}

bool Transport::is_stuck(const Pending& pending) const {
  return layout_.config().num_partitions > 1 &&
         mood_.stuck_partition == pending.items.front().number / layout_.num_groups();
}

void Transport::copy(Item& item) {
  if (item.copied) {
    return;
  }
  item.copied = true;
  Memory::Page& device = memory_.device(item.number, item.device);
  if (!item.is_load) {
    require(device.cells == item.image, "page", item.device, "of group", item.number, "changed while it was stored");
  }
  if (item.host == 0) {
    if (item.is_load) {
      device.cells = item.image;
      ++device.version;
    }
    return;
  }
  Memory::Page& host = memory_.host(item.number, item.host);
  Memory::Page& target = item.is_load ? device : host;
  const Memory::Page& source = item.is_load ? host : device;
  target.cells = source.cells;
  ++target.version;
  require(target.cells == item.image, "host page", item.host, "of group", item.number, "has other contents than block");
}

void Transport::finish(Pending& pending, Random& random) {
  pending.done = true;
  for (Item& item : pending.items) {
    if (!pending.fails || random.chance(50)) {
      copy(item);
    }
    if (pending.fails && random.chance(50) && (item.is_load || item.host != 0)) {
      memory_.spoil(item.is_load ? memory_.device(item.number, item.device) : memory_.host(item.number, item.host));
    }
  }
}

void Transport::unpin(const Item& item) {
  Memory::Page& device = memory_.device(item.number, item.device);
  if (item.is_load) {
    device.is_target = false;
  } else {
    --device.num_readers;
  }
  if (item.host != 0) {
    Memory::Page& host = memory_.host(item.number, item.host);
    if (item.is_load) {
      --host.num_readers;
    } else {
      host.is_target = false;
    }
  }
}

void Transport::settle(std::span<const TransferDone> batch) {
  for (const TransferDone& done : batch) {
    const auto found = pending_.find(done.lease.value());
    if (found == pending_.end()) {
      continue;
    }
    for (const Item& item : found->second.items) {
      unpin(item);
      const bool counts = !found->second.fails && item.host != 0 && item.number % layout_.num_groups() == 0;
      stored_blocks_ += counts && !item.is_load ? 1 : 0;
      loaded_tokens_ += counts && item.is_load ? layout_.spec(item.number).block_size.value() : 0;
    }
    settled_.push_back(found->first);
    pending_.erase(found);
  }
}

}  // namespace tokenspeed::control::sim
