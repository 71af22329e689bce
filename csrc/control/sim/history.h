// SPDX-License-Identifier: Apache-2.0
// What a position stands for: a hash of the namespace, the adapter, and of all tokens and contents so far. It is what
// the device keeps as "K/V" of a position, and the next token is a function of it, so that batching, caching, copying
// and preemption may not change it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "event.h"
#include "token_hash.h"

namespace tokenspeed::control::sim {

using History = std::uint64_t;

inline constexpr std::int32_t kVocabulary = 40;

[[nodiscard]] History root_history(const Submit& submit);
[[nodiscard]] History extend(History before, std::int32_t token_id, std::uint64_t content);
[[nodiscard]] std::int32_t next_token(History history);
// Of the span that covers the position; 0 where none does.
[[nodiscard]] std::uint64_t content_at(std::span<const ContentSpan> spans, std::int64_t position);

// What each block hash stands for, of all prompts and tokens that were ever told.
class KnownBlocks {
 public:
  struct Block {
    BlockHash parent;
    std::vector<History> history;
    std::vector<std::int32_t> token_ids;
  };

  explicit KnownBlocks(std::int64_t base_size) : base_size_(base_size) {}

  // hashes: of the base blocks known so far; those that have become full are added.
  void extend(const Submit& submit, std::span<const std::int32_t> token_ids, std::span<const History> history,
              std::vector<BlockHash>& hashes);
  // The block of `len` tokens that ends with the hash. Throws Violation where nobody ever had it.
  [[nodiscard]] Block block(const BlockHash& hash, std::int64_t len) const;

 private:
  struct Hash {
    std::size_t operator()(const BlockHash& hash) const { return static_cast<std::size_t>(hash.low ^ hash.high); }
  };

  std::int64_t base_size_;
  std::unordered_map<BlockHash, Block, Hash> blocks_;  // never iterated
};

}  // namespace tokenspeed::control::sim
