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
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache_groups.h"
#include "event.h"
#include "kv_log.h"
#include "ledger.h"
#include "partition.h"
#include "plan.h"
#include "policy.h"
#include "sequence.h"
#include "transfers.h"
#include "types.h"

namespace tokenspeed::control {

// groups: of each partition; pages 1 .. num_blocks may be used, page 0 is the null page and comes on top. max_num_seqs
// and max_num_batched_tokens: of each partition. max_num_mixed_prefill_tokens: prompt tokens of a partition in a step
// in which any partition decodes; none: as many as the rest of max_num_batched_tokens. mixed_step_unit: of these, only
// as many as the backlog asks for, so that such a step has whole units of tokens, see policy::mixed_share; none: all.
struct Config {
  std::vector<GroupSpec> groups;
  std::int32_t num_partitions = 1;
  std::int32_t max_num_seqs = 0;
  std::int64_t max_num_batched_tokens = 0;
  std::optional<std::int64_t> max_num_mixed_prefill_tokens;
  std::optional<std::int64_t> mixed_step_unit;
  std::int64_t max_model_len = 0;
  std::int64_t ageing_steps = 0;
  bool prefix_caching = true;
  HostStore host_store = HostStore::kOnSeal;
  bool kv_events = false;
};

// Blocks are those of the first group, over all partitions. loaded_tokens: prompt tokens that came from the host tier.
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
  std::int64_t host_used_blocks = 0;
  std::int64_t host_total_blocks = 0;
  std::int64_t loaded_tokens = 0;
  std::int64_t stored_blocks = 0;
  std::int64_t num_transfers = 0;
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
  void enqueue(Event&& event);
  std::vector<Refusal> apply();

  // The next step, or null where nothing can run now. Valid until the next plan but one is made.
  [[nodiscard]] StepPlan* next_plan();
  // The result of the oldest step in flight.
  void advance(const StepResult& result);

  // What changed since the last call; valid until the next one.
  [[nodiscard]] const SequenceEvents& take_events();
  [[nodiscard]] const KvEvents& take_kv_events();
  [[nodiscard]] Stats stats() const;
  // Whether a request has not ended, or a seat still waits for what is in flight. Held sessions are no work.
  [[nodiscard]] bool has_work() const;
  [[nodiscard]] std::size_t num_in_flight() const { return ledger_.num_in_flight(); }
  [[nodiscard]] const Config& config() const { return config_; }

  // For checks from outside: every sequence that exists, by slot, and all memory.
  [[nodiscard]] const std::deque<std::optional<Sequence>>& sequences() const { return sequences_; }
  [[nodiscard]] const std::vector<Partition>& partitions() const { return partitions_; }
  [[nodiscard]] const StepLedger& ledger() const { return ledger_; }
  [[nodiscard]] const TransferLedger& transfers() const { return transfers_; }
  [[nodiscard]] std::size_t num_transfers() const { return transfers_.num_in_flight(); }
  [[nodiscard]] std::size_t num_timers() const { return timers_.size(); }
  [[nodiscard]] std::int64_t now_ms() const { return now_ms_; }

 private:
  // Where a sequence stands in the scheduler's books; each state belongs to one.
  enum class List : std::uint8_t { kWaiting, kAwaiting, kRunning, kGivingWay, kEnding, kSending, kHeld, kDone };
  static constexpr std::size_t kNumLists = 8;
  enum class Room : std::uint8_t { kReady, kWait, kNone };

  struct IndexEntry {
    std::int32_t generation = -1;
    bool live = false;  // its request has not ended
  };
  struct HeldEntry {
    HeldRank rank;
    Slot slot;
    Blocks most_freed;
  };
  // What runs and what is held in one partition.
  struct Roster {
    std::vector<Slot> running;    // by rank, first to be served in front
    std::vector<HeldEntry> held;  // first to be reclaimed in front
    Blocks most_held;             // pages of all that is held, shares counted
    Transfer* stores = nullptr;   // begun for the plan that is being made
    std::size_t num_stores = 0;   // in flight
    std::size_t num_leaving = 0;  // sequences whose pages come back, or can be taken, once what is in flight has come
  };
  struct Timer {
    std::int64_t deadline_ms = 0;
    std::int64_t number = 0;  // of all that were ever set
    RequestKey key;
  };

  // scheduler.cc
  [[nodiscard]] bool is_busy() const { return num_of(List::kHeld) < num_sequences_; }
  void on(Submit&& submit, std::vector<Refusal>& refusals);
  void on(const Cancel& cancel);
  void on(const Finish& finish);
  void on(const Retain& retain);
  void on(const Release& release);
  void on(const Tick& tick);
  [[nodiscard]] Tokens limit_of(const Submit& submit) const;
  [[nodiscard]] std::optional<Refusal> refusal_of(const Submit& submit) const;
  void check_whole() const;
  void check_batch(std::span<const Event> batch) const;
  [[nodiscard]] Slot take_slot();
  void end_told(Sequence& sequence, std::span<const std::int32_t> token_ids, FinishCode code);
  void emit(const Sequence& sequence, std::span<const std::int32_t> token_ids, FinishCode code);
  void set_timer(std::int64_t deadline_ms, Sequence& sequence);
  void stop_timer(Sequence& sequence);
  [[nodiscard]] bool is_due(const Timer& timer) const;
  void fire(const Timer& timer);

  // books.cc: the only way a state moves, and the lists that follow it.
  template <class Signal>
  void send(Slot slot, Signal&& incoming);
  [[nodiscard]] static List list_of(const Sequence& sequence);
  [[nodiscard]] static bool is_leaving(List list);
  void leave(List list, Slot slot);
  void enter(List list, Slot slot);
  void enter_held(Slot slot);
  void leave_held(Slot slot);
  void drain_if_idle(Slot slot);
  [[nodiscard]] std::size_t num_of(List list) const { return counts_[static_cast<std::size_t>(list)]; }

  // planner.cc
  [[nodiscard]] StepPlan* fill_plan();
  void plan_expiry(StepPlan& plan);
  void plan_decodes(StepPlan& plan, Partition& partition);
  [[nodiscard]] bool secure(Roster& roster, std::size_t position, Tokens end);
  void add_decode_row(StepPlan& plan, Slot slot, std::int32_t drafts);
  [[nodiscard]] Tokens prefill_budget(const StepPlan& plan, const Partition& partition);
  [[nodiscard]] Tokens backlog(const Partition& partition, Tokens enough);
  void plan_prefills(StepPlan& plan, Partition& partition, Tokens& budget);
  [[nodiscard]] Tokens add_prefill_row(StepPlan& plan, Slot slot, Tokens budget);
  void add_pages(StepPlan& plan, Sequence& sequence, Tokens end);
  void note_pages(Sequence& sequence);
  void preempt(Slot slot);
  [[nodiscard]] std::size_t victim_for(Roster& roster, std::size_t position);

  // admission.cc
  void plan_admissions(StepPlan& plan, std::vector<Tokens>& budgets);
  [[nodiscard]] std::optional<std::size_t> admit(StepPlan& plan, Slot slot);
  [[nodiscard]] Tokens boundary_in(const Partition& partition, Sequence& sequence);
  [[nodiscard]] Place place_in(const Partition& partition, Sequence& sequence);
  [[nodiscard]] bool make_room_for(Partition& partition, Sequence& sequence);
  void seat(StepPlan& plan, Partition& partition, Slot slot);
  [[nodiscard]] bool push_load(StepPlan& plan, const Transfer& transfer, Partition& partition, Tables& tables);
  void supersede(Sequence& next, Partition& partition);

  // memory.cc
  template <class Kind>
  [[nodiscard]] Room find_room(Partition& partition, CacheGroup<Kind>& group, Blocks wanted);
  [[nodiscard]] Room room_for(Sequence& sequence, Tokens end);
  [[nodiscard]] static bool has_ready_for(Sequence& sequence, Tokens end);
  [[nodiscard]] bool reclaim(Partition& partition);
  template <class Kind>
  void make_ready(Partition& partition, CacheGroup<Kind>& group, Blocks wanted, bool may_drop);
  [[nodiscard]] Transfer* stores_of(Partition& partition);
  void plan_stores(StepPlan& plan);
  void push_stores(StepPlan& plan, Partition& partition);
  void plan_sends(StepPlan& plan);
  void on(const TransferDone& done);
  void end_stores(Transfer& transfer);
  void end_loads(Transfer& transfer, Sequence& sequence);

  // results.cc
  void check_result(const StepResult& result) const;
  void take_in(const StepResult& result);
  void settle(const RowWork& row, std::span<const std::int32_t> accepted);
  void fail(const RowWork& row);
  void end_by_itself(Slot slot, FinishCode code);
  void seal_computed(Sequence& sequence, const StepReceipt& receipt);
  void release_expired();

  [[nodiscard]] Sequence& at(Slot slot);
  [[nodiscard]] std::optional<Slot> find(const RequestKey& key) const;
  [[nodiscard]] Roster& roster_of(const Partition& partition);
  void insert_running(Slot slot);
  void insert_waiting(Slot slot);

  Config config_;
  Tokens base_size_;
  KvLog kv_log_;
  std::vector<Partition> partitions_;
  std::vector<Roster> rosters_;
  StepLedger ledger_;
  TransferLedger transfers_;
  std::array<StepPlan, kMaxStepsInFlight> plans_;
  std::vector<Event> pending_;

  std::deque<std::optional<Sequence>> sequences_;
  std::vector<Slot> free_slots_;
  std::size_t num_sequences_ = 0;
  std::unordered_map<std::uint64_t, Slot> slots_;  // by request key; never iterated
  std::vector<IndexEntry> indices_;
  std::unordered_map<std::string, std::vector<Slot>> sessions_;  // what each session holds; never iterated
  std::array<std::size_t, kNumLists> counts_{};
  std::vector<Slot> waiting_;   // by rank, first to be served at the back
  std::vector<Slot> expiring_;  // sequences that may have pages which expired
  std::vector<Slot> to_send_;
  std::vector<Timer> timers_;  // a heap, in which some entries are those of timers that were set anew or stopped
  std::size_t num_set_ = 0;    // sequences that have a timer
  std::int64_t last_timer_ = 0;
  std::vector<Candidate> candidates_;
  std::vector<Place> places_;
  std::vector<Tokens> budgets_;
  // The head of the queue found no room, and nothing has been given back since.
  std::optional<Slot> blocked_;

  // While a call makes its changes, and for good where it fails half-way.
  bool half_made_ = false;
  std::array<SequenceEvents, 2> events_;
  std::size_t current_events_ = 0;
  std::int64_t last_step_ = 0;
  std::int64_t num_submitted_ = 0;
  std::int64_t num_holds_ = 0;
  std::int64_t now_ms_ = 0;
  Stats counters_;
};

}  // namespace tokenspeed::control
