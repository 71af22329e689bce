// SPDX-License-Identifier: Apache-2.0
// Making a step: decode rows first, then prompts under way, then admissions, until the token budget is spent.
#include <algorithm>

#include "check.h"
#include "scheduler.h"

namespace tokenspeed::control {

namespace {

constexpr Tokens kOneToken{1};
constexpr std::int32_t kFullAttention = 0;

std::int32_t narrow(std::int64_t value) { return static_cast<std::int32_t>(value); }

void push_row(StepPlan& plan, Seat seat, RowKind kind, Tokens context_len, Tokens query_len) {
  plan.rows.push(
      {seat.value(), static_cast<std::int32_t>(kind), narrow(context_len.value()), narrow(query_len.value()), 0});
}

void push_page(StepPlan& plan, Seat seat, Blocks index, DevicePage page) {
  plan.page_delta.push({seat.value(), kFullAttention, narrow(index.value()), page.value()});
}

}  // namespace

// Mints grants, and nothing else does.
class Admission {
 public:
  [[nodiscard]] static Grant mint(SeatHold&& seat, PageTable&& pages) {
    return Grant(AdmissionKey(), std::move(seat), std::move(pages));
  }
};

StepPlan* Scheduler::next_plan() {
  TS_CHECK(ledger_.num_in_flight() < kMaxStepsInFlight, "steps in flight", ledger_.num_in_flight());
  StepPlan& plan = plans_[static_cast<std::size_t>((last_step_ + 1) % std::int64_t{kMaxStepsInFlight})];
  plan.clear();
  plan_decodes(plan);
  Tokens budget = Tokens(config_.max_num_batched_tokens) - Tokens(static_cast<std::int64_t>(plan.rows.num_rows()));
  plan_prefills(plan, budget);
  plan_admissions(plan, budget);
  if (plan.rows.num_rows() == 0) {
    // With nothing in flight nothing will ever change by itself, so whoever waits now would wait for ever.
    TS_CHECK(ledger_.num_in_flight() > 0 || !has_work(), "running", running_.size(), "waiting", waiting_.size(),
             "draining", num_draining_, "available blocks", group_.available());
    return nullptr;
  }
  ++last_step_;
  plan.step_id = StepId(last_step_);
  ledger_.dispatch(plan.step_id);
  return &plan;
}

void Scheduler::plan_decodes(StepPlan& plan) {
  for (std::size_t position = 0; position < running_.size();) {
    const Slot slot = running_[position];
    Sequence& sequence = at(slot);
    if (!sequence.is<Decoding>() || !sequence.wants_decode()) {
      ++position;
      continue;
    }
    if (!plan_decode_pages(plan, position)) {
      // Either it waits for pages or it gave way itself; then another stands at its position.
      position += position < running_.size() && running_[position] == slot ? 1U : 0U;
      continue;
    }
    // Every step in flight commits its tokens, so what is planned is the lower bound when this row runs.
    const Seat seat = sequence.grant().seat();
    push_row(plan, seat, RowKind::kDecode, sequence.planned(), kOneToken);
    sequence.plan_rows(kOneToken, true);
    ledger_.add_row(slot, seat, kOneToken, true);
    ++position;
  }
}

bool Scheduler::plan_decode_pages(StepPlan& plan, std::size_t position) {
  Sequence& sequence = at(running_[position]);
  const Blocks needed = group_.blocks_covering(sequence.planned() + kOneToken);
  while (sequence.grant().pages().size() < needed) {
    if (!make_room(position)) {
      return false;
    }
    PageTable& pages = sequence.grant().pages();
    const Blocks index = pages.size();
    push_page(plan, sequence.grant().seat(), index, group_.grow(pages));
  }
  return true;
}

bool Scheduler::make_room(std::size_t position) {
  const Slot wanting = running_[position];
  while (group_.available() == Blocks(0)) {
    if (num_draining_ > 0) {
      return false;  // pages come back with the next result; taking more now would only be thrash
    }
    const Slot victim = running_[victim_for(position)];
    preempt(victim);
    if (victim == wanting) {
      return false;
    }
  }
  return true;
}

std::size_t Scheduler::victim_for(std::size_t position) {
  candidates_.clear();
  for (const Slot slot : running_) {
    candidates_.push_back(Candidate{.rank = at(slot).rank(), .restore_cost = at(slot).len()});
  }
  return policy::choose_victim(candidates_, position);
}

void Scheduler::plan_prefills(StepPlan& plan, Tokens& budget) {
  for (const Slot slot : running_) {
    if (budget == Tokens(0)) {
      return;
    }
    if (at(slot).is<Prefilling>()) {
      budget -= add_prefill_row(plan, slot, budget);
    }
  }
}

void Scheduler::plan_admissions(StepPlan& plan, Tokens& budget) {
  // Strictly in order: nobody passes the head of the queue, so nobody starves.
  while (budget > Tokens(0) && !waiting_.empty() && seats_.has_free()) {
    const Slot slot = waiting_.back();
    if (!admit(plan, slot)) {
      return;
    }
    waiting_.pop_back();
    insert_running(slot);
    budget -= add_prefill_row(plan, slot, budget);
  }
}

bool Scheduler::admit(StepPlan& plan, Slot slot) {
  const Blocks available = group_.available();
  if (blocked_ && blocked_->slot == slot && available <= blocked_->available &&
      running_.size() >= blocked_->num_running) {
    return false;
  }
  Sequence& sequence = at(slot);
  const Blocks total = group_.blocks_covering(sequence.len());
  if (std::cmp_less(plan.page_delta.room(), total.value())) {
    return false;
  }
  // A full hit still computes one token, in a page of its own.
  const Tokens most = sequence.len() - kOneToken;
  const Tokens limit = std::min(most, sequence.request().match_limit.value_or(most));
  const Blocks matchable = group_.prefix_caching() ? group_.full_blocks(limit) : Blocks(0);
  const auto hashes = sequence.block_hashes(matchable, group_.block_size());
  const PrefixMatch match = group_.match(hashes);
  const Blocks needed = total - match.num_blocks + match.num_only_cached;
  if (needed + policy::admission_reserve(running_.size()) > available) {
    blocked_ = Blocked{.slot = slot, .available = available, .num_running = running_.size()};
    return false;
  }
  blocked_.reset();
  seat(plan, slot, hashes, match.num_blocks);
  return true;
}

void Scheduler::seat(StepPlan& plan, Slot slot, std::span<const BlockHash> hashes, Blocks matched) {
  Sequence& sequence = at(slot);
  const Blocks total = group_.blocks_covering(sequence.len());
  PageTable pages;
  pages.reserve(total);
  group_.share_prefix(hashes, matched, pages);
  // All pages of the prompt at once: two half-computed prompts can then never wait for each other's pages.
  while (pages.size() < total) {
    (void)group_.grow(pages);
  }
  SeatHold hold = seats_.take();
  const Seat seat = hold.seat();
  const RequestKey key = sequence.key();
  plan.seated.push({seat.value(), key.index, key.generation});
  for (Blocks index; index < total; index += Blocks(1)) {
    push_page(plan, seat, index, pages.page(index));
  }
  const Tokens cached = group_.tokens_in(matched);
  if (!sequence.cached_len()) {
    counters_.prompt_tokens += sequence.len().value();
    counters_.prefix_query_tokens += sequence.len().value();
    counters_.prefix_hit_tokens += cached.value();
  }
  sequence.admit(Admission::mint(std::move(hold), std::move(pages)), cached);
}

Tokens Scheduler::add_prefill_row(StepPlan& plan, Slot slot, Tokens budget) {
  Sequence& sequence = at(slot);
  const Tokens start = sequence.planned();
  const Tokens chunk = policy::prefill_chunk(sequence.len() - start, budget);
  const bool last = start + chunk == sequence.len();
  const Seat seat = sequence.grant().seat();
  push_row(plan, seat, last ? RowKind::kPrefillLast : RowKind::kPrefill, start, chunk);
  plan.token_ids.append(
      sequence.token_ids().subspan(static_cast<std::size_t>(start.value()), static_cast<std::size_t>(chunk.value())));
  sequence.plan_rows(chunk, last);
  ledger_.add_row(slot, seat, chunk, last);
  if (last) {
    sequence.start_decoding();
  }
  return chunk;
}

}  // namespace tokenspeed::control
