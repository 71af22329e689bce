// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <variant>

#include "books.h"
#include "check.h"
#include "event_check.h"

namespace tokenspeed::control {

namespace {

// Of all numbers that are counted in tokens, blocks or steps: sums of a few of them, and their products with a
// priority or a number of partitions, are far from the end of int64, and each fits int32.
constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max() / 4;
constexpr std::int32_t kMaxPartitions = 1 << 16;
constexpr std::int32_t kMostDrafts = 64;
// Timers that are kept though they were set anew or stopped, beside one for each that is set.
constexpr std::size_t kMostStaleTimers = 64;

void check_in(const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
  TS_CHECK(value >= least && value <= most, name, value, "is not within", least, "and", most);
}

void check_group(const GroupSpec& spec, std::int64_t num_partitions) {
  check_in("kind of group", static_cast<std::int64_t>(spec.kind), 0, static_cast<std::int64_t>(GroupKind::kRecurrent));
  check_in("num_blocks", spec.num_blocks.value(), 1, kMax / num_partitions);
  check_in("num_host_blocks", spec.num_host_blocks.value(), 0, kMax / num_partitions);
  check_in("block_size", spec.block_size.value(), 1, kMax);
  check_in("window", spec.window.value(), spec.kind == GroupKind::kWindow ? 2 : 0, kMax);
}

Config checked(const Config& config) {
  check_in("groups", std::ssize(config.groups), 1, 64);
  check_in("num_partitions", config.num_partitions, 1, kMaxPartitions);
  std::int64_t unit = 1;
  for (const GroupSpec& spec : config.groups) {
    check_group(spec, config.num_partitions);
    unit = std::lcm(unit, spec.block_size.value());
    check_in("least common multiple of the block sizes", unit, 1, kMax);
  }
  const std::int64_t most = kMax / config.num_partitions;
  check_in("max_num_seqs", config.max_num_seqs, 1, most);
  TS_CHECK(config.max_num_batched_tokens >= config.max_num_seqs, "max_num_batched_tokens",
           config.max_num_batched_tokens, "is below max_num_seqs", config.max_num_seqs);
  check_in("max_num_batched_tokens", config.max_num_batched_tokens, 1, most);
  check_in("max_num_mixed_prefill_tokens", config.max_num_mixed_prefill_tokens.value_or(most), 1, most);
  check_in("mixed_step_unit", config.mixed_step_unit.value_or(1), 1, most);
  check_in("max_model_len", config.max_model_len, 2, kMax);
  check_in("ageing_steps", config.ageing_steps, 1, kMax);
  check_in("host_store", static_cast<std::int64_t>(config.host_store), 0,
           static_cast<std::int64_t>(HostStore::kOnPressure));
  return config;
}

Tokens base_size_of(const Config& config) {
  std::int64_t base = 0;
  for (const GroupSpec& spec : config.groups) {
    base = std::gcd(base, spec.block_size.value());
  }
  return Tokens(base);
}

StepPlan make_plan(const Config& config) {
  const auto partitions = static_cast<std::size_t>(config.num_partitions);
  const auto rows = static_cast<std::size_t>(config.max_num_seqs) * partitions;
  std::size_t pages = 0;
  for (const GroupSpec& spec : config.groups) {
    pages += static_cast<std::size_t>(spec.num_blocks.value()) * partitions;
  }
  // Every page may come into a table and, where it has expired, leave it in the same step.
  return StepPlan(PlanLimits{.rows = rows,
                             .token_ids = static_cast<std::size_t>(config.max_num_batched_tokens) * partitions,
                             .page_delta = 2 * pages + rows,
                             // Each page may be stored, and one sequence's be sent.
                             .transfers = 2 * pages});
}

// For a heap that has the first to come in front.
constexpr auto later = [](const auto& a, const auto& b) {
  return std::tuple(a.deadline_ms, a.number) > std::tuple(b.deadline_ms, b.number);
};

// Acknowledgements that come together have no order of their own. They are taken in that of their leases, so that the
// way in which they came reaches no plan.
void sort_acknowledgements(std::vector<Event>& batch) {
  const auto sooner = [](const TransferDone& a, const TransferDone& b) { return a.lease < b.lease; };
  std::vector<TransferDone> done;
  for (const Event& event : batch) {
    if (const auto* one = std::get_if<TransferDone>(&event)) {
      done.insert(std::upper_bound(done.begin(), done.end(), *one, sooner), *one);
    }
  }
  if (!done.empty()) {
    std::erase_if(batch, [](const Event& event) { return std::holds_alternative<TransferDone>(event); });
    batch.insert(batch.end(), done.begin(), done.end());
  }
}

std::uint64_t packed(const RequestKey& key) {
  return (std::uint64_t{static_cast<std::uint32_t>(key.index)} << 32U) | static_cast<std::uint32_t>(key.generation);
}

}  // namespace

Scheduler::Scheduler(const Config& config)
    : config_(checked(config)),
      base_size_(base_size_of(config)),
      kv_log_(config.kv_events),
      rosters_(static_cast<std::size_t>(config.num_partitions)),
      ledger_(config.max_num_seqs * config.num_partitions),
      // A seat has one at a time, so whoever takes a seat finds room.
      transfers_(static_cast<std::size_t>(config.num_partitions) *
                 (static_cast<std::size_t>(config.max_num_seqs) + kMaxStoresInFlight)),
      plans_{make_plan(config), make_plan(config)} {
  const auto seats = static_cast<std::size_t>(config.max_num_seqs);
  const auto partitions = static_cast<std::size_t>(config.num_partitions);
  partitions_.reserve(partitions);
  const CacheOptions options{.prefix_caching = config.prefix_caching,
                             .host_store = config.host_store,
                             .base_size = base_size_,
                             .unit = base_size_,
                             .step_tokens = Tokens(config.max_num_batched_tokens),
                             .first_group = 0,
                             .log = &kv_log_};
  for (std::int32_t id = 0; id < config.num_partitions; ++id) {
    partitions_.emplace_back(PartitionId(id), config_.groups, config.max_num_seqs, options);
  }
  for (Roster& roster : rosters_) {
    roster.running.reserve(seats);
  }
  candidates_.reserve(seats);
  expiring_.reserve(seats * partitions);
  budgets_.reserve(partitions);
  places_.reserve(partitions);
  for (SequenceEvents& events : events_) {
    events.rows.reserve(5 * seats * partitions);
    events.token_ids.reserve(seats * partitions * 4);
  }
}

Scheduler::~Scheduler() {
  const Teardown teardown;
  ledger_.forfeit(teardown);
  transfers_.forfeit(teardown);
  for (std::optional<Sequence>& sequence : sequences_) {
    if (sequence) {
      sequence->forfeit(teardown);
    }
  }
}

void Scheduler::check_batch(std::span<const Event> batch) const {
  const auto entry = [this](std::int32_t index) {
    return std::cmp_less(index, indices_.size()) ? indices_[static_cast<std::size_t>(index)] : IndexEntry{};
  };
  const auto most_kept = [this](const RequestKey& key) {
    const std::optional<Slot> slot = find(key);
    const Sequence* sequence = slot ? &*sequences_[static_cast<std::size_t>(slot->value())] : nullptr;
    const bool goes_on = sequence != nullptr && !sequence->has_ended();
    return goes_on ? sequence->num_generated() : Tokens(std::numeric_limits<std::int64_t>::max());
  };
  const bool keeps_states = std::any_of(config_.groups.begin(), config_.groups.end(),
                                        [](const GroupSpec& spec) { return spec.kind == GroupKind::kRecurrent; });
  check_events(batch, EventContext{.generation = [&](std::int32_t index) { return entry(index).generation; },
                                   .is_live = [&](std::int32_t index) { return entry(index).live; },
                                   .most_kept = most_kept,
                                   .now_ms = now_ms_,
                                   .num_partitions = config_.num_partitions,
                                   .most_drafts = keeps_states ? 0 : kMostDrafts});
}

void Scheduler::check_whole() const {
  TS_CHECK(!half_made_, "an earlier call failed half-way, so this plane can be used no longer");
}

void Scheduler::enqueue(Event&& event) {
  check_whole();
  pending_.push_back(std::move(event));
}

std::vector<Refusal> Scheduler::apply() {
  check_whole();
  std::vector<Event> batch;
  batch.swap(pending_);
  check_batch(batch);
  half_made_ = true;
  sort_acknowledgements(batch);
  std::vector<Refusal> refusals;
  for (Event& event : batch) {
    std::visit(
        [&]<class E>(E& happened) {
          if constexpr (std::is_same_v<E, Submit>) {
            on(std::move(happened), refusals);
          } else {
            on(happened);
          }
        },
        event);
  }
  // The batch's memory serves the next one.
  batch.clear();
  if (pending_.empty()) {
    pending_.swap(batch);
  }
  half_made_ = false;
  return refusals;
}

// Tokens at which the request ends at the latest. The last token of all needs no K/V of its own, hence the one on top
// of what the pool holds.
Tokens Scheduler::limit_of(const Submit& submit) const {
  const Tokens prompt(std::ssize(submit.token_ids));
  const Tokens longest(config_.max_model_len);
  const Tokens wanted = submit.remote == Remote::kSend ? Tokens(1) : std::min(submit.max_new_tokens, longest);
  return std::min({prompt + wanted, longest, partitions_.front().capacity() + Tokens(1)});
}

std::optional<Refusal> Scheduler::refusal_of(const Submit& submit) const {
  const Partition& any = partitions_.front();  // they are all alike
  const Tokens prompt(static_cast<std::int64_t>(submit.token_ids.size()));
  const Tokens window(config_.max_model_len);
  if (prompt + Tokens(1) > window) {
    return Refusal{.key = submit.key, .needed = prompt + Tokens(1), .capacity = window};
  }
  std::optional<Refusal> refusal;
  any.each_group([&](const auto& group) {
    const Tokens needed =
        group.holds_whole_sequences() ? prompt : group.tokens_in(group.charge_of(limit_of(submit), submit.draft_width));
    const Tokens capacity = group.tokens_in(group.chargeable());
    if (!refusal && needed > capacity) {
      refusal = Refusal{.key = submit.key, .needed = needed, .capacity = capacity};
    }
  });
  return refusal;
}

Slot Scheduler::take_slot() {
  if (free_slots_.empty()) {
    free_slots_.emplace_back(static_cast<std::int32_t>(sequences_.size()));
    sequences_.emplace_back();
  }
  const Slot slot = free_slots_.back();
  free_slots_.pop_back();
  return slot;
}

void Scheduler::on(Submit&& submit, std::vector<Refusal>& refusals) {
  Submit request(std::move(submit));
  const RequestKey key = request.key;
  const auto index = static_cast<std::size_t>(key.index);
  if (index >= indices_.size()) {
    indices_.resize(index + 1);
  }
  indices_[index].generation = key.generation;
  if (const std::optional<Refusal> refusal = refusal_of(request)) {
    refusals.push_back(*refusal);
    return;
  }
  const Rank rank = policy::rank_of(request.priority, last_step_, config_.ageing_steps, num_submitted_++);
  const Tokens limit = limit_of(request);
  const std::optional<std::int64_t> deadline_ms = request.deadline_ms;
  const Slot slot = take_slot();
  indices_[index].live = true;
  slots_.emplace(packed(key), slot);
  sequences_[static_cast<std::size_t>(slot.value())].emplace(std::move(request), rank, limit);
  ++num_sequences_;
  if (deadline_ms) {
    set_timer(*deadline_ms, at(slot));
  }
  enter(List::kWaiting, slot);
}

void Scheduler::end_told(Sequence& sequence, std::span<const std::int32_t> token_ids, FinishCode code) {
  emit(sequence, token_ids, code);
  IndexEntry& entry = indices_[static_cast<std::size_t>(sequence.key().index)];
  TS_CHECK(entry.live && entry.generation == sequence.key().generation, "request", sequence.key(), "ended twice");
  entry.live = false;
}

void Scheduler::on(const Cancel& cancel) {
  const std::optional<Slot> slot = find(cancel.key);
  if (!slot) {
    return;
  }
  if (!at(*slot).has_ended()) {
    end_told(at(*slot), {}, FinishCode::kCancelled);
  }
  send(*slot, signal::Cancelled());
}

void Scheduler::on(const Finish& finish) {
  const std::optional<Slot> slot = find(finish.key);
  if (!slot) {
    return;
  }
  Sequence& sequence = at(*slot);
  const bool ended = sequence.has_ended();
  if (!sequence.is<Held>()) {
    // A second Finish of the same batch cannot bring back what the first one cut.
    sequence.keep_generated(std::min(finish.keep_tokens, sequence.num_generated()));
  }
  if (!ended) {
    end_told(sequence, {}, FinishCode::kStop);
  }
  send(*slot, signal::Finished{.holds = sequence.hold().has_value()});
}

void Scheduler::on(const Retain& retain) {
  const std::optional<Slot> slot = find(retain.key);
  if (!slot || !at(*slot).hold()) {
    return;
  }
  at(*slot).retain_until(retain.deadline_ms);
  send(*slot, signal::Retained());
  if (at(*slot).is<Held>()) {
    leave_held(*slot);
    enter_held(*slot);
  }
}

void Scheduler::on(const Release& release) {
  if (const std::optional<Slot> slot = find(release.key)) {
    at(*slot).release_hold();
    send(*slot, signal::Released());
  }
}

void Scheduler::on(const Tick& tick) {
  now_ms_ = tick.now_ms;
  while (!timers_.empty() && timers_.front().deadline_ms <= now_ms_) {
    std::pop_heap(timers_.begin(), timers_.end(), later);
    const Timer timer = timers_.back();
    timers_.pop_back();
    if (is_due(timer)) {
      fire(timer);
    }
  }
}

// A sequence has one timer at most: the deadline of its request, or from its end on the one of its hold. Those that
// were set anew or stopped are swept out once they are more than the others, which costs each of them the same.
void Scheduler::set_timer(std::int64_t deadline_ms, Sequence& sequence) {
  num_set_ += sequence.timer() ? 0U : 1U;
  sequence.set_timer(++last_timer_);
  if (timers_.size() >= 2 * num_set_ + kMostStaleTimers) {
    std::erase_if(timers_, [this](const Timer& timer) { return !is_due(timer); });
    std::make_heap(timers_.begin(), timers_.end(), later);
  }
  timers_.push_back(Timer{.deadline_ms = deadline_ms, .number = last_timer_, .key = sequence.key()});
  std::push_heap(timers_.begin(), timers_.end(), later);
}

void Scheduler::stop_timer(Sequence& sequence) {
  num_set_ -= sequence.timer() ? 1U : 0U;
  sequence.set_timer(std::nullopt);
}

// Whether the timer is the one that its sequence has, and not one before it.
bool Scheduler::is_due(const Timer& timer) const {
  const std::optional<Slot> slot = find(timer.key);
  if (!slot) {
    return false;
  }
  const std::optional<Sequence>& sequence = sequences_[static_cast<std::size_t>(slot->value())];
  return sequence && sequence->timer() == timer.number;
}

void Scheduler::fire(const Timer& timer) {
  const std::optional<Slot> slot = find(timer.key);
  TS_CHECK(slot.has_value(), "request", timer.key, "is gone and has a timer");
  Sequence& sequence = at(*slot);
  stop_timer(sequence);
  if (sequence.is<Held>()) {
    send(*slot, signal::Expired());
  } else if (!sequence.has_ended()) {
    end_told(sequence, {}, FinishCode::kDeadline);
    send(*slot, signal::Expired());
  }
}

void Scheduler::emit(const Sequence& sequence, std::span<const std::int32_t> token_ids, FinishCode code) {
  SequenceEvents& events = events_[current_events_];
  const std::int64_t cached = sequence.cached_len().value_or(Tokens(0)).value();
  const RequestKey key = sequence.key();
  events.rows.insert(events.rows.end(), {key.index, key.generation, static_cast<std::int32_t>(token_ids.size()),
                                         static_cast<std::int32_t>(code), static_cast<std::int32_t>(cached)});
  events.token_ids.insert(events.token_ids.end(), token_ids.begin(), token_ids.end());
}

const SequenceEvents& Scheduler::take_events() {
  check_whole();
  const SequenceEvents& taken = events_[current_events_];
  current_events_ = 1 - current_events_;
  events_[current_events_].rows.clear();
  events_[current_events_].token_ids.clear();
  return taken;
}

const KvEvents& Scheduler::take_kv_events() {
  check_whole();
  return kv_log_.take();
}

bool Scheduler::has_work() const {
  check_whole();
  return is_busy();
}

Stats Scheduler::stats() const {
  check_whole();
  Stats stats = counters_;
  stats.num_running = static_cast<std::int64_t>(num_of(List::kRunning));
  stats.num_waiting =
      static_cast<std::int64_t>(num_of(List::kWaiting) + num_of(List::kAwaiting) + num_of(List::kGivingWay));
  stats.num_held = static_cast<std::int64_t>(num_of(List::kHeld));
  stats.num_steps = last_step_;
  stats.num_transfers = static_cast<std::int64_t>(transfers_.num_in_flight());
  for (const Partition& partition : partitions_) {
    partition.each_group([&](const auto& group) {
      if (group.id() == Group(0)) {
        stats.used_blocks += group.device().num_used().value();
        stats.cached_blocks += group.device().num_cached().value();
        stats.total_blocks += group.device().total().value();
        stats.host_used_blocks += (group.host().total() - group.host().num_free()).value();
        stats.host_total_blocks += group.host().total().value();
      }
    });
  }
  return stats;
}

Sequence& Scheduler::at(Slot slot) {
  std::optional<Sequence>& sequence = sequences_[static_cast<std::size_t>(slot.value())];
  TS_CHECK(sequence.has_value(), "slot", slot);
  return *sequence;
}

std::optional<Slot> Scheduler::find(const RequestKey& key) const {
  const auto found = slots_.find(packed(key));
  return found == slots_.end() ? std::nullopt : std::optional(found->second);
}

Scheduler::Roster& Scheduler::roster_of(const Partition& partition) {
  return rosters_[static_cast<std::size_t>(partition.id().value())];
}

}  // namespace tokenspeed::control
