// SPDX-License-Identifier: Apache-2.0
#include "replay.h"

#include <bit>

#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

BlockHash hash_in(std::span<const std::int64_t> row, std::size_t first) {
  return BlockHash{.high = std::bit_cast<std::uint64_t>(row[first]),
                   .low = std::bit_cast<std::uint64_t>(row[first + 1])};
}

}  // namespace

Replay::Replay(const Layout& layout) : layout_(layout), seen_(2) {
  for (std::int64_t number = 0; number < layout.num_numbers(); ++number) {
    seen_[0].emplace_back(at(layout.spec(number).num_blocks.value()) + 1);
    seen_[1].emplace_back(at(layout.spec(number).num_host_blocks.value()) + 1);
  }
}

void Replay::check(Scheduler& scheduler, const Memory& memory, const Oracle& oracle) {
  take(scheduler.take_kv_events(), oracle);
  std::size_t num_indexed = 0;
  for (const Partition& partition : scheduler.partitions()) {
    partition.each_group([&](const auto& group) {
      num_indexed += check_tier(0, group.number(), group.device(), memory, oracle);
      num_indexed += check_tier(1, group.number(), group.host(), memory, oracle);
    });
  }
  require(num_indexed == entries_.size(), "the events lead to", entries_.size(), "blocks, indexed are", num_indexed);
}

void Replay::take(const KvEvents& events, const Oracle& oracle) {
  require(events.rows.size() % KvEvents::kWidth == 0, "KV event rows", events.rows.size());
  std::span<const std::int64_t> rows(events.rows);
  std::span<const std::int32_t> token_ids(events.token_ids);
  for (; !rows.empty(); rows = rows.subspan(KvEvents::kWidth)) {
    require(rows[1] == 0 || rows[1] == 1, "tier", rows[1]);
    require(rows[2] >= 0 && rows[2] < layout_.num_numbers(), "KV event of group", rows[2]);
    const BlockHash hash = hash_in(rows, 3);
    const Entry entry(rows[1], rows[2], hash.high, hash.low);
    const bool stored = rows[0] == static_cast<std::int64_t>(KvEventKind::kStored);
    require(stored ? entries_.insert(entry).second : entries_.erase(entry) == 1, "KV event", rows[0], "tier", rows[1],
            "group", rows[2], "of a block that was", stored ? "there" : "not there");
    const std::size_t count = at(rows[7]);
    require(count <= token_ids.size(), "KV event tokens", token_ids.size(), "row", count);
    if (stored && rows[1] == 0) {
      const auto block = oracle.known().block(hash, layout_.spec(rows[2]).block_size.value());
      const auto told = token_ids.first(count);
      require(block.parent == hash_in(rows, 5), "KV event of group", rows[2], "names another parent");
      require(std::equal(told.begin(), told.end(), block.token_ids.begin(), block.token_ids.end()), "KV event of group",
              rows[2], "names other tokens");
    }
    token_ids = token_ids.subspan(count);
  }
  require(token_ids.empty(), "surplus KV event tokens", token_ids.size());
}

template <class Pool>
std::size_t Replay::check_tier(std::int64_t tier, std::int64_t number, const Pool& pool, const Memory& memory,
                               const Oracle& oracle) {
  std::size_t num_indexed = 0;
  for (std::int32_t value = 1; value <= pool.total().value(); ++value) {
    const auto hash = pool.indexed_as(typename Pool::P(value));
    if (!hash) {
      continue;
    }
    ++num_indexed;
    require(entries_.contains(Entry(tier, number, hash->high, hash->low)), "tier", tier, "group", number, "page", value,
            "is indexed and no event told it");
    const Memory::Page& page = tier == 0 ? memory.device(number, value) : memory.host(number, value);
    Seen& seen = seen_[at(tier)][at(number)][at(value)];
    if (seen.version == page.version && seen.hash == *hash) {
      continue;
    }
    const auto block = oracle.known().block(*hash, layout_.spec(number).block_size.value());
    require(page.cells == memory.image(number, block.history), "tier", tier, "group", number, "page", value,
            "is indexed with other contents than its hash says");
    seen = Seen{.version = page.version, .hash = *hash};
  }
  return num_indexed;
}

}  // namespace tokenspeed::control::sim
