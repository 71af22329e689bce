// SPDX-License-Identifier: Apache-2.0
#include "audit.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oracle.h"

namespace tokenspeed::control::sim {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

struct Held {
  std::vector<std::int32_t> writers;
  std::vector<std::int32_t> shares;
  std::int64_t num_running = 0;
  std::int64_t num_waiting = 0;
};

void count_pages(const Sequence& sequence, Held& held) {
  const PageTable& pages = sequence.grant().pages();
  for (Blocks index; index < pages.size(); index += Blocks(1)) {
    auto& counts = index < pages.num_sealed() ? held.shares : held.writers;
    ++counts[at(pages.page(index).value())];
  }
}

Held count(const Scheduler& scheduler) {
  const std::size_t num_pages = at(scheduler.config().num_blocks) + 1;
  Held held{.writers = std::vector<std::int32_t>(num_pages), .shares = std::vector<std::int32_t>(num_pages)};
  for (const auto& sequence : scheduler.sequences()) {
    if (!sequence) {
      continue;
    }
    const bool waits = sequence->is_waiting() || (sequence->is<Draining>() && !sequence->has_ended());
    held.num_waiting += waits ? 1 : 0;
    held.num_running += sequence->is_running() ? 1 : 0;
    if (!sequence->is_waiting()) {
      count_pages(*sequence, held);
    }
  }
  return held;
}

void check_pages(const Scheduler& scheduler, const Held& held) {
  const BlockPool& pool = scheduler.group().pool();
  const PrefixIndex& index = scheduler.group().index();
  std::int64_t num_free = 0;
  std::int64_t num_writable = 0;
  std::int64_t num_sealed = 0;
  std::size_t num_indexed = 0;
  for (std::int32_t value = 1; value <= scheduler.config().num_blocks; ++value) {
    const DevicePage page(value);
    const auto writers = held.writers[at(value)];
    const auto shares = held.shares[at(value)];
    require(writers <= 1 && (writers == 0 || shares == 0), "page", page, "writers", writers, "shares", shares);
    require(pool.is_writable(page) == (writers == 1), "page", page, "writers", writers);
    require(pool.num_shares(page) == shares, "page", page, "shares", shares, "counted", pool.num_shares(page));
    num_free += pool.is_free(page) ? 1 : 0;
    num_writable += writers;
    if (const auto hash = pool.indexed_as(page)) {
      const auto found = index.find(*hash);
      require(found && *found == page, "page", page, "is not where its hash says");
      ++num_indexed;
    } else {
      require(pool.is_free(page) || writers + shares > 0, "page", page, "is lost");
    }
    num_sealed += !pool.is_free(page) && writers == 0 ? 1 : 0;
  }
  require(num_free + num_writable + num_sealed == scheduler.config().num_blocks, num_free, num_writable, num_sealed);
  require(num_indexed == index.size(), "index", index.size(), "indexed pages", num_indexed);
  const Stats stats = scheduler.stats();
  require(stats.used_blocks + stats.cached_blocks + num_free == stats.total_blocks, "used", stats.used_blocks, "cached",
          stats.cached_blocks, "free", num_free, "total", stats.total_blocks);
  require(stats.num_running == held.num_running && stats.num_waiting == held.num_waiting, "running", stats.num_running,
          "waiting", stats.num_waiting);
}

// The device's table, made from deltas only, is the sequence's table.
void check_tables(const Scheduler& scheduler, const Device& device) {
  for (const auto& sequence : scheduler.sequences()) {
    if (!sequence || sequence->is_waiting()) {
      continue;
    }
    const Grant& grant = sequence->grant();
    const auto& table = device.table(grant.seat());
    require(std::cmp_equal(table.size(), grant.pages().size().value()), "seat", grant.seat(), "device", table.size(),
            "blocks, plane", grant.pages().size());
    for (std::size_t block = 0; block < table.size(); ++block) {
      const DevicePage page = grant.pages().page(Blocks(static_cast<std::int64_t>(block)));
      require(page.value() == table[block], "seat", grant.seat(), "block", block, "page", page, table[block]);
    }
  }
}

}  // namespace

void audit(const Scheduler& scheduler, const Device& device) {
  check_pages(scheduler, count(scheduler));
  check_tables(scheduler, device);
}

}  // namespace tokenspeed::control::sim
