// SPDX-License-Identifier: Apache-2.0
// 128-bit chained hashes of token blocks: a block's hash stands for all tokens up to its end, and for the namespace,
// adapter and contents of non-text spans. Not cryptographic; tenants are kept apart by salting their namespace.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "event.h"

namespace tokenspeed::control {

struct BlockHash {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  bool operator==(const BlockHash&) const = default;
};

[[nodiscard]] BlockHash hash_root(std::string_view name_space, std::string_view adapter);

[[nodiscard]] BlockHash hash_block(const BlockHash& parent, std::span<const std::int32_t> token_ids);

// Folds in the content of a span that touches the block, its length included: the same hash at another length is
// another content. offset: where the span starts relative to the block.
[[nodiscard]] BlockHash hash_content(const BlockHash& hash, const ContentSpan& span, std::int64_t offset);

}  // namespace tokenspeed::control
