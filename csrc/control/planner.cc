// SPDX-License-Identifier: Apache-2.0
// Making a step: what has expired leaves the tables, then decode rows, then prompts under way, then admissions, until
// the token budget is spent; transfers go along.
#include <algorithm>
#include <limits>

#include "books.h"
#include "check.h"
#include "scheduler.h"

namespace tokenspeed::control {

namespace {

constexpr Tokens kOneToken{1};
// Of the queue, that its length is guessed by.
constexpr std::size_t kMostSeen = 32;

std::int32_t narrow(std::int64_t value) { return static_cast<std::int32_t>(value); }

}  // namespace

StepPlan* Scheduler::next_plan() {
  check_whole();
  TS_CHECK(ledger_.num_in_flight() < kMaxStepsInFlight, "steps in flight", ledger_.num_in_flight());
  half_made_ = true;
  StepPlan* const plan = fill_plan();
  half_made_ = false;
  return plan;
}

StepPlan* Scheduler::fill_plan() {
  StepPlan& plan = plans_[static_cast<std::size_t>((last_step_ + 1) % std::int64_t{kMaxStepsInFlight})];
  plan.clear();
  plan_expiry(plan);
  for (Partition& partition : partitions_) {
    plan_decodes(plan, partition);
  }
  budgets_.clear();
  for (Partition& partition : partitions_) {
    budgets_.push_back(prefill_budget(plan, partition));
  }
  for (Partition& partition : partitions_) {
    plan_prefills(plan, partition, budgets_[static_cast<std::size_t>(partition.id().value())]);
  }
  plan_admissions(plan, budgets_);
  plan_stores(plan);
  plan_sends(plan);
  if (plan.is_empty()) {
    // With nothing in flight nothing will ever change by itself, so whoever waits now would wait for ever.
    TS_CHECK(ledger_.num_in_flight() + transfers_.num_in_flight() > 0 || !is_busy(), "running", num_of(List::kRunning),
             "waiting", waiting_.size(), "draining", num_of(List::kEnding));
    return nullptr;
  }
  ++last_step_;
  plan.step_id = StepId(last_step_);
  ledger_.dispatch(plan.step_id);
  return &plan;
}

// Pages that committed tokens no longer need. This step is the first without them in its tables, and its result the one
// that gives them back.
void Scheduler::plan_expiry(StepPlan& plan) {
  for (const Slot slot : expiring_) {
    auto& sequence = sequences_[static_cast<std::size_t>(slot.value())];
    if (!sequence || !sequence->is_running() || !sequence->has_expired_pages()) {
      continue;
    }
    Grant& grant = sequence->grant();
    grant.home().each(grant.tables(), [&]<class Kind>(CacheGroup<Kind>& group, PageTable<Kind>& table) {
      while (group.expires_at(table) <= sequence->computed()) {
        const Blocks block = table.first();
        if (std::optional<ExpiredPage<Kind>> page = table.expire_first()) {
          plan.page_delta.push({grant.seat().value(), group.id().value(), narrow(block.value()), 0});
          ledger_.keep_until_retired(
              Expired<Kind>{.partition = grant.home().id(), .group = group.id(), .page = std::move(*page)});
        }
      }
    });
    note_pages(*sequence);
  }
  expiring_.clear();
}

// Tokens beyond one for each running sequence, which is reserved before any draft.
void Scheduler::plan_decodes(StepPlan& plan, Partition& partition) {
  Roster& roster = roster_of(partition);
  std::int64_t spare = config_.max_num_batched_tokens - static_cast<std::int64_t>(roster.running.size());
  for (std::size_t position = 0; position < roster.running.size();) {
    const Slot slot = roster.running[position];
    Sequence& sequence = at(slot);
    if (!sequence.is<Decoding>() || !sequence.wants_decode()) {
      ++position;
      continue;
    }
    auto drafts = static_cast<std::int32_t>(std::min<std::int64_t>(sequence.draft_room(), spare));
    Tokens end = sequence.planned_high() + kOneToken + Tokens(drafts);
    if (end > sequence.covered() && drafts > 0 && !has_ready_for(sequence, end)) {
      drafts = 0;  // nobody gives way for a guess
      end = sequence.planned_high() + kOneToken;
    }
    if (!secure(roster, position, end)) {
      // Either it waits for pages or it gave way itself; then another stands at its position.
      position += position < roster.running.size() && roster.running[position] == slot ? 1U : 0U;
      continue;
    }
    add_pages(plan, sequence, end);
    add_decode_row(plan, slot, drafts);
    spare -= drafts;
    ++position;
  }
}

// Room for the decode row at that position, others giving way where they must. False: not now.
bool Scheduler::secure(Roster& roster, std::size_t position, Tokens end) {
  const Slot wanting = roster.running[position];
  if (end <= at(wanting).covered()) {
    return true;
  }
  for (;;) {
    const Room room = room_for(at(wanting), end);
    if (room != Room::kNone) {
      return room == Room::kReady;
    }
    const Slot victim = roster.running[victim_for(roster, position)];
    preempt(victim);
    if (victim == wanting) {
      return false;
    }
  }
}

// Every step in flight commits at least one token of each of its rows, so planned_low is a lower bound when this row
// runs; the device's own length is exact.
void Scheduler::add_decode_row(StepPlan& plan, Slot slot, std::int32_t drafts) {
  Sequence& sequence = at(slot);
  const Seat seat = sequence.grant().seat();
  plan.rows.push({seat.value(), static_cast<std::int32_t>(RowKind::kDecode), narrow(sequence.planned_low().value()),
                  1 + drafts, drafts});
  sequence.plan_decode(drafts);
  ledger_.add_row(decode_work(slot, drafts), seat);
}

// Prompt tokens that the step may have in a partition; so far its rows are decodes. Whoever decodes, in whatever
// partition, waits for the whole step. What decodes take leaves a token for each prompt under way, and the bound is of
// prompt tokens alone, so that no number of decodes stalls a prompt.
Tokens Scheduler::prefill_budget(const StepPlan& plan, const Partition& partition) {
  std::int64_t used = 0;
  const std::int32_t seats = config_.max_num_seqs;
  for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
    const auto row = plan.rows.row(index);
    used += row[0] / seats == partition.id().value() ? row[3] : 0;
  }
  const std::int64_t left = config_.max_num_batched_tokens - used;
  const bool decodes = plan.rows.num_rows() > 0;
  const Tokens most(decodes ? std::min(left, config_.max_num_mixed_prefill_tokens.value_or(left)) : left);
  if (!decodes || !config_.mixed_step_unit) {
    return most;
  }
  const Tokens waits = backlog(partition, Tokens(most.value() * policy::kMostMixedSteps));
  return std::min(most, policy::mixed_share(waits, Tokens(used), Tokens(*config_.mixed_step_unit)));
}

// Prompt tokens that are still to be computed in a partition, with its part of the queue, of which no more is looked at
// than changes anything.
Tokens Scheduler::backlog(const Partition& partition, Tokens enough) {
  Tokens running(0);
  for (const Slot slot : roster_of(partition).running) {
    running += at(slot).is<Prefilling>() ? at(slot).len() - at(slot).planned_low() : Tokens(0);
  }
  Tokens queued(0);
  const auto sum = [&] { return running + Tokens(queued.value() / config_.num_partitions); };
  const std::size_t num_seen = std::min(waiting_.size(), kMostSeen);
  for (std::size_t index = 0; index < num_seen && sum() < enough; ++index) {
    Sequence& sequence = at(waiting_[waiting_.size() - 1 - index]);
    Tokens warm(0);
    for (const Partition& each : partitions_) {
      warm = std::max(warm, boundary_in(each, sequence));
    }
    queued += sequence.len() - warm;
  }
  return sum();
}

// Pages for all tokens up to `end`; there must be room for them.
void Scheduler::add_pages(StepPlan& plan, Sequence& sequence, Tokens end) {
  if (end <= sequence.covered()) {
    return;
  }
  Grant& grant = sequence.grant();
  grant.home().each(grant.tables(), [&](auto& group, auto& table) {
    while (group.missing(table, end) > Blocks(0)) {
      const Blocks block = group.next_block(table, end);
      const auto page = group.grow(table, end);
      plan.page_delta.push({grant.seat().value(), group.id().value(), narrow(block.value()), page.value()});
    }
  });
  note_pages(sequence);
}

void Scheduler::note_pages(Sequence& sequence) {
  Tokens covered(std::numeric_limits<std::int64_t>::max());
  Tokens expires_at(std::numeric_limits<std::int64_t>::max());
  Grant& grant = sequence.grant();
  grant.home().each(grant.tables(), [&](auto& group, auto& table) {
    covered = std::min(covered, group.covered(table));
    expires_at = std::min(expires_at, group.expires_at(table));
  });
  sequence.set_pages(covered, expires_at);
}

std::size_t Scheduler::victim_for(Roster& roster, std::size_t position) {
  candidates_.clear();
  for (std::size_t index = 0; index < roster.running.size(); ++index) {
    Sequence& sequence = at(roster.running[index]);
    Tokens cost;
    if (index >= position) {
      Grant& grant = sequence.grant();
      grant.home().each(grant.tables(), [&](auto& group, auto& table) { cost += group.private_tokens(table); });
    }
    candidates_.push_back(Candidate{.priority = sequence.request().priority, .restore_cost = cost});
  }
  return policy::choose_victim(candidates_, position);
}

void Scheduler::preempt(Slot slot) {
  ++counters_.num_preemptions;
  send(slot, signal::GaveWay());
}

void Scheduler::plan_prefills(StepPlan& plan, Partition& partition, Tokens& budget) {
  for (const Slot slot : roster_of(partition).running) {
    if (budget == Tokens(0)) {
      return;
    }
    if (at(slot).is<Prefilling>()) {
      budget -= add_prefill_row(plan, slot, budget);
    }
  }
}

Tokens Scheduler::add_prefill_row(StepPlan& plan, Slot slot, Tokens budget) {
  Sequence& sequence = at(slot);
  const Tokens start = sequence.planned_low();
  const Tokens unit = sequence.grant().home().snapshot_unit();
  const Tokens chunk = policy::prefill_chunk(start, sequence.len(), budget, unit);
  if (start + chunk > sequence.covered() && room_for(sequence, start + chunk) != Room::kReady) {
    return Tokens(0);
  }
  add_pages(plan, sequence, start + chunk);
  const bool last = start + chunk == sequence.len();
  const Seat seat = sequence.grant().seat();
  plan.rows.push({seat.value(), static_cast<std::int32_t>(last ? RowKind::kPrefillLast : RowKind::kPrefill),
                  narrow(start.value()), narrow(chunk.value()), 0});
  plan.token_ids.append(
      sequence.token_ids().subspan(static_cast<std::size_t>(start.value()), static_cast<std::size_t>(chunk.value())));
  sequence.plan_prefill(chunk, last);
  ledger_.add_row(prefill_work(slot, chunk, last), seat);
  if (last) {
    send(slot, signal::PromptPlanned());
  }
  return chunk;
}

}  // namespace tokenspeed::control
