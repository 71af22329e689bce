// SPDX-License-Identifier: Apache-2.0
// The scheduler's lists: which sequence stands where, by its state.
#include "books.h"

#include <algorithm>
#include <limits>

#include "check.h"

namespace tokenspeed::control {

Scheduler::List Scheduler::list_of(const Sequence& sequence) {
  if (sequence.is_running()) {
    return List::kRunning;
  }
  if (sequence.is_waiting()) {
    return List::kWaiting;
  }
  if (sequence.is<Draining>()) {
    return sequence.has_ended() ? List::kEnding : List::kGivingWay;
  }
  if (sequence.is<AwaitingTransfer>()) {
    return List::kAwaiting;
  }
  if (sequence.is<SendingKv>()) {
    return List::kSending;
  }
  return sequence.is<Held>() ? List::kHeld : List::kDone;
}

// Of those that own pages without running; one that awaits a transfer can give way once that has ended.
bool Scheduler::is_leaving(List list) {
  return list == List::kAwaiting || list == List::kGivingWay || list == List::kEnding || list == List::kSending;
}

void Scheduler::leave(List list, Slot slot) {
  --counts_[static_cast<std::size_t>(list)];
  if (list == List::kRunning) {
    // What it owns may be gone by now, so it is looked for in every partition.
    for (Roster& roster : rosters_) {
      std::erase(roster.running, slot);
    }
  } else if (list == List::kWaiting) {
    std::erase(waiting_, slot);
    blocked_.reset();
  } else if (list == List::kHeld) {
    leave_held(slot);
  }
}

void Scheduler::enter(List list, Slot slot) {
  ++counts_[static_cast<std::size_t>(list)];
  if (is_leaving(list)) {
    ++roster_of(at(slot).grant().home()).num_leaving;
  }
  switch (list) {
    case List::kRunning:
      insert_running(slot);
      break;
    case List::kWaiting:
      insert_waiting(slot);
      break;
    case List::kSending:
      to_send_.push_back(slot);
      break;
    case List::kHeld:
      enter_held(slot);
      break;
    case List::kDone: {
      const RequestKey key = at(slot).key();
      stop_timer(at(slot));
      slots_.erase((std::uint64_t{static_cast<std::uint32_t>(key.index)} << 32U) |
                   static_cast<std::uint32_t>(key.generation));
      sequences_[static_cast<std::size_t>(slot.value())].reset();
      free_slots_.push_back(slot);
      --num_sequences_;
      --counts_[static_cast<std::size_t>(List::kDone)];
      break;
    }
    case List::kAwaiting:
    case List::kGivingWay:
    case List::kEnding:
      break;
  }
}

void Scheduler::enter_held(Slot slot) {
  Sequence& sequence = at(slot);
  const HoldWish wish = sequence.hold().value_or(HoldWish{});
  // A time to live that is too long for the clock has no end.
  const std::int64_t longest_ms = std::numeric_limits<std::int64_t>::max() - now_ms_;
  const std::int64_t deadline_ms = wish.deadline_ms.value_or(now_ms_ + std::min(wish.ttl_ms, longest_ms));
  sequence.retain_until(deadline_ms);
  set_timer(deadline_ms, sequence);
  Roster& roster = roster_of(sequence.held().home());
  const HeldEntry entry{.rank = HeldRank{.priority = wish.priority, .deadline_ms = deadline_ms, .number = num_holds_++},
                        .slot = slot,
                        .most_freed = sequence.held().most_freed()};
  const auto before = [](const HeldEntry& a, const HeldEntry& b) { return policy::reclaimed_before(a.rank, b.rank); };
  roster.held.insert(std::upper_bound(roster.held.begin(), roster.held.end(), entry, before), entry);
  roster.most_held += entry.most_freed;
  sessions_[sequence.session()].push_back(slot);
  // Its pages can be reclaimed, so whoever waits may look again.
  blocked_.reset();
}

void Scheduler::leave_held(Slot slot) {
  // By the time it leaves, a sequence that ended has let go of its pages; the books are found by slot.
  for (Roster& roster : rosters_) {
    const auto is_it = [slot](const HeldEntry& entry) { return entry.slot == slot; };
    const auto found = std::find_if(roster.held.begin(), roster.held.end(), is_it);
    if (found != roster.held.end()) {
      roster.most_held -= found->most_freed;
      roster.held.erase(found);
    }
  }
  const auto session = sessions_.find(at(slot).session());
  TS_CHECK(session != sessions_.end(), "request", at(slot).key(), "is in no session");
  std::erase(session->second, slot);
  if (session->second.empty()) {
    sessions_.erase(session);
  }
  blocked_.reset();
}

void Scheduler::drain_if_idle(Slot slot) {
  Sequence& sequence = at(slot);
  if (!sequence.is<Draining>() || !ledger_.is_idle(sequence.grant().seat())) {
    return;
  }
  const Retirement retirement = ledger_.retirement(sequence.grant().seat());
  const bool restarts = !sequence.has_ended();
  blocked_.reset();
  send(slot, signal::Drained{.retirement = retirement, .len = sequence.computed()});
  if (restarts) {
    at(slot).restart();
  }
}

void Scheduler::insert_running(Slot slot) {
  const auto sooner = [this](Slot a, Slot b) { return at(a).rank() < at(b).rank(); };
  auto& running = roster_of(at(slot).grant().home()).running;
  running.insert(std::upper_bound(running.begin(), running.end(), slot, sooner), slot);
}

void Scheduler::insert_waiting(Slot slot) {
  const auto later = [this](Slot a, Slot b) { return at(a).rank() > at(b).rank(); };
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), slot, later), slot);
  // A newcomer may stand before the one that is blocked.
  blocked_.reset();
}

}  // namespace tokenspeed::control
