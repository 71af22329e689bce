// SPDX-License-Identifier: Apache-2.0
// One cache group with blocks of four tokens, and prompts to fill it with.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "cache_groups.h"
#include "kv_log.h"
#include "testing.h"
#include "token_hash.h"

namespace tokenspeed::control::testing {

inline constexpr Tokens kBlock{4};

// A prompt of full blocks; two seeds have no block in common.
class Prompt {
 public:
  explicit Prompt(std::int32_t seed, std::size_t num_blocks = 8) : ids_(num_blocks * 4), root_(hash_root("", "")) {
    std::iota(ids_.begin(), ids_.end(), seed * 1000);
    for (std::size_t block = 0; block < num_blocks; ++block) {
      hashes_.push_back(hash_block(block == 0 ? root_ : hashes_.back(), ids().subspan(4 * block, 4)));
    }
  }

  [[nodiscard]] std::span<const std::int32_t> ids() const { return ids_; }
  [[nodiscard]] BlockHashes hashes() const { return {.base = hashes_, .base_size = kBlock, .root = root_}; }

 private:
  std::vector<std::int32_t> ids_;
  BlockHash root_;
  std::vector<BlockHash> hashes_;
};

[[nodiscard]] inline CacheOptions options_with(KvLog& log, HostStore host_store, Tokens unit = kBlock) {
  return {.prefix_caching = true,
          .host_store = host_store,
          .base_size = kBlock,
          .unit = unit,
          .step_tokens = Tokens(8),
          .first_group = 0,
          .log = &log};
}

template <class Kind>
struct Rig {
  explicit Rig(const GroupSpec& spec, HostStore host_store = HostStore::kOnPressure)
      : group(Group(0), spec, options_with(log, host_store)) {}

  // A table whose blocks `first` and on are computed and published.
  [[nodiscard]] PageTable<Kind> fill(const Prompt& prompt, std::int64_t first, std::int64_t count) {
    PageTable<Kind> table;
    table.skip_to(Blocks(first));
    for (std::int64_t block = first; block < first + count; ++block) {
      const Tokens end = group.tokens_in(Blocks(block + 1));
      (void)group.grow(table, end);
      group.seal(table, end, prompt.hashes(), prompt.ids(), settling.ledger.receipt());
    }
    return table;
  }
  void give_back(PageTable<Kind>&& table) { group.give_back(std::move(table), settling.ledger.retirement(Seat(0))); }
  void publish(const Prompt& prompt, std::int64_t first, std::int64_t count) { give_back(fill(prompt, first, count)); }
  [[nodiscard]] std::int64_t resumable(const Prompt& prompt, std::int64_t boundary, bool use_host = false) const {
    return group.resumable(prompt.hashes(), Tokens(boundary), kBlock, use_host).value();
  }

  Settling settling;
  KvLog log{true};
  CacheGroup<Kind> group;
};

[[nodiscard]] inline GroupSpec full(std::int64_t num_blocks, std::int64_t num_host_blocks = 0) {
  return {.kind = GroupKind::kFull,
          .block_size = kBlock,
          .num_blocks = Blocks(num_blocks),
          .num_host_blocks = Blocks(num_host_blocks),
          .window = Tokens(0)};
}
[[nodiscard]] inline GroupSpec window(std::int64_t num_blocks, std::int64_t tokens) {
  return {.kind = GroupKind::kWindow,
          .block_size = kBlock,
          .num_blocks = Blocks(num_blocks),
          .num_host_blocks = Blocks(0),
          .window = Tokens(tokens)};
}
[[nodiscard]] inline GroupSpec recurrent(std::int64_t num_blocks, Tokens block_size = kBlock) {
  return {.kind = GroupKind::kRecurrent,
          .block_size = block_size,
          .num_blocks = Blocks(num_blocks),
          .num_host_blocks = Blocks(0),
          .window = Tokens(0)};
}

}  // namespace tokenspeed::control::testing
