// SPDX-License-Identifier: Apache-2.0
#include "transitions.h"

#include <optional>

#include "check.h"

namespace tokenspeed::control {

void Grant::forfeit(const Teardown& teardown) noexcept {
  seat_.forfeit(teardown);
  tables_.each([&](auto& tables) {
    for (auto& table : tables) {
      table.forfeit(teardown);
    }
  });
}

namespace {

Fate fate_of(bool holds) { return holds ? Fate::kHeld : Fate::kDone; }

}  // namespace

Draining Transitions::drain(Seated& state, Fate fate, FinishCode reason, bool holds) {
  return Draining(StateKey(), std::move(state.grant_), fate, reason, holds);
}

To<AwaitingTransfer, Prefilling> Transitions::on(Queued&&, A&& admitted) {
  if (admitted.awaits_transfer) {
    return AwaitingTransfer(StateKey(), std::move(admitted.grant));
  }
  return Prefilling(StateKey(), std::move(admitted.grant));
}

To<AwaitingTransfer, Prefilling> Transitions::on(Preempted&&, A&& admitted) {
  return on(Queued(), std::move(admitted));
}

To<Decoding> Transitions::on(Prefilling&& state, P&&) { return Decoding(StateKey(), std::move(state.grant_)); }

To<Draining> Transitions::on(Prefilling&& state, E&& ended) { return drain(state, fate_of(ended.holds), ended.reason); }

To<Draining> Transitions::on(Decoding&& state, E&& ended) {
  const Fate fate = ended.sends ? Fate::kSending : fate_of(ended.holds);
  return drain(state, fate, ended.reason, ended.holds);
}

// A token that was on its way when it gave way can end it, too.
To<Draining> Transitions::on(Draining&& state, E&& ended) {
  TS_CHECK(state.fate_ == Fate::kPreempted, "fate", static_cast<int>(state.fate_));
  const Fate fate = ended.sends ? Fate::kSending : fate_of(ended.holds);
  return drain(state, fate, ended.reason, ended.holds);
}

To<Done> Transitions::on(Queued&&, C&&) { return Done{.reason = FinishCode::kCancelled}; }
To<Draining> Transitions::on(AwaitingTransfer&& state, C&&) {
  return drain(state, Fate::kDone, FinishCode::kCancelled);
}
To<Draining> Transitions::on(Prefilling&& state, C&&) { return drain(state, Fate::kDone, FinishCode::kCancelled); }
To<Draining> Transitions::on(Decoding&& state, C&&) { return drain(state, Fate::kDone, FinishCode::kCancelled); }

To<Done> Transitions::on(Held&& state, C&&) {
  state.pages_.release();
  return Done{.reason = state.reason_};
}

To<Done> Transitions::on(Preempted&&, C&&) { return Done{.reason = FinishCode::kCancelled}; }

// The peer may still read, so the pages stay until its acknowledgement; only the hold is dropped.
To<SendingKv> Transitions::on(SendingKv&& state, C&&) {
  return SendingKv(StateKey(), std::move(state.grant_), state.reason_, false);
}

To<Draining> Transitions::on(Draining&& state, C&&) {
  const FinishCode reason = state.fate_ == Fate::kPreempted ? FinishCode::kCancelled : state.reason_;
  return drain(state, Fate::kDone, reason);
}

To<Done> Transitions::on(Queued&&, F&&) { return Done{.reason = FinishCode::kStop}; }

To<Draining> Transitions::on(AwaitingTransfer&& state, F&&) { return drain(state, Fate::kDone, FinishCode::kStop); }

To<Draining> Transitions::on(Prefilling&& state, F&& finished) {
  return drain(state, fate_of(finished.holds), FinishCode::kStop);
}

To<Draining> Transitions::on(Decoding&& state, F&& finished) {
  return drain(state, fate_of(finished.holds), FinishCode::kStop);
}

To<Done> Transitions::on(Preempted&&, F&&) { return Done{.reason = FinishCode::kStop}; }

To<Draining> Transitions::on(Draining&& state, F&& finished) {
  if (state.fate_ == Fate::kPreempted) {
    return drain(state, fate_of(finished.holds), FinishCode::kStop);
  }
  return drain(state, state.fate_, state.reason_, state.holds_);
}

To<Done> Transitions::on(Queued&&, X&&) { return Done{.reason = FinishCode::kDeadline}; }
To<Draining> Transitions::on(AwaitingTransfer&& state, X&&) { return drain(state, Fate::kDone, FinishCode::kDeadline); }
To<Draining> Transitions::on(Prefilling&& state, X&&) { return drain(state, Fate::kDone, FinishCode::kDeadline); }
To<Draining> Transitions::on(Decoding&& state, X&&) { return drain(state, Fate::kDone, FinishCode::kDeadline); }

To<Done> Transitions::on(Held&& state, X&&) {
  state.pages_.release();
  return Done{.reason = state.reason_};
}

To<Done> Transitions::on(Preempted&&, X&&) { return Done{.reason = FinishCode::kDeadline}; }

To<Draining> Transitions::on(Draining&& state, X&&) {
  if (state.fate_ == Fate::kPreempted) {
    return drain(state, Fate::kDone, FinishCode::kDeadline);
  }
  return drain(state, state.fate_, state.reason_, state.holds_);
}

To<Done> Transitions::on(Held&& state, L&&) {
  state.pages_.release();
  return Done{.reason = state.reason_};
}

To<SendingKv> Transitions::on(SendingKv&& state, L&&) {
  return SendingKv(StateKey(), std::move(state.grant_), state.reason_, false);
}

To<Draining> Transitions::on(Draining&& state, L&&) {
  return drain(state, state.fate_ == Fate::kHeld ? Fate::kDone : state.fate_, state.reason_, false);
}

To<Draining> Transitions::on(Prefilling&& state, G&&) { return drain(state, Fate::kPreempted, FinishCode::kNone); }
To<Draining> Transitions::on(Decoding&& state, G&&) { return drain(state, Fate::kPreempted, FinishCode::kNone); }

To<Prefilling, Draining> Transitions::on(AwaitingTransfer&& state, T&& ended) {
  if (ended.ok) {
    return Prefilling(StateKey(), std::move(state.grant_));
  }
  return drain(state, Fate::kPreempted, FinishCode::kNone);
}

To<Draining> Transitions::on(SendingKv&& state, T&&) { return drain(state, fate_of(state.holds_), state.reason_); }

To<Preempted, SendingKv, Held, Done> Transitions::on(Draining&& state, D&& drained) {
  TS_CHECK(state.grant_.seat() == drained.retirement.seat(), "seat", state.grant_.seat());
  switch (state.fate_) {
    case Fate::kSending:
      return SendingKv(StateKey(), std::move(state.grant_), state.reason_, state.holds_);
    case Fate::kHeld:
      return Held(StateKey(), state.grant_.hold(drained.len, drained.retirement), state.reason_);
    case Fate::kPreempted:
      state.grant_.give_back(drained.retirement);
      return Preempted();
    case Fate::kDone:
      break;
  }
  state.grant_.give_back(drained.retirement);
  return Done{.reason = state.reason_};
}

To<Done> Transitions::on(Held&& state, M&&) {
  state.pages_.release();
  return Done{.reason = state.reason_};
}

}  // namespace tokenspeed::control
