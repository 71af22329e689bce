// SPDX-License-Identifier: Apache-2.0
#include "simulation.h"

#include <algorithm>
#include <set>
#include <utility>

#include "check.h"
#include "picture.h"
#include "trace.h"
#include "violation.h"

namespace tokenspeed::control::sim {

namespace {

constexpr std::int64_t kMostEvents = 4;  // in a round
constexpr std::int64_t kMostDrainRounds = 20'000;

// What random numbers are drawn for.
enum What : std::int64_t { kEvent = 1, kRound = 2, kShuffle = 3, kCount = 4 };

}  // namespace

Simulation::Habits::Habits(Random& random)
    : max_in_flight(random.chance(70) ? 2 : 1),
      num_rounds(random.between(30, 260)),
      event_percent(random.chance(60) ? random.between(3, 12) : random.between(12, 50)),
      fault_percent(random.chance(60) ? 0 : random.between(1, 4)),
      transfers{.done_percent = random.chance(50) ? random.between(30, 100) : random.between(4, 30),
                .fail_percent = random.chance(50) ? 0 : random.between(2, 30),
                .stuck_partition = random.chance(40) ? std::optional<std::int64_t>(0) : std::nullopt} {}

Simulation::Simulation(const Setup& setup, Coverage& coverage)
    : setup_(setup),
      random_(setup.seed),
      mood_(random_),
      layout_(random_config(random_, mood_.typical_len)),
      habits_(random_),
      coverage_(coverage),
      scheduler_(layout_.config()),
      memory_(layout_),
      oracle_(layout_),
      device_(layout_, memory_, habits_.fault_percent),
      transport_(layout_, memory_, habits_.transfers),
      sessions_(layout_, mood_),
      replay_(layout_),
      watch_(coverage) {}

Random Simulation::random_for(std::int64_t what, std::int64_t which) const {
  return Random(scramble(setup_.seed) ^ scramble(static_cast<std::uint64_t>(which * 8 + what)));
}

Report Simulation::run() {
  trace_config(setup_.trace, layout_);
  const std::int64_t last = std::min(habits_.num_rounds, setup_.num_rounds.value_or(habits_.num_rounds));
  while (round_ < last) {
    ++round_;
    run_round();
  }
  finish_all();
  report_.stats = scheduler_.stats();
  coverage_.count("preemptions", report_.stats.num_preemptions);
  coverage_.count("prompt tokens", report_.stats.prefix_query_tokens);
  coverage_.count("prompt tokens from a cache", report_.stats.prefix_hit_tokens);
  return report_;
}

void Simulation::run_round() {
  Random random = random_for(kRound, round_);
  std::vector<Event> batch;
  add_events(batch);
  std::vector<TransferDone> done = transport_.work(random, false);
  if (!batch.empty() || !done.empty()) {
    apply(batch, std::move(done));
  }
  if (random.chance(2)) {
    try_invalid_batch(random);
  }
  const std::size_t num_in_flight = device_.in_flight().size();
  if (num_in_flight < habits_.max_in_flight && (num_in_flight == 0 || random.chance(60))) {
    plan(random);
  } else if (num_in_flight > 0) {
    advance();
  }
}

void Simulation::add_events(std::vector<Event>& batch) {
  Random random = random_for(kCount, round_);
  if (!random.chance(habits_.event_percent)) {
    return;
  }
  const std::int64_t count = random.between(1, kMostEvents);
  for (std::int64_t ordinal = 0; ordinal < count; ++ordinal) {
    const std::int64_t id = round_ * kMostEvents + ordinal;
    if (!setup_.kept || setup_.kept->contains(id)) {
      event_ids_.push_back(id);
      Random own = random_for(kEvent, id);
      sessions_.add_event(own, oracle_, scheduler_, batch);
    }
  }
}

void Simulation::apply(std::vector<Event>& batch, std::vector<TransferDone> done) {
  if (setup_.shuffles) {
    Random random = random_for(kShuffle, round_);
    for (std::size_t left = done.size(); left > 1; --left) {
      std::swap(done[left - 1], done[static_cast<std::size_t>(random.between(0, std::ssize(done) - 1)) % left]);
    }
  }
  batch.insert(batch.end(), done.begin(), done.end());
  trace_events(setup_.trace, round_, batch);
  const Snapshot before = snapshot(scheduler_);
  for (const Event& event : batch) {
    scheduler_.enqueue(Event(event));
    report_.num_requests += std::holds_alternative<Submit>(event) ? 1 : 0;
  }
  const std::vector<Refusal> refusals = scheduler_.apply();
  for (const Refusal& refusal : refusals) {
    require(refusal.needed > refusal.capacity, "refused with", refusal.needed, "of", refusal.capacity);
    coverage_.count("refused");
  }
  oracle_.apply(batch, refusals);
  transport_.settle(done);
  oracle_.check(scheduler_.take_events());
  watch_.batch(before, batch, snapshot(scheduler_), oracle_);
  audit();
}

// Nothing of a batch with an invalid event may take effect.
void Simulation::try_invalid_batch(Random& random) {
  const Stats before = scheduler_.stats();
  for (const auto& [index, key] : oracle_.live()) {
    scheduler_.enqueue(Cancel{.key = key});
  }
  scheduler_.enqueue(sessions_.invalid_event(random, oracle_));
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
  coverage_.count("invalid batch");
  audit();
}

void Simulation::plan(Random& random) {
  const Snapshot before = snapshot(scheduler_);
  const StepPlan* plan = scheduler_.next_plan();
  require(scheduler_.take_events().rows.empty(), "planning ended a request");
  trace_plan(setup_.trace, round_, plan);
  if (plan != nullptr) {
    hash_plan(*plan);
    device_.seat(*plan, oracle_);
    check_sends(*plan);
    transport_.begin(*plan, device_, oracle_, random);
    device_.run(*plan, random);
  }
  watch_.plan(before, plan, snapshot(scheduler_), scheduler_, oracle_);
  if (setup_.picture != nullptr) {
    setup_.picture->add(scheduler_, layout_, round_);
  }
  audit();
}

void Simulation::advance() {
  const DeviceStep step = device_.take_step();
  const Snapshot before = snapshot(scheduler_);
  std::vector<std::int32_t> offsets{0};
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> row_faults;
  for (const RowResult& row : step.rows) {
    token_ids.insert(token_ids.end(), row.token_ids.begin(), row.token_ids.end());
    offsets.push_back(static_cast<std::int32_t>(token_ids.size()));
    row_faults.push_back(row.fault ? 1 : 0);
  }
  trace_result(setup_.trace, round_, step);
  scheduler_.advance(StepResult{.step_id = StepId(step.step_id),
                                .accepted_offsets = offsets,
                                .token_ids = token_ids,
                                .row_faults = row_faults,
                                .fault = step.fault});
  oracle_.settle(step.rows);
  oracle_.check(scheduler_.take_events());
  watch_.result(before, step, snapshot(scheduler_), oracle_);
  audit();
}

void Simulation::audit() {
  const Books books = count_handles(layout_, scheduler_);
  check_pools(layout_, scheduler_, books);
  check_tables(scheduler_, device_);
  check_stats(scheduler_, books, oracle_, transport_);
  replay_.check(scheduler_, memory_, oracle_);
}

// A peer gets all pages of a sequence, in the order of their blocks, with what its next token needs.
void Simulation::check_sends(const StepPlan& plan) const {
  std::set<std::tuple<std::int64_t, std::int32_t>> sent;
  for (std::size_t index = 0; index < plan.store.num_rows(); ++index) {
    const auto row = plan.store.row(index);
    if (row[3] == 0) {
      sent.emplace(row[1], row[2]);
    }
  }
  std::size_t num_matched = 0;
  for (const Transfer& transfer : scheduler_.transfers().records()) {
    const bool is_new = std::any_of(sent.begin(), sent.end(), [&](const auto&) { return true; });
    if (transfer.kind != TransferKind::kSend || !transfer.slot || transfer.id.value() == 0 || !is_new ||
        transport_.is_pending(transfer.id.value())) {
      continue;
    }
    const std::optional<Sequence>& sender = scheduler_.sequences()[static_cast<std::size_t>(transfer.slot->value())];
    if (!sender) {
      continue;  // the audit tells of it
    }
    const Sequence& sequence = *sender;
    const Request& request = *oracle_.find(sequence.key());
    const std::int64_t computed = sequence.computed().value();
    each_of(sequence.grant().home(), sequence.grant().tables(), [&](const auto& group, const auto& table) {
      const GroupSpec& spec = layout_.spec(group.number());
      const std::int64_t size = spec.block_size.value();
      const bool is_state = spec.kind == GroupKind::kRecurrent;
      const std::int64_t seen = spec.kind == GroupKind::kWindow ? spec.window.value() - 1 : is_state ? 1 : computed;
      for (std::int64_t position = std::max<std::int64_t>(0, computed - seen); position < computed; ++position) {
        const std::int32_t page = table.page(Blocks(position / size)).value();
        require(sent.contains({group.number(), page}), "request", sequence.key(), "is sent without position", position);
        const std::size_t cell = is_state ? 0 : static_cast<std::size_t>(position % size);
        require(memory_.device(group.number(), page).cells[cell] == request.history[static_cast<std::size_t>(position)],
                "request", sequence.key(), "sends foreign K/V at", position, "group", group.number());
      }
    });
    ++num_matched;
  }
  require(sent.empty() || num_matched > 0, "pages are sent that belong to nobody");
}

void Simulation::hash_plan(const StepPlan& plan) {
  for (const auto values : {plan.rows.values(), plan.token_ids.values(), plan.seated.values(), plan.page_delta.values(),
                            plan.load.values(), plan.store.values()}) {
    report_.plan_hash = scramble(report_.plan_hash ^ values.size());
    for (const std::int32_t value : values) {
      report_.plan_hash = scramble(report_.plan_hash ^ static_cast<std::uint32_t>(value));
    }
  }
}

// With no more events every request ends and every page comes back.
void Simulation::finish_all() {
  const std::int64_t first = round_;
  while (scheduler_.has_work() || !device_.in_flight().empty() || transport_.num_in_flight() > 0) {
    ++round_;
    require(round_ - first < kMostDrainRounds, "no end in sight:", scheduler_.stats().num_running, "running",
            scheduler_.stats().num_waiting, "waiting", transport_.num_in_flight(), "transfers");
    Random random = random_for(kRound, round_);
    std::vector<Event> none;
    std::vector<TransferDone> done = transport_.work(random, random.chance(20));
    if (!done.empty()) {
      apply(none, std::move(done));
    }
    if (device_.in_flight().size() < habits_.max_in_flight && scheduler_.has_work()) {
      plan(random);
    }
    if (!device_.in_flight().empty()) {
      advance();
    }
  }
  require(oracle_.live().empty(), oracle_.live().size(), "requests never ended");
  ++round_;
  std::vector<Event> late{Tick{.now_ms = kNoEnd}};
  apply(late, {});
  check_baseline(layout_, scheduler_);
}

}  // namespace tokenspeed::control::sim
