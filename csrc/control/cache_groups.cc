// SPDX-License-Identifier: Apache-2.0
#include "cache_groups.h"

#include <utility>

#include "check.h"

namespace tokenspeed::control {

namespace {
constexpr Blocks kOne{1};
}

FullAttentionGroup::FullAttentionGroup(Blocks num_blocks, Tokens block_size, bool prefix_caching)
    : block_size_(block_size), prefix_caching_(prefix_caching), pool_(num_blocks), index_(num_blocks) {
  TS_CHECK(block_size >= Tokens(1), "block_size", block_size);
}

Blocks FullAttentionGroup::blocks_covering(Tokens tokens) const {
  return Blocks((tokens.value() + block_size_.value() - 1) / block_size_.value());
}

Blocks FullAttentionGroup::full_blocks(Tokens tokens) const { return Blocks(tokens.value() / block_size_.value()); }

PrefixMatch FullAttentionGroup::match(std::span<const BlockHash> hashes) const {
  PrefixMatch match;
  for (const BlockHash& hash : hashes) {
    const std::optional<DevicePage> page = index_.find(hash);
    if (!page) {
      break;
    }
    match.num_blocks += kOne;
    if (!pool_.is_shared(*page)) {
      match.num_only_cached += kOne;
    }
  }
  return match;
}

void FullAttentionGroup::share_prefix(std::span<const BlockHash> hashes, Blocks blocks, PageTable& table) {
  for (const BlockHash& hash : hashes.first(static_cast<std::size_t>(blocks.value()))) {
    const std::optional<DevicePage> page = index_.find(hash);
    TS_CHECK(page.has_value(), "block", table.size(), "of", blocks);
    table.append(pool_.share_indexed(*page));
  }
}

DevicePage FullAttentionGroup::grow(PageTable& table) {
  if (!pool_.has_free()) {
    index_.erase(pool_.evict_oldest());
  }
  table.append(pool_.take_free());
  return table.page(table.size() - kOne);
}

void FullAttentionGroup::seal_next(PageTable& table, const BlockHash& hash, const StepReceipt& receipt) {
  const SealedDevicePage& sealed = table.seal_next(pool_, receipt);
  if (prefix_caching_ && index_.insert(hash, sealed, receipt)) {
    pool_.mark_indexed(sealed, hash);
  }
}

void FullAttentionGroup::give_back(PageTable&& table, const Retirement& retirement) {
  PageTable last(std::move(table));
  last.give_back(pool_, retirement);
}

}  // namespace tokenspeed::control
