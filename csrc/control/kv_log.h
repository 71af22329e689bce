// SPDX-License-Identifier: Apache-2.0
// What the prefix index gains and loses, in order, for routers that keep a copy of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control {

enum class KvEventKind : std::int64_t { kStored = 0, kRemoved = 1 };
enum class TierCode : std::int64_t { kDevice = 0, kHost = 1 };

// rows: kind, tier, partition * number of groups + group, hash (high, low), parent's hash (high, low), number of
// tokens; flat, eight a row.
struct KvEvents {
  static constexpr std::size_t kWidth = 8;
  std::vector<std::int64_t> rows;
  std::vector<std::int32_t> token_ids;
};

class KvLog {
 public:
  explicit KvLog(bool enabled) : enabled_(enabled) {}

  // group: numbered over all partitions. token_ids: of the block, where they are known.
  void stored(TierCode tier, std::int64_t group, const BlockHash& hash, const BlockHash& parent,
              std::span<const std::int32_t> token_ids);
  void removed(TierCode tier, std::int64_t group, const BlockHash& hash);

  // What was logged since the last call; valid until the next one.
  [[nodiscard]] const KvEvents& take();

 private:
  void push(KvEventKind kind, TierCode tier, std::int64_t group, const BlockHash& hash, const BlockHash& parent,
            std::size_t num_tokens);

  bool enabled_;
  std::array<KvEvents, 2> buffers_;
  std::size_t current_ = 0;
};

}  // namespace tokenspeed::control
