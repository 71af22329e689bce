// SPDX-License-Identifier: Apache-2.0
// Promise 5: no owning state without a grant. Only admission mints grants, and only transitions make states.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <utility>

#include "sequence.h"
#include "states.h"
#include "transitions.h"

using namespace tokenspeed::control;

struct Given {
  Partition& home;
  SeatHold& seat;
  Tables& tables;
  Grant& grant;
  HeldPages& held;
  Prefilling& prefilling;
  Sequence& sequence;
};

void use(Given& given) {
#if CASE == 0
  given.sequence.handle(signal::Admitted{.grant = std::move(given.grant), .awaits_transfer = false});
#elif CASE == 1
  // private AdmissionKey: only admission mints a grant
  Grant grant(AdmissionKey(), given.home, std::move(given.seat), std::move(given.tables));
#elif CASE == 2
  // private AdmissionKey: not through braces either
  Grant grant({}, given.home, std::move(given.seat), std::move(given.tables));
#elif CASE == 3
  // no-match Grant: and not without the key
  Grant grant(given.home, std::move(given.seat), std::move(given.tables));
#elif CASE == 4
  // private StateKey: no owning state is made from outside, even with a grant
  Prefilling state(StateKey(), std::move(given.grant));
#elif CASE == 5
  // private StateKey: not through braces either
  Decoding state({}, std::move(given.grant));
#elif CASE == 6
  // deleted Decoding: no owning state without a grant
  Decoding state;
#elif CASE == 7
  // private StateKey: a hold is a state, too
  Held state(StateKey(), std::move(given.held), FinishCode::kStop);
#elif CASE == 8
  // no-match Decoding: a state becomes another by a transition only
  Decoding state(std::move(given.prefilling));
#elif CASE == 9
  // protected grant_: what a state owns is its own
  Grant grant = std::move(given.prefilling.grant_);
#elif CASE == 10
  // private state_: nobody sets the state of a sequence
  given.sequence.state_ = Queued();
#elif CASE == 11
  // discards-const operator=: what a sequence shows of its state cannot be changed
  given.sequence.state() = Queued();
#elif CASE == 12
  // deleted Admitted: a sequence is not admitted without a grant
  given.sequence.handle(signal::Admitted());
#elif CASE == 13
  // no-match Draining: a transition leads only where its declaration says
  To<Draining> next = std::move(given.prefilling);
#endif
}
