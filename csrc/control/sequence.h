// SPDX-License-Identifier: Apache-2.0
// One request's life: its state, its tokens, and how far their K/V is computed and planned.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "check.h"
#include "event.h"
#include "policy.h"
#include "states.h"
#include "token_hash.h"
#include "transitions.h"
#include "types.h"

namespace tokenspeed::control {

// The wish to be held after a good end. deadline_ms: what a Retain said.
struct HoldWish {
  std::int64_t ttl_ms = 0;
  std::int32_t priority = 0;
  std::optional<std::int64_t> deadline_ms;
};

class Sequence {
 public:
  Sequence(Submit&& submit, Rank rank, Tokens total_limit);

  // Moves the state as Transitions says; a pair that is illegal is a CheckError.
  template <class Signal>
  void handle(Signal&& incoming);

  // What the planner and the results of steps move forward. draft_len: tokens beyond the one that is certain.
  void note_admission(Tokens boundary);
  void plan_prefill(Tokens query_len, bool samples);
  void plan_decode(std::int32_t draft_len);
  void commit_prefill(Tokens query_len, bool sampled);
  void commit_decode(std::int32_t draft_len, std::int32_t num_accepted);
  // Adds a generated token and says whether it ends the request.
  [[nodiscard]] FinishCode accept(std::int32_t token_id);
  // The history ends after so many generated tokens.
  void keep_generated(Tokens keep_tokens);
  // What was computed is lost with the pages.
  void restart();
  void note_failed_load() { uses_host_ = false; }
  void note_local() { request_.remote = Remote::kNone; }
  void retain_until(std::int64_t deadline_ms);
  // The number of the one timer that it may have.
  void set_timer(std::optional<std::int64_t> number) { timer_ = number; }
  void release_hold() { hold_.reset(); }
  // How far the pages reach, and from where on some expire.
  void set_pages(Tokens covered, Tokens expires_at);
  // Nothing more can be sealed before so many tokens are computed.
  void set_seals_at(Tokens computed) { seals_at_ = computed; }

  [[nodiscard]] const State& state() const { return state_; }
  template <class S>
  [[nodiscard]] bool is() const {
    return std::holds_alternative<S>(state_);
  }
  [[nodiscard]] bool is_waiting() const { return is<Queued>() || is<Preempted>(); }
  [[nodiscard]] bool is_running() const { return is<Prefilling>() || is<Decoding>(); }
  [[nodiscard]] bool is_seated() const {
    return is_running() || is<AwaitingTransfer>() || is<SendingKv>() || is<Draining>();
  }
  // Its end was told; results that are still to come are ignored.
  [[nodiscard]] bool has_ended() const;
  [[nodiscard]] Grant& grant();
  [[nodiscard]] const Grant& grant() const { return const_cast<Sequence&>(*this).grant(); }
  [[nodiscard]] const HeldPages& held() const;
  void forfeit(const Teardown& teardown) noexcept;

  [[nodiscard]] RequestKey key() const { return request_.key; }
  [[nodiscard]] const Submit& request() const { return request_; }
  // Of a request that was submitted with a retention.
  [[nodiscard]] const std::string& session() const;
  [[nodiscard]] Rank rank() const { return rank_; }
  [[nodiscard]] std::span<const std::int32_t> token_ids() const { return request_.token_ids; }
  [[nodiscard]] Tokens len() const { return Tokens(static_cast<std::int64_t>(request_.token_ids.size())); }
  [[nodiscard]] Tokens total_limit() const { return total_limit_; }
  [[nodiscard]] Tokens prompt_len() const { return prompt_len_; }
  [[nodiscard]] Tokens num_generated() const { return len() - prompt_len_; }
  // K/V that successful steps have written, of tokens that count.
  [[nodiscard]] Tokens computed() const { return std::min(computed_, len()); }
  // The same once everything in flight has come: at least, and at most.
  [[nodiscard]] Tokens planned_low() const { return planned_low_; }
  [[nodiscard]] Tokens planned_high() const { return planned_high_; }
  [[nodiscard]] Tokens covered() const { return covered_; }
  [[nodiscard]] Tokens seals_at() const { return seals_at_; }
  [[nodiscard]] bool has_expired_pages() const { return computed_ >= expires_at_; }
  [[nodiscard]] std::optional<Tokens> cached_len() const { return cached_len_; }
  [[nodiscard]] bool uses_host() const { return uses_host_; }
  [[nodiscard]] const std::optional<HoldWish>& hold() const { return hold_; }
  [[nodiscard]] std::optional<std::int64_t> timer() const { return timer_; }
  // False once the steps in flight may already reach a limit.
  [[nodiscard]] bool wants_decode() const { return planned_high_ + Tokens(1) < total_limit_; }
  // Tokens beyond the certain one that a decode row may still draft.
  [[nodiscard]] std::int32_t draft_room() const;

  // Chained hashes of the full base blocks among the first `len` known tokens, made when first asked for.
  [[nodiscard]] BlockHashes block_hashes(Tokens len, Tokens base_size);

 private:
  void extend_hashes(std::size_t count, std::size_t width);

  Submit request_;
  Rank rank_;
  Tokens prompt_len_;
  Tokens total_limit_;
  Tokens computed_;
  Tokens planned_low_;
  Tokens planned_high_;
  Tokens covered_;
  Tokens expires_at_;
  Tokens seals_at_;
  std::int64_t num_pending_ = 0;  // sampling rows in flight
  std::optional<Tokens> cached_len_;
  std::optional<HoldWish> hold_;
  std::optional<std::int64_t> timer_;
  bool uses_host_ = true;
  BlockHash root_;
  std::vector<BlockHash> hashes_;
  State state_;
};

template <class Result>
struct IsMove : std::false_type {};
template <class... Next>
struct IsMove<To<Next...>> : std::true_type {};
template <class Result>
struct IllegalReason {
  static constexpr bool kIllegal = false;
};
template <Why Reason>
struct IllegalReason<Illegal<Reason>> {
  static constexpr bool kIllegal = true;
  static constexpr std::string_view kWhy = Reason.view();
};

template <class Signal>
void Sequence::handle(Signal&& incoming) {
  std::visit(
      [&]<class S>(S& state) {
        using Result = decltype(Transitions::on(std::move(state), std::forward<Signal>(incoming)));
        if constexpr (IsMove<Result>::value) {
          Result result = Transitions::on(std::move(state), std::forward<Signal>(incoming));
          std::visit([&]<class N>(N& next) { state_.template emplace<N>(std::move(next)); }, result.next);
        } else if constexpr (IllegalReason<Result>::kIllegal) {
          constexpr bool kLegal = !IllegalReason<Result>::kIllegal;
          TS_CHECK(kLegal, "request", key(), S::kName, "got", std::remove_cvref_t<Signal>::kName,
                   IllegalReason<Result>::kWhy);
        }
      },
      state_);
}

}  // namespace tokenspeed::control
