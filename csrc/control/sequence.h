// SPDX-License-Identifier: Apache-2.0
// One request's life. Its state is a variant whose alternatives own the seat and the pages; a state that owns any can
// only be made from a Grant, and only admission mints one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "event.h"
#include "ledger.h"
#include "page_table.h"
#include "policy.h"
#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control {

class AdmissionKey {
  friend class Admission;
  AdmissionKey() = default;
};

// A seat and a page table.
class Grant {
 public:
  Grant(AdmissionKey, SeatHold&& seat, PageTable&& pages) : seat_(std::move(seat)), pages_(std::move(pages)) {}
  Grant(Grant&&) noexcept = default;
  Grant& operator=(Grant&&) = delete;
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  ~Grant() = default;

  [[nodiscard]] Seat seat() const { return seat_.seat(); }
  [[nodiscard]] PageTable& pages() { return pages_; }
  [[nodiscard]] const PageTable& pages() const { return pages_; }

  // The parts, once no step in flight uses them.
  [[nodiscard]] SeatHold leave_seat(const Retirement&) { return std::move(seat_); }
  [[nodiscard]] PageTable leave_pages(const Retirement&) { return std::move(pages_); }
  void forfeit(const Teardown& teardown) noexcept {
    seat_.forfeit(teardown);
    pages_.forfeit(teardown);
  }

 private:
  SeatHold seat_;
  PageTable pages_;
};

class StateKey {
  friend class Sequence;
  StateKey() = default;
};

struct Queued {};
struct Preempted {};
struct Done {
  FinishCode reason = FinishCode::kNone;
};

// The prompt (and, after a preemption, what was generated) is being computed.
class Prefilling {
 public:
  Prefilling(StateKey, Grant&& grant) : grant_(std::move(grant)) {}

 private:
  friend class Sequence;
  Grant grant_;
};

// All known tokens are computed or planned; each step adds one.
class Decoding {
 public:
  Decoding(StateKey, Grant&& grant) : grant_(std::move(grant)) {}

 private:
  friend class Sequence;
  Grant grant_;
};

// Waits until no step in flight uses its seat; then it is Done with `reason`, or Preempted where there is none.
class Draining {
 public:
  Draining(StateKey, Grant&& grant, std::optional<FinishCode> reason) : grant_(std::move(grant)), reason_(reason) {}

 private:
  friend class Sequence;
  Grant grant_;
  std::optional<FinishCode> reason_;
};

class Sequence {
 public:
  using State = std::variant<Queued, Prefilling, Decoding, Preempted, Draining, Done>;

  Sequence(Submit&& submit, Rank rank, Tokens total_limit);

  // Verbs: each is allowed in the states it names and checks that.
  void admit(Grant&& grant, Tokens cached);                 // Queued, Preempted → Prefilling
  void start_decoding();                                    // Prefilling → Decoding
  void drain_for_preemption();                              // Prefilling, Decoding → Draining
  void drain_to_end(FinishCode reason);                     // Prefilling, Decoding, Draining → Draining
  void end_unseated(FinishCode reason);                     // Queued, Preempted → Done
  [[nodiscard]] Grant leave(const Retirement& retirement);  // Draining → Done, Preempted

  // What the planner and the results of steps move forward.
  void plan_rows(Tokens query_len, bool samples);
  void commit(Tokens query_len, bool sampled);
  // Adds a generated token and says whether it ends the request.
  [[nodiscard]] FinishCode accept(std::int32_t token_id);

  [[nodiscard]] const State& state() const { return state_; }
  template <class S>
  [[nodiscard]] bool is() const {
    return std::holds_alternative<S>(state_);
  }
  [[nodiscard]] bool is_waiting() const { return is<Queued>() || is<Preempted>(); }
  [[nodiscard]] bool is_running() const { return is<Prefilling>() || is<Decoding>(); }
  // Its reason is known; results that are still to come are ignored.
  [[nodiscard]] bool has_ended() const;
  [[nodiscard]] Grant& grant();
  [[nodiscard]] const Grant& grant() const { return const_cast<Sequence&>(*this).grant(); }
  void forfeit(const Teardown& teardown) noexcept;

  [[nodiscard]] RequestKey key() const { return request_.key; }
  [[nodiscard]] const Submit& request() const { return request_; }
  [[nodiscard]] Rank rank() const { return rank_; }
  [[nodiscard]] std::span<const std::int32_t> token_ids() const { return request_.token_ids; }
  [[nodiscard]] Tokens len() const { return Tokens(static_cast<std::int64_t>(request_.token_ids.size())); }
  [[nodiscard]] Tokens prompt_len() const { return prompt_len_; }
  [[nodiscard]] Tokens num_generated() const { return len() - prompt_len_; }
  [[nodiscard]] Tokens computed() const { return computed_; }
  [[nodiscard]] Tokens planned() const { return planned_; }
  [[nodiscard]] std::optional<Tokens> cached_len() const { return cached_len_; }
  // False once the steps in flight already reach a limit.
  [[nodiscard]] bool wants_decode() const { return len() + Tokens(num_pending_) < total_limit_; }

  // Hashes of the first `count` full blocks of known tokens, made when first asked for.
  [[nodiscard]] std::span<const BlockHash> block_hashes(Blocks count, Tokens block_size);

 private:
  [[nodiscard]] Grant take_grant();

  Submit request_;
  Rank rank_;
  Tokens prompt_len_;
  Tokens total_limit_;
  // K/V that successful steps have written, and that plus what is in flight.
  Tokens computed_;
  Tokens planned_;
  std::int64_t num_pending_ = 0;
  std::optional<Tokens> cached_len_;
  std::vector<BlockHash> hashes_;
  State state_;
};

}  // namespace tokenspeed::control
