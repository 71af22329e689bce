// SPDX-License-Identifier: Apache-2.0
// What each request must produce and when it must end, whatever happens around it. Told the same events and results as
// the plane, it says exactly which sequence events must come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "event.h"
#include "history.h"
#include "layout.h"
#include "scheduler.h"
#include "violation.h"

namespace tokenspeed::control::sim {

// No time comes after it.
constexpr std::int64_t kNoEnd = std::numeric_limits<std::int64_t>::max();

constexpr std::int64_t time_after(std::int64_t since_ms, std::int64_t ttl_ms) {
  return ttl_ms > kNoEnd - since_ms ? kNoEnd : since_ms + ttl_ms;
}

struct KeyOrder {
  bool operator()(const RequestKey& a, const RequestKey& b) const {
    return a.index != b.index ? a.index < b.index : a.generation < b.generation;
  }
};
template <class T>
using ByKey = std::map<RequestKey, T, KeyOrder>;

struct Request {
  Submit submit;
  std::vector<std::int32_t> token_ids;  // prompt and what was reported so far
  History root = 0;
  std::vector<History> history;  // after each token
  std::vector<BlockHash> hashes;
  std::int64_t limit = 0;
  FinishCode code = FinishCode::kNone;  // how it ended
  std::optional<std::int32_t> cached_len;
  std::optional<std::int64_t> kept;  // generated tokens that a Finish left
  bool may_hold = false;             // its pages may be held when it ends, or are
  std::optional<std::int64_t> retain_ms;
  // When its hold began, at the earliest and at the latest: time passes within a batch.
  std::optional<std::int64_t> held_since_ms;
  std::int64_t held_by_ms = 0;

  [[nodiscard]] std::int64_t prompt_len() const { return static_cast<std::int64_t>(submit.token_ids.size()); }
  [[nodiscard]] std::int64_t num_generated() const {
    return static_cast<std::int64_t>(token_ids.size()) - prompt_len();
  }
  // Tokens that a Finish may keep now.
  [[nodiscard]] std::int64_t most_kept() const { return kept.value_or(num_generated()); }
  [[nodiscard]] bool has_ended() const { return code != FinishCode::kNone; }
  [[nodiscard]] bool ended_well() const { return code == FinishCode::kStop || code == FinishCode::kLength; }
  [[nodiscard]] std::int64_t ttl_ms() const { return submit.retain ? submit.retain->ttl_ms : 0; }
  // When its hold may end, and when it must; only while it is held.
  [[nodiscard]] std::int64_t hold_may_end_ms() const {
    return retain_ms.value_or(time_after(held_since_ms.value_or(0), ttl_ms()));
  }
  [[nodiscard]] std::int64_t hold_must_end_ms() const { return retain_ms.value_or(time_after(held_by_ms, ttl_ms())); }
};

// A row's part of a step result. The tokens are those that the device accepted.
struct RowResult {
  RequestKey key;
  bool fault = false;
  std::vector<std::int32_t> token_ids;
};

class Oracle {
 public:
  explicit Oracle(const Layout& layout) : layout_(layout), known_(layout.base_size()) {}

  // What the plane was told, and what it refused.
  void apply(std::span<const Event> batch, std::span<const Refusal> refusals);
  void settle(std::span<const RowResult> rows);
  // What the plane reports must be what the last of these calls led to, no more and no less.
  void check(const SequenceEvents& events);

  [[nodiscard]] Request& at(const RequestKey& key);
  [[nodiscard]] const Request* find(const RequestKey& key) const;
  // Requests that have not ended, by index.
  [[nodiscard]] const std::map<std::int32_t, RequestKey>& live() const { return live_; }
  [[nodiscard]] const ByKey<Request>& requests() const { return requests_; }
  // Of the last apply or settle.
  [[nodiscard]] bool ended_now(const RequestKey& key) const { return ended_now_.contains(key); }
  [[nodiscard]] const KnownBlocks& known() const { return known_; }
  [[nodiscard]] std::int64_t now_ms() const { return now_ms_; }
  [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }

 private:
  struct Told {
    FinishCode code = FinishCode::kNone;
    std::size_t num_tokens = 0;
  };

  void add(const Submit& submit, bool refused);
  void end(Request& request, FinishCode code, std::size_t num_tokens);
  void apply_tick(const Tick& tick);
  void append(Request& request, std::int32_t token_id);
  [[nodiscard]] static FinishCode code_after(const Request& request);
  void check_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids);

  Layout layout_;
  KnownBlocks known_;
  ByKey<Request> requests_;
  std::map<std::int32_t, RequestKey> live_;
  ByKey<Told> told_;
  std::set<RequestKey, KeyOrder> ended_now_;
  std::int64_t now_ms_ = 0;
  std::int64_t num_tokens_ = 0;
};

}  // namespace tokenspeed::control::sim
