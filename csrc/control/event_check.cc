// SPDX-License-Identifier: Apache-2.0
#include "event_check.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <variant>

#include "check.h"

namespace tokenspeed::control {

namespace {

// An index is a place in a table, so a wild one must not make the table huge.
constexpr std::int32_t kMaxRequestIndex = 1 << 20;
constexpr std::int32_t kMaxPriority = 1 << 20;

// Whatever the numbers are, no sum of two of them is made before both are known to be small.
void check_spans(const Submit& submit) {
  const Tokens len(std::ssize(submit.token_ids));
  Tokens end;
  for (const ContentSpan& span : submit.spans) {
    TS_CHECK(span.start >= end && span.start <= len && span.length >= Tokens(1) && span.length <= len - span.start,
             "request", submit.key, "span", span.start, span.length, "after", end, "in tokens", len);
    end = span.start + span.length;
  }
}

void check_submit(const Submit& submit, const EventContext& context) {
  const RequestKey& key = submit.key;
  TS_CHECK(!submit.token_ids.empty(), "request", key, "has no tokens");
  const auto negative = std::find_if(submit.token_ids.begin(), submit.token_ids.end(), [](auto id) { return id < 0; });
  TS_CHECK(negative == submit.token_ids.end(), "request", key, "token", negative - submit.token_ids.begin(), "is",
           *negative);
  TS_CHECK(submit.max_new_tokens >= Tokens(1), "request", key, "max_new_tokens", submit.max_new_tokens);
  TS_CHECK(submit.min_new_tokens >= Tokens(0), "request", key, "min_new_tokens", submit.min_new_tokens);
  TS_CHECK(submit.priority >= -kMaxPriority && submit.priority <= kMaxPriority, "request", key, submit.priority);
  TS_CHECK(!submit.match_limit || *submit.match_limit >= Tokens(0), "request", key, *submit.match_limit);
  TS_CHECK(!submit.deadline_ms || *submit.deadline_ms >= 0, "request", key, "deadline_ms", *submit.deadline_ms);
  TS_CHECK(submit.draft_width >= 0 && submit.draft_width <= context.most_drafts, "request", key, "draft_width",
           submit.draft_width, "at most", context.most_drafts);
  const std::int32_t hint = submit.partition_hint.value_or(0);
  TS_CHECK(hint >= 0 && hint < context.num_partitions, "request", key, "no such partition", hint);
  TS_CHECK(!submit.retain || submit.retain->ttl_ms >= 0, "request", key, "ttl_ms", submit.retain->ttl_ms);
  check_spans(submit);
}

class BatchCheck {
 public:
  explicit BatchCheck(const EventContext& context) : context_(context), now_ms_(context.now_ms) {}

  void operator()(const Submit& submit) {
    const RequestKey key = submit.key;
    TS_CHECK(key.index >= 0 && key.index < kMaxRequestIndex, "request", key);
    TS_CHECK(key.generation > latest(key.index), "request", key, "latest generation", latest(key.index));
    // An index that this very batch took is live, and so is one of a request that has not ended.
    TS_CHECK(!batch_.contains(key.index) && !context_.is_live(key.index), "request", key, "index is in use");
    check_submit(submit, context_);
    batch_.emplace(key.index, key.generation);
  }

  void operator()(const Cancel& cancel) const { check_known(cancel.key); }

  void operator()(const Finish& finish) const {
    check_known(finish.key);
    const auto found = batch_.find(finish.key.index);
    const bool is_new = found != batch_.end() && found->second == finish.key.generation;
    const Tokens most = is_new ? Tokens(0) : context_.most_kept(finish.key);
    TS_CHECK(finish.keep_tokens >= Tokens(0) && finish.keep_tokens <= most, "request", finish.key, "keep_tokens",
             finish.keep_tokens, "generated", most);
  }

  void operator()(const Retain& retain) const {
    check_known(retain.key);
    TS_CHECK(retain.deadline_ms >= 0, "request", retain.key, "deadline_ms", retain.deadline_ms);
  }

  void operator()(const Release& release) const { check_known(release.key); }

  // An acknowledgement may come late, twice or for a lease that is unknown here; none of these is an error.
  void operator()(const TransferDone&) const {}

  void operator()(const Tick& tick) {
    TS_CHECK(tick.now_ms >= now_ms_, "now_ms", tick.now_ms, "before", now_ms_);
    now_ms_ = tick.now_ms;
  }

 private:
  [[nodiscard]] std::int32_t latest(std::int32_t index) const {
    const auto found = batch_.find(index);
    return found != batch_.end() ? found->second : context_.generation(index);
  }

  // The request was submitted at some time; that it has ended meanwhile is an ordinary race.
  void check_known(const RequestKey& key) const {
    TS_CHECK(key.index >= 0 && key.index < kMaxRequestIndex && key.generation >= 0, "request", key);
    TS_CHECK(key.generation <= latest(key.index), "request", key, "was never submitted; latest", latest(key.index));
  }

  const EventContext& context_;
  std::map<std::int32_t, std::int32_t> batch_;
  std::int64_t now_ms_;
};

}  // namespace

void check_events(std::span<const Event> events, const EventContext& context) {
  BatchCheck check(context);
  for (const Event& event : events) {
    std::visit(check, event);
  }
}

}  // namespace tokenspeed::control
