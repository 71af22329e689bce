// SPDX-License-Identifier: Apache-2.0
#include "sequence.h"

#include <algorithm>
#include <cstddef>

#include "check.h"

namespace tokenspeed::control {

namespace {

// Keeps a growing sequence from reallocating for a good while without holding memory for the longest one allowed.
constexpr std::int64_t kReserveAhead = 4096;

}  // namespace

Sequence::Sequence(Submit&& submit, Rank rank, Tokens total_limit)
    : request_(std::move(submit)), rank_(rank), prompt_len_(len()), total_limit_(total_limit) {
  const std::int64_t reserve = std::min(total_limit.value(), len().value() + kReserveAhead);
  request_.token_ids.reserve(static_cast<std::size_t>(reserve));
}

Grant Sequence::take_grant() { return std::move(grant()); }

Grant& Sequence::grant() {
  if (auto* prefilling = std::get_if<Prefilling>(&state_)) {
    return prefilling->grant_;
  }
  if (auto* decoding = std::get_if<Decoding>(&state_)) {
    return decoding->grant_;
  }
  auto* draining = std::get_if<Draining>(&state_);
  TS_CHECK(draining != nullptr, "request", key(), "owns nothing in state", state_.index());
  return draining->grant_;
}

void Sequence::admit(Grant&& grant, Tokens cached) {
  TS_CHECK(is_waiting(), "request", key(), "state", state_.index());
  TS_CHECK(cached < len() && num_pending_ == 0, "request", key(), "cached", cached, "len", len());
  computed_ = cached;
  planned_ = cached;
  if (!cached_len_) {
    cached_len_ = cached;
  }
  state_.emplace<Prefilling>(StateKey(), std::move(grant));
}

void Sequence::start_decoding() {
  TS_CHECK(is<Prefilling>(), "request", key(), "state", state_.index());
  Grant grant = take_grant();
  state_.emplace<Decoding>(StateKey(), std::move(grant));
}

void Sequence::drain_for_preemption() {
  TS_CHECK(is_running(), "request", key(), "state", state_.index());
  Grant grant = take_grant();
  state_.emplace<Draining>(StateKey(), std::move(grant), std::nullopt);
}

void Sequence::drain_to_end(FinishCode reason) {
  TS_CHECK(!has_ended() && !is_waiting(), "request", key(), "state", state_.index());
  Grant grant = take_grant();
  state_.emplace<Draining>(StateKey(), std::move(grant), reason);
}

void Sequence::end_unseated(FinishCode reason) {
  TS_CHECK(is_waiting(), "request", key(), "state", state_.index());
  state_.emplace<Done>(Done{.reason = reason});
}

Grant Sequence::leave(const Retirement& retirement) {
  auto* draining = std::get_if<Draining>(&state_);
  TS_CHECK(draining != nullptr, "request", key(), "state", state_.index());
  TS_CHECK(draining->grant_.seat() == retirement.seat(), "seat", draining->grant_.seat());
  Grant grant = std::move(draining->grant_);
  const std::optional<FinishCode> reason = draining->reason_;
  if (reason) {
    state_.emplace<Done>(Done{.reason = *reason});
  } else {
    TS_CHECK(num_pending_ == 0, "request", key(), "pending", num_pending_);
    state_.emplace<Preempted>();
    computed_ = Tokens(0);
    planned_ = Tokens(0);
  }
  return grant;
}

void Sequence::plan_rows(Tokens query_len, bool samples) {
  planned_ += query_len;
  num_pending_ += samples ? 1 : 0;
  TS_CHECK(planned_ < total_limit_, "request", key(), "planned", planned_, "limit", total_limit_);
}

void Sequence::commit(Tokens query_len, bool sampled) {
  computed_ += query_len;
  num_pending_ -= sampled ? 1 : 0;
  TS_CHECK(computed_ <= planned_ && num_pending_ >= 0, "request", key(), "computed", computed_, "planned", planned_);
}

FinishCode Sequence::accept(std::int32_t token_id) {
  TS_CHECK(len() < total_limit_, "request", key(), "len", len(), "limit", total_limit_);
  request_.token_ids.push_back(token_id);
  const auto& ends = request_.end_token_ids;
  if (num_generated() > request_.min_new_tokens && std::find(ends.begin(), ends.end(), token_id) != ends.end()) {
    return FinishCode::kStop;
  }
  return len() == total_limit_ ? FinishCode::kLength : FinishCode::kNone;
}

bool Sequence::has_ended() const {
  const auto* draining = std::get_if<Draining>(&state_);
  return is<Done>() || (draining != nullptr && draining->reason_.has_value());
}

void Sequence::forfeit(const Teardown& teardown) noexcept {
  if (auto* prefilling = std::get_if<Prefilling>(&state_)) {
    prefilling->grant_.forfeit(teardown);
  } else if (auto* decoding = std::get_if<Decoding>(&state_)) {
    decoding->grant_.forfeit(teardown);
  } else if (auto* draining = std::get_if<Draining>(&state_)) {
    draining->grant_.forfeit(teardown);
  }
}

std::span<const BlockHash> Sequence::block_hashes(Blocks count, Tokens block_size) {
  const auto wanted = static_cast<std::size_t>(count.value());
  const auto width = static_cast<std::size_t>(block_size.value());
  TS_CHECK(wanted * width <= request_.token_ids.size(), "request", key(), "blocks", count, "len", len());
  while (hashes_.size() < wanted) {
    const std::size_t start = hashes_.size() * width;
    const BlockHash parent = hashes_.empty() ? hash_root(request_.name_space, request_.adapter) : hashes_.back();
    BlockHash hash = hash_block(parent, token_ids().subspan(start, width));
    for (const ContentSpan& span : request_.spans) {
      const std::int64_t offset = span.start.value() - static_cast<std::int64_t>(start);
      if (offset < block_size.value() && offset + span.length.value() > 0) {
        hash = hash_content(hash, span, offset);
      }
    }
    hashes_.push_back(hash);
  }
  return std::span<const BlockHash>(hashes_).first(wanted);
}

}  // namespace tokenspeed::control
