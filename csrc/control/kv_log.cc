// SPDX-License-Identifier: Apache-2.0
#include "kv_log.h"

#include <bit>

namespace tokenspeed::control {

void KvLog::stored(TierCode tier, std::int64_t group, const BlockHash& hash, const BlockHash& parent,
                   std::span<const std::int32_t> token_ids) {
  if (!enabled_) {
    return;
  }
  push(KvEventKind::kStored, tier, group, hash, parent, token_ids.size());
  auto& ids = buffers_[current_].token_ids;
  ids.insert(ids.end(), token_ids.begin(), token_ids.end());
}

void KvLog::removed(TierCode tier, std::int64_t group, const BlockHash& hash) {
  if (enabled_) {
    push(KvEventKind::kRemoved, tier, group, hash, BlockHash{}, 0);
  }
}

void KvLog::push(KvEventKind kind, TierCode tier, std::int64_t group, const BlockHash& hash, const BlockHash& parent,
                 std::size_t num_tokens) {
  auto& rows = buffers_[current_].rows;
  rows.insert(rows.end(), {static_cast<std::int64_t>(kind), static_cast<std::int64_t>(tier), group,
                           std::bit_cast<std::int64_t>(hash.high), std::bit_cast<std::int64_t>(hash.low),
                           std::bit_cast<std::int64_t>(parent.high), std::bit_cast<std::int64_t>(parent.low),
                           static_cast<std::int64_t>(num_tokens)});
}

const KvEvents& KvLog::take() {
  const KvEvents& taken = buffers_[current_];
  current_ = 1 - current_;
  buffers_[current_].rows.clear();
  buffers_[current_].token_ids.clear();
  return taken;
}

}  // namespace tokenspeed::control
