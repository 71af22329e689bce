// SPDX-License-Identifier: Apache-2.0
#include "sequence.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "check.h"

namespace tokenspeed::control {

namespace {
constexpr Tokens kOne{1};
}

Sequence::Sequence(Submit&& submit, Rank rank, Tokens total_limit)
    : request_(std::move(submit)),
      rank_(rank),
      prompt_len_(len()),
      total_limit_(total_limit),
      expires_at_(std::numeric_limits<std::int64_t>::max()),
      root_(hash_root(request_.name_space, request_.adapter)) {
  if (request_.retain) {
    hold_ = HoldWish{.ttl_ms = request_.retain->ttl_ms, .priority = request_.retain->priority, .deadline_ms = {}};
  }
}

Grant& Sequence::grant() {
  return std::visit(
      [&]<class S>(S& state) -> Grant& {
        if constexpr (std::is_base_of_v<Seated, S>) {
          return state.grant_;
        } else {
          TS_CHECK(is_seated(), "request", key(), "owns no seat as", S::kName);
          std::abort();
        }
      },
      state_);
}

const HeldPages& Sequence::held() const {
  const auto* held = std::get_if<Held>(&state_);
  TS_CHECK(held != nullptr, "request", key(), "state", state_.index());
  return held->pages_;
}

const std::string& Sequence::session() const {
  const std::optional<Retention>& retain = request_.retain;
  TS_CHECK(retain.has_value(), "request", key(), "belongs to no session");
  return retain->session;
}

bool Sequence::has_ended() const {
  const auto* draining = std::get_if<Draining>(&state_);
  return is<Done>() || is<Held>() || is<SendingKv>() || (draining != nullptr && draining->fate_ != Fate::kPreempted);
}

void Sequence::forfeit(const Teardown& teardown) noexcept {
  const auto let_go = [&](auto*... seated) { ((seated != nullptr ? seated->grant_.forfeit(teardown) : void()), ...); };
  let_go(std::get_if<AwaitingTransfer>(&state_), std::get_if<Prefilling>(&state_), std::get_if<Decoding>(&state_),
         std::get_if<SendingKv>(&state_), std::get_if<Draining>(&state_));
  if (auto* held = std::get_if<Held>(&state_)) {
    held->pages_.forfeit(teardown);
  }
}

void Sequence::note_admission(Tokens boundary) {
  TS_CHECK(boundary < len() && num_pending_ == 0, "request", key(), "boundary", boundary, "len", len());
  computed_ = boundary;
  planned_low_ = boundary;
  planned_high_ = boundary;
  seals_at_ = Tokens(0);
  if (!cached_len_) {
    cached_len_ = boundary;
  }
  // Nothing that grows while it runs may allocate then.
  request_.token_ids.reserve(static_cast<std::size_t>(total_limit_.value()));
}

void Sequence::plan_prefill(Tokens query_len, bool samples) {
  planned_low_ += query_len;
  planned_high_ += query_len;
  num_pending_ += samples ? 1 : 0;
  TS_CHECK(planned_high_ < total_limit_, "request", key(), "planned", planned_high_, "limit", total_limit_);
}

void Sequence::plan_decode(std::int32_t draft_len) {
  planned_low_ += kOne;
  planned_high_ += Tokens(1 + std::int64_t{draft_len});
  ++num_pending_;
  TS_CHECK(planned_high_ < total_limit_, "request", key(), "planned", planned_high_, "limit", total_limit_);
}

void Sequence::commit_prefill(Tokens query_len, bool sampled) {
  computed_ += query_len;
  num_pending_ -= sampled ? 1 : 0;
  TS_CHECK(computed_ <= planned_low_ && num_pending_ >= 0, "request", key(), "computed", computed_, planned_low_);
}

void Sequence::commit_decode(std::int32_t draft_len, std::int32_t num_accepted) {
  TS_CHECK(num_accepted >= 1 && num_accepted <= 1 + draft_len, "request", key(), "accepted", num_accepted, draft_len);
  computed_ += Tokens(num_accepted);
  // What was certain was one token; the width that was not accepted is given back.
  planned_low_ += Tokens(num_accepted - 1);
  planned_high_ -= Tokens(1 + std::int64_t{draft_len} - num_accepted);
  --num_pending_;
  TS_CHECK(computed_ <= planned_low_ && planned_low_ <= planned_high_ && num_pending_ >= 0, "request", key(),
           "computed", computed_, planned_low_, planned_high_);
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

void Sequence::keep_generated(Tokens keep_tokens) {
  TS_CHECK(keep_tokens <= num_generated(), "request", key(), "keep", keep_tokens, "of", num_generated());
  request_.token_ids.resize(static_cast<std::size_t>((prompt_len_ + keep_tokens).value()));
}

void Sequence::restart() {
  TS_CHECK(is<Preempted>() && num_pending_ == 0, "request", key(), "pending", num_pending_);
  computed_ = Tokens(0);
  planned_low_ = Tokens(0);
  planned_high_ = Tokens(0);
  set_pages(Tokens(0), Tokens(std::numeric_limits<std::int64_t>::max()));
}

void Sequence::retain_until(std::int64_t deadline_ms) {
  if (hold_) {
    hold_->deadline_ms = deadline_ms;
  }
}

void Sequence::set_pages(Tokens covered, Tokens expires_at) {
  covered_ = covered;
  expires_at_ = expires_at;
}

std::int32_t Sequence::draft_room() const {
  const std::int64_t room = total_limit_.value() - planned_high_.value() - 2;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(room, 0, request_.draft_width));
}

BlockHashes Sequence::block_hashes(Tokens len, Tokens base_size) {
  const auto width = static_cast<std::size_t>(base_size.value());
  const auto count = static_cast<std::size_t>(len.value()) / width;
  TS_CHECK(len <= this->len(), "request", key(), "asked", len, "len", this->len());
  extend_hashes(count, width);
  return BlockHashes{.base = std::span<const BlockHash>(hashes_).first(count), .base_size = base_size, .root = root_};
}

void Sequence::extend_hashes(std::size_t count, std::size_t width) {
  if (hashes_.size() >= count) {
    return;
  }
  hashes_.reserve(static_cast<std::size_t>(total_limit_.value()) / width + 1);
  while (hashes_.size() < count) {
    const std::size_t start = hashes_.size() * width;
    BlockHash hash = hash_block(hashes_.empty() ? root_ : hashes_.back(), token_ids().subspan(start, width));
    for (const ContentSpan& span : request_.spans) {
      const std::int64_t offset = span.start.value() - static_cast<std::int64_t>(start);
      if (offset < static_cast<std::int64_t>(width) && offset + span.length.value() > 0) {
        hash = hash_content(hash, span, offset);
      }
    }
    hashes_.push_back(hash);
  }
}

}  // namespace tokenspeed::control
