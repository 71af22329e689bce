// SPDX-License-Identifier: Apache-2.0
// The control plane: events in, plans out, results in, sequence events out. A pure state machine: the same calls give
// the same plans on any machine. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "cache_groups.h"
#include "event.h"
#include "ledger.h"
#include "plan.h"
#include "policy.h"
#include "sequence.h"
#include "types.h"

namespace tokenspeed::control {

// num_blocks: pages 1 .. num_blocks may be used; page 0 is the null page and comes on top.
struct Config {
  std::int64_t num_blocks = 0;
  std::int64_t block_size = 0;
  std::int32_t max_num_seqs = 0;
  std::int64_t max_num_batched_tokens = 0;
  std::int64_t max_model_len = 0;
  std::int64_t ageing_steps = 0;
  bool prefix_caching = true;
};

struct Stats {
  std::int64_t num_running = 0;
  std::int64_t num_waiting = 0;
  std::int64_t num_held = 0;
  std::int64_t used_blocks = 0;
  std::int64_t cached_blocks = 0;
  std::int64_t total_blocks = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t prefix_query_tokens = 0;
  std::int64_t prefix_hit_tokens = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t generated_tokens = 0;
  std::int64_t num_steps = 0;
};

// rows: request index, generation, number of tokens, FinishCode, cached_len; flat, five a row.
struct SequenceEvents {
  std::vector<std::int32_t> rows;
  std::vector<std::int32_t> token_ids;
};

class Scheduler {
 public:
  explicit Scheduler(const Config& config);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  Scheduler(Scheduler&&) = delete;
  Scheduler& operator=(Scheduler&&) = delete;
  ~Scheduler();

  // Events wait for apply(), which checks all of them before it applies any. Where one is invalid it throws and
  // drops the whole batch.
  void enqueue(Event&& event) { pending_.push_back(std::move(event)); }
  std::vector<Refusal> apply();

  // The next step, or null where nothing can run now. Valid until the next plan but one is made.
  [[nodiscard]] StepPlan* next_plan();
  // The result of the oldest step in flight.
  void advance(const StepResult& result);

  // What changed since the last call; valid until the next one.
  [[nodiscard]] const SequenceEvents& take_events();
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] bool has_work() const { return !running_.empty() || !waiting_.empty() || num_draining_ > 0; }
  [[nodiscard]] std::size_t num_in_flight() const { return ledger_.num_in_flight(); }
  [[nodiscard]] const Config& config() const { return config_; }

  // For checks from outside: every sequence that exists, by slot.
  [[nodiscard]] const std::deque<std::optional<Sequence>>& sequences() const { return sequences_; }
  [[nodiscard]] const FullAttentionGroup& group() const { return group_; }

 private:
  struct KeyEntry {
    std::int32_t generation = -1;
    std::optional<Slot> slot;
  };

  // The head of the queue did not fit; it is not tried again before something gets better.
  struct Blocked {
    Slot slot;
    Blocks available;
    std::size_t num_running = 0;
  };

  // scheduler.cc: events and the ends of sequences
  void on(Submit&& submit, std::vector<Refusal>& refusals);
  void on(const Cancel& cancel);
  void on(const Finish& finish);
  void on(const Tick& tick) { now_ms_ = tick.now_ms; }
  [[nodiscard]] std::optional<Refusal> refusal_of(const Submit& submit) const;
  void end(Slot slot, FinishCode reason);
  void preempt(Slot slot);
  void finish_drain(Slot slot);
  void drop(Slot slot);
  void emit(const Sequence& sequence, std::span<const std::int32_t> token_ids, FinishCode code);

  // planner.cc
  void plan_decodes(StepPlan& plan);
  [[nodiscard]] bool plan_decode_pages(StepPlan& plan, std::size_t position);
  void plan_prefills(StepPlan& plan, Tokens& budget);
  void plan_admissions(StepPlan& plan, Tokens& budget);
  [[nodiscard]] bool make_room(std::size_t position);
  [[nodiscard]] std::size_t victim_for(std::size_t position);
  [[nodiscard]] bool admit(StepPlan& plan, Slot slot);
  void seat(StepPlan& plan, Slot slot, std::span<const BlockHash> hashes, Blocks matched);
  [[nodiscard]] Tokens add_prefill_row(StepPlan& plan, Slot slot, Tokens budget);

  // results.cc
  void check_result(const StepResult& result) const;
  void settle(const StepRow& row, std::span<const std::int32_t> accepted);
  void fail(const StepRow& row);
  void seal_computed(Sequence& sequence, const StepReceipt& receipt);
  void drain_if_idle(Slot slot);

  [[nodiscard]] Sequence& at(Slot slot);
  [[nodiscard]] std::optional<Slot> find(const RequestKey& key) const;
  void insert_running(Slot slot);
  void insert_waiting(Slot slot);

  Config config_;
  FullAttentionGroup group_;
  SeatPool seats_;
  StepLedger ledger_;
  std::array<StepPlan, kMaxStepsInFlight> plans_;
  std::vector<Event> pending_;

  std::deque<std::optional<Sequence>> sequences_;
  std::vector<Slot> free_slots_;
  std::vector<KeyEntry> keys_;
  std::vector<Slot> running_;  // by rank, first to be served in front
  std::vector<Slot> waiting_;  // by rank, first to be served at the back
  std::vector<Candidate> candidates_;
  std::optional<Blocked> blocked_;

  std::array<SequenceEvents, 2> events_;
  std::size_t current_events_ = 0;
  std::int64_t last_step_ = 0;
  std::int64_t num_submitted_ = 0;
  std::int64_t now_ms_ = 0;
  std::int64_t num_draining_ = 0;
  std::int64_t num_draining_preempted_ = 0;
  Stats counters_;
};

}  // namespace tokenspeed::control
