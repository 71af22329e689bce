// SPDX-License-Identifier: Apache-2.0
#include "simulation.h"

#include <algorithm>
#include <set>
#include <utility>

#include "audit.h"
#include "check.h"

namespace tokenspeed::control::sim {

namespace {

constexpr std::int32_t kNumIndices = 12;  // few, so that indices are reused all the time
constexpr int kMaxDrainSteps = 200'000;

Config random_config(Random& random) {
  Config config;
  config.block_size = std::int64_t{1} << random.between(0, 3);
  config.num_blocks = random.chance(50) ? random.between(2, 12) : random.between(12, 64);
  config.max_num_seqs = static_cast<std::int32_t>(random.between(1, 8));
  config.max_num_batched_tokens = config.max_num_seqs + random.between(0, random.chance(50) ? 4 : 64);
  const std::int64_t capacity = config.num_blocks * config.block_size;
  config.max_model_len = random.chance(70) ? capacity + random.between(0, 8) : random.between(2, 2 * capacity);
  config.ageing_steps = random.between(1, 40);
  config.prefix_caching = random.chance(90);
  return config;
}

}  // namespace

Simulation::Simulation(std::uint64_t seed)
    : random_(seed),
      config_(random_config(random_)),
      max_in_flight_(random_.chance(60) ? 2 : 1),
      num_rounds_(random_.between(20, 500)),
      event_percent_(random_.chance(50) ? random_.between(2, 8) : random_.between(8, 50)),
      end_percent_(random_.chance(60) ? random_.between(0, 3) : random_.between(3, 40)),
      scheduler_(config_),
      oracle_(config_),
      device_(config_, random_.chance(50) ? 0 : random_.between(1, 5)),
      generations_(kNumIndices, -1) {}

Report Simulation::run() {
  for (std::int64_t round = 0; round < num_rounds_; ++round) {
    if (random_.chance(event_percent_)) {
      send_events();
      audit(scheduler_, device_);
    }
    if (device_.num_in_flight() < max_in_flight_ && random_.chance(70)) {
      plan();
    } else if (device_.is_busy()) {
      advance();
    }
    audit(scheduler_, device_);
  }
  finish_all();
  report_.config = config_;
  report_.stats = scheduler_.stats();
  return report_;
}

void Simulation::send_events() {
  if (random_.chance(3)) {
    send_invalid_batch();
    return;
  }
  const std::int64_t count = random_.between(1, 3);
  for (std::int64_t sent = 0; sent < count; ++sent) {
    send_event();
  }
  apply();
}

void Simulation::send_event() {
  if (random_.chance(end_percent_)) {
    send_to_any(random_.between(1, 100));
    return;
  }
  const std::int64_t which = random_.between(1, 100);
  if (which <= 90) {
    submit();
  } else if (which <= 95) {
    now_ms_ += random_.between(0, 50);
    scheduler_.enqueue(Tick{.now_ms = now_ms_});
  } else {
    scheduler_.enqueue(TransferDone{.lease = LeaseId(random_.between(0, 5)), .ok = random_.chance(50)});
  }
}

// To a request that lives, has just ended, or ended long ago.
void Simulation::send_to_any(std::int64_t which) {
  const std::int32_t index = any_request();
  if (index < 0) {
    return;
  }
  const std::int32_t latest = generations_[static_cast<std::size_t>(index)];
  const bool stale = random_.chance(15);
  const RequestKey key{.index = index,
                       .generation = stale ? static_cast<std::int32_t>(random_.between(0, latest)) : latest};
  const auto found = oracle_.live().find(index);
  const bool live = found != oracle_.live().end() && found->second.submit.key == key;
  FinishCode told = FinishCode::kNone;
  if (which <= 45) {
    scheduler_.enqueue(Cancel{.key = key});
    told = FinishCode::kCancelled;
  } else if (which <= 80) {
    const std::int64_t most = live ? found->second.num_generated() : 3;
    scheduler_.enqueue(Finish{.key = key, .keep_tokens = Tokens(random_.between(0, most))});
    told = FinishCode::kStop;
  } else if (which <= 90) {
    scheduler_.enqueue(Retain{.key = key, .deadline_ms = now_ms_ + 10});
  } else {
    scheduler_.enqueue(Release{.key = key});
  }
  if (live && oracle_.at(index).told == FinishCode::kNone) {
    oracle_.at(index).told = told;
  }
}

std::int32_t Simulation::any_request() {
  const auto index = static_cast<std::int32_t>(random_.between(0, kNumIndices - 1));
  const bool queued = std::any_of(queued_.begin(), queued_.end(), [&](const auto& s) { return s.key.index == index; });
  return generations_[static_cast<std::size_t>(index)] < 0 || queued ? -1 : index;
}

void Simulation::submit() {
  const auto index = static_cast<std::int32_t>(random_.between(0, kNumIndices - 1));
  const bool queued = std::any_of(queued_.begin(), queued_.end(), [&](const auto& s) { return s.key.index == index; });
  if (!queued && !oracle_.live().contains(index)) {
    submit_key(index);
  }
}

void Simulation::submit_key(std::int32_t index) {
  std::int32_t& generation = generations_[static_cast<std::size_t>(index)];
  generation += static_cast<std::int32_t>(random_.between(1, 2));
  Submit submit;
  submit.key = RequestKey{.index = index, .generation = generation};
  submit.token_ids = random_prompt();
  submit.max_new_tokens = Tokens(random_.chance(80) ? random_.between(1, 24) : random_.between(24, 400));
  submit.min_new_tokens = Tokens(random_.chance(80) ? 0 : random_.between(0, 10));
  if (random_.chance(60)) {
    submit.end_token_ids = {0, 1};
  }
  submit.priority = random_.chance(70) ? 0 : static_cast<std::int32_t>(random_.between(-2, 2));
  submit.name_space = random_.chance(80) ? "" : "tenant";
  if (random_.chance(10)) {
    submit.match_limit = Tokens(random_.between(0, 20));
  }
  queued_.push_back(submit);
  scheduler_.enqueue(std::move(submit));
  ++report_.num_requests;
}

// Fresh, the start of an earlier transcript, or a whole one with something added (the next turn).
std::vector<std::int32_t> Simulation::random_prompt() {
  std::vector<std::int32_t> prompt;
  const auto& transcripts = oracle_.transcripts();
  if (!transcripts.empty() && random_.chance(60)) {
    // Mostly a recent one, of which something may still be cached.
    const auto count = static_cast<std::int64_t>(transcripts.size());
    const std::int64_t oldest = random_.chance(80) ? std::max<std::int64_t>(0, count - 4) : 0;
    prompt = transcripts[static_cast<std::size_t>(random_.between(oldest, count - 1))];
    if (random_.chance(40)) {
      prompt.resize(static_cast<std::size_t>(random_.between(0, static_cast<std::int64_t>(prompt.size()))));
    }
  }
  const std::int64_t capacity = config_.num_blocks * config_.block_size;
  const std::int64_t more =
      random_.chance(85) ? random_.between(1, 2 + capacity / 4) : random_.between(1, capacity + 4);
  for (std::int64_t added = 0; added < more; ++added) {
    prompt.push_back(static_cast<std::int32_t>(random_.between(0, kVocabulary - 1)));
  }
  return prompt;
}

// Nothing of a batch with an invalid event may take effect.
void Simulation::send_invalid_batch() {
  const Stats before = scheduler_.stats();
  for (const auto& [index, request] : oracle_.live()) {
    scheduler_.enqueue(Cancel{.key = request.submit.key});
  }
  scheduler_.enqueue(Cancel{.key = RequestKey{.index = kNumIndices, .generation = 0}});
  bool refused = false;
  try {
    (void)scheduler_.apply();
  } catch (const CheckError&) {
    refused = true;
  }
  require(refused, "an invalid batch was applied");
  const Stats after = scheduler_.stats();
  require(after.num_running == before.num_running && after.num_waiting == before.num_waiting, "batch half applied");
  require(scheduler_.take_events().rows.empty(), "events from an invalid batch");
}

void Simulation::apply() {
  std::set<std::int32_t> refused;
  for (const Refusal& refusal : scheduler_.apply()) {
    require(refusal.needed > refusal.capacity, "refused with", refusal.needed, "of", refusal.capacity);
    refused.insert(refusal.key.index);
  }
  for (const Submit& submit : queued_) {
    const bool is_refused = refused.contains(submit.key.index);
    require(is_refused == oracle_.must_refuse(submit), "request", submit.key, "refused", is_refused);
    if (!is_refused) {
      oracle_.add(submit);
    }
  }
  report_.num_refused += static_cast<std::int64_t>(refused.size());
  queued_.clear();
  oracle_.take(scheduler_.take_events());
}

void Simulation::plan() {
  const Sequence* first = first_running();
  const StepPlan* plan = scheduler_.next_plan();
  // Whoever is first in line gets on; only others give way.
  require(first == nullptr || first->is_running(), "the first in line was preempted");
  require(scheduler_.take_events().rows.empty(), "planning ended a request");
  if (plan != nullptr) {
    hash_plan(*plan);
    device_.run(*plan, oracle_, random_);
  }
}

const Sequence* Simulation::first_running() const {
  const Sequence* first = nullptr;
  for (const auto& sequence : scheduler_.sequences()) {
    if (sequence && sequence->is_running() && (first == nullptr || sequence->rank() < first->rank())) {
      first = &*sequence;
    }
  }
  return first;
}

void Simulation::advance() {
  const DeviceResult result = device_.take_result();
  scheduler_.advance(StepResult{.step_id = StepId(result.step_id),
                                .accepted_offsets = result.offsets,
                                .token_ids = result.token_ids,
                                .row_faults = result.row_faults,
                                .fault = result.fault});
  oracle_.take(scheduler_.take_events());
}

void Simulation::hash_plan(const StepPlan& plan) {
  for (const auto values :
       {plan.rows.values(), plan.token_ids.values(), plan.seated.values(), plan.page_delta.values()}) {
    for (const std::int32_t value : values) {
      report_.plan_hash = scramble(report_.plan_hash ^ static_cast<std::uint32_t>(value));
    }
  }
}

// With no more events every request ends and every page comes back.
void Simulation::finish_all() {
  for (int step = 0; scheduler_.has_work(); ++step) {
    require(step < kMaxDrainSteps, "no end in sight:", scheduler_.stats().num_running, "running",
            scheduler_.stats().num_waiting, "waiting");
    if (device_.num_in_flight() < max_in_flight_) {
      plan();
    }
    if (device_.is_busy()) {
      advance();
    }
    audit(scheduler_, device_);
  }
  while (device_.is_busy()) {
    advance();
  }
  require(oracle_.live().empty(), oracle_.live().size(), "requests never ended");
  require(scheduler_.stats().used_blocks == 0, scheduler_.stats().used_blocks, "blocks never came back");
}

}  // namespace tokenspeed::control::sim
