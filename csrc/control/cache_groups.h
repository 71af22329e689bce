// SPDX-License-Identifier: Apache-2.0
// How a kind of layer caches: how many tokens a block covers, which blocks match a prompt, and who evicts what.
// Full attention keeps every block of a sequence and may resume at any block boundary.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "block_pool.h"
#include "page_table.h"
#include "prefix_index.h"
#include "types.h"

namespace tokenspeed::control {

// What the index holds of a prompt, counted before anything is taken.
struct PrefixMatch {
  Blocks num_blocks;
  // Of those, blocks that nobody uses now: sharing them takes from what is available.
  Blocks num_only_cached;
};

class FullAttentionGroup {
 public:
  FullAttentionGroup(Blocks num_blocks, Tokens block_size, bool prefix_caching);

  [[nodiscard]] Blocks blocks_covering(Tokens tokens) const;
  [[nodiscard]] Blocks full_blocks(Tokens tokens) const;
  [[nodiscard]] Tokens tokens_in(Blocks blocks) const { return Tokens(blocks.value() * block_size_.value()); }
  [[nodiscard]] Tokens block_size() const { return block_size_; }
  [[nodiscard]] Tokens capacity() const { return tokens_in(pool_.total()); }
  [[nodiscard]] Blocks available() const { return pool_.available(); }
  [[nodiscard]] bool prefix_caching() const { return prefix_caching_; }

  [[nodiscard]] PrefixMatch match(std::span<const BlockHash> hashes) const;
  // Shares the first `blocks` matched blocks into the table.
  void share_prefix(std::span<const BlockHash> hashes, Blocks blocks, PageTable& table);
  // One writable page more; evicts the oldest cached page where no page is free. available() must be above 0.
  DevicePage grow(PageTable& table);
  void seal_next(PageTable& table, const BlockHash& hash, const StepReceipt& receipt);
  void give_back(PageTable&& table, const Retirement& retirement);

  [[nodiscard]] const BlockPool& pool() const { return pool_; }
  [[nodiscard]] const PrefixIndex& index() const { return index_; }

 private:
  Tokens block_size_;
  bool prefix_caching_;
  BlockPool pool_;
  PrefixIndex index_;
};

}  // namespace tokenspeed::control
