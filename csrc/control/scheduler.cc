// SPDX-License-Identifier: Apache-2.0
#include "scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <variant>

#include "check.h"
#include "event_check.h"

namespace tokenspeed::control {

namespace {

Config checked(const Config& config) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max() / 4;
  TS_CHECK(config.num_blocks >= 1 && config.num_blocks <= kMax, "num_blocks", config.num_blocks);
  TS_CHECK(config.block_size >= 1 && config.block_size <= kMax, "block_size", config.block_size);
  TS_CHECK(config.max_num_seqs >= 1, "max_num_seqs", config.max_num_seqs);
  TS_CHECK(config.max_num_batched_tokens >= config.max_num_seqs, "max_num_batched_tokens",
           config.max_num_batched_tokens, "max_num_seqs", config.max_num_seqs);
  TS_CHECK(config.max_model_len >= 2 && config.max_model_len <= kMax, "max_model_len", config.max_model_len);
  TS_CHECK(config.ageing_steps >= 1, "ageing_steps", config.ageing_steps);
  return config;
}

StepPlan make_plan(const Config& config) {
  const auto rows = static_cast<std::size_t>(config.max_num_seqs);
  // Room for a page a running sequence and for all pages of one that is admitted.
  return StepPlan(PlanLimits{.rows = rows,
                             .token_ids = static_cast<std::size_t>(config.max_num_batched_tokens),
                             .page_delta = static_cast<std::size_t>(config.num_blocks) + rows});
}

}  // namespace

Scheduler::Scheduler(const Config& config)
    : config_(checked(config)),
      group_(Blocks(config.num_blocks), Tokens(config.block_size), config.prefix_caching),
      seats_(config.max_num_seqs),
      ledger_(config.max_num_seqs),
      plans_{make_plan(config), make_plan(config)} {
  const auto seats = static_cast<std::size_t>(config.max_num_seqs);
  running_.reserve(seats);
  candidates_.reserve(seats);
  for (SequenceEvents& events : events_) {
    events.rows.reserve(5 * seats);
    events.token_ids.reserve(seats);
  }
}

Scheduler::~Scheduler() {
  const Teardown teardown;
  ledger_.forfeit(teardown);
  for (std::optional<Sequence>& sequence : sequences_) {
    if (sequence) {
      sequence->forfeit(teardown);
    }
  }
}

std::vector<Refusal> Scheduler::apply() {
  std::vector<Event> batch;
  batch.swap(pending_);
  const auto generation = [this](std::int32_t index) {
    return std::cmp_less(index, keys_.size()) ? keys_[static_cast<std::size_t>(index)].generation : -1;
  };
  const auto is_live = [this](std::int32_t index) {
    return std::cmp_less(index, keys_.size()) && keys_[static_cast<std::size_t>(index)].slot.has_value();
  };
  const auto num_generated = [this](const RequestKey& key) {
    const std::optional<Slot> slot = find(key);
    return slot ? at(*slot).num_generated() : Tokens(std::numeric_limits<std::int32_t>::max());
  };
  check_events(
      batch,
      EventContext{.generation = generation, .is_live = is_live, .num_generated = num_generated, .now_ms = now_ms_});
  std::vector<Refusal> refusals;
  for (Event& event : batch) {
    if (auto* submit = std::get_if<Submit>(&event)) {
      on(std::move(*submit), refusals);
    } else if (const auto* cancel = std::get_if<Cancel>(&event)) {
      on(*cancel);
    } else if (const auto* finish = std::get_if<Finish>(&event)) {
      on(*finish);
    } else if (const auto* tick = std::get_if<Tick>(&event)) {
      on(*tick);
    }
    // Retain, Release and TransferDone are checked above and change nothing: no request is held and no transfer is
    // under way in this version.
  }
  return refusals;
}

std::optional<Refusal> Scheduler::refusal_of(const Submit& submit) const {
  const Tokens prompt(static_cast<std::int64_t>(submit.token_ids.size()));
  const Tokens window(config_.max_model_len);
  if (prompt + Tokens(1) > window) {
    return Refusal{.key = submit.key, .needed = prompt + Tokens(1), .capacity = window};
  }
  if (prompt > group_.capacity()) {
    return Refusal{.key = submit.key, .needed = prompt, .capacity = group_.capacity()};
  }
  return std::nullopt;
}

void Scheduler::on(Submit&& submit, std::vector<Refusal>& refusals) {
  Submit request(std::move(submit));
  const auto index = static_cast<std::size_t>(request.key.index);
  if (index >= keys_.size()) {
    keys_.resize(index + 1);
  }
  keys_[index].generation = request.key.generation;
  if (const std::optional<Refusal> refusal = refusal_of(request)) {
    refusals.push_back(*refusal);
    return;
  }
  if (free_slots_.empty()) {
    free_slots_.emplace_back(static_cast<std::int32_t>(sequences_.size()));
    sequences_.emplace_back();
  }
  const Slot slot = free_slots_.back();
  free_slots_.pop_back();
  const Rank rank = policy::rank_of(request.priority, last_step_, config_.ageing_steps, num_submitted_++);
  // The last token of all needs no K/V of its own, hence the one on top of what the pool holds.
  const Tokens prompt(static_cast<std::int64_t>(request.token_ids.size()));
  const Tokens limit =
      std::min({prompt + request.max_new_tokens, Tokens(config_.max_model_len), group_.capacity() + Tokens(1)});
  keys_[index].slot = slot;
  sequences_[static_cast<std::size_t>(slot.value())].emplace(std::move(request), rank, limit);
  insert_waiting(slot);
}

void Scheduler::on(const Cancel& cancel) {
  if (const std::optional<Slot> slot = find(cancel.key)) {
    emit(at(*slot), {}, FinishCode::kCancelled);
    end(*slot, FinishCode::kCancelled);
  }
}

void Scheduler::on(const Finish& finish) {
  if (const std::optional<Slot> slot = find(finish.key)) {
    emit(at(*slot), {}, FinishCode::kStop);
    end(*slot, FinishCode::kStop);
  }
}

void Scheduler::end(Slot slot, FinishCode reason) {
  Sequence& sequence = at(slot);
  keys_[static_cast<std::size_t>(sequence.key().index)].slot.reset();
  if (sequence.is_waiting()) {
    std::erase(waiting_, slot);
    sequence.end_unseated(reason);
    drop(slot);
    return;
  }
  if (sequence.is_running()) {
    std::erase(running_, slot);
    ++num_draining_;
  } else {
    --num_draining_preempted_;
  }
  sequence.drain_to_end(reason);
  drain_if_idle(slot);
}

void Scheduler::preempt(Slot slot) {
  std::erase(running_, slot);
  at(slot).drain_for_preemption();
  ++num_draining_;
  ++num_draining_preempted_;
  ++counters_.num_preemptions;
  drain_if_idle(slot);
}

void Scheduler::drain_if_idle(Slot slot) {
  Sequence& sequence = at(slot);
  if (sequence.is<Draining>() && ledger_.is_idle(sequence.grant().seat())) {
    finish_drain(slot);
  }
}

void Scheduler::finish_drain(Slot slot) {
  Sequence& sequence = at(slot);
  const Retirement retirement = ledger_.retirement(sequence.grant().seat());
  Grant grant = sequence.leave(retirement);
  group_.give_back(grant.leave_pages(retirement), retirement);
  seats_.release(grant.leave_seat(retirement), retirement);
  --num_draining_;
  if (sequence.is<Done>()) {
    drop(slot);
  } else {
    --num_draining_preempted_;
    insert_waiting(slot);
  }
}

void Scheduler::drop(Slot slot) {
  sequences_[static_cast<std::size_t>(slot.value())].reset();
  free_slots_.push_back(slot);
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
  const SequenceEvents& taken = events_[current_events_];
  current_events_ = 1 - current_events_;
  events_[current_events_].rows.clear();
  events_[current_events_].token_ids.clear();
  return taken;
}

Stats Scheduler::stats() const {
  Stats stats = counters_;
  stats.num_running = static_cast<std::int64_t>(running_.size());
  stats.num_waiting = static_cast<std::int64_t>(waiting_.size()) + num_draining_preempted_;
  stats.used_blocks = group_.pool().num_used().value();
  stats.cached_blocks = group_.pool().num_cached().value();
  stats.total_blocks = group_.pool().total().value();
  stats.num_steps = last_step_;
  return stats;
}

Sequence& Scheduler::at(Slot slot) {
  std::optional<Sequence>& sequence = sequences_[static_cast<std::size_t>(slot.value())];
  TS_CHECK(sequence.has_value(), "slot", slot);
  return *sequence;
}

std::optional<Slot> Scheduler::find(const RequestKey& key) const {
  if (!std::cmp_less(key.index, keys_.size())) {
    return std::nullopt;
  }
  const KeyEntry& entry = keys_[static_cast<std::size_t>(key.index)];
  return entry.generation == key.generation ? entry.slot : std::nullopt;
}

void Scheduler::insert_running(Slot slot) {
  const auto sooner = [this](Slot a, Slot b) { return at(a).rank() < at(b).rank(); };
  running_.insert(std::upper_bound(running_.begin(), running_.end(), slot, sooner), slot);
}

void Scheduler::insert_waiting(Slot slot) {
  const auto later = [this](Slot a, Slot b) { return at(a).rank() > at(b).rank(); };
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), slot, later), slot);
}

}  // namespace tokenspeed::control
