// SPDX-License-Identifier: Apache-2.0
// Promise 6: every (state, signal) pair has an overload of its own that returns To, Ignore or Illegal, and there is no
// fallback. Here derived lists and small tables stand for what somebody might do to states.h and transitions.h.
// CASE 0 compiles; each other case must not. Its comment: the expected diagnostic, what it names, and the reason.
#include <utility>
#include <variant>

#include "transitions.h"

using namespace tokenspeed::control;

using TwoStates = std::variant<Queued, Done>;
using TwoSignals = TypeList<signal::Cancelled, signal::Expired>;

struct Whole {
  static To<Done> on(Queued&&, signal::Cancelled&&);
  static To<Done> on(Queued&&, signal::Expired&&);
  static Ignore<"it has ended"> on(Done&&, signal::Cancelled&&);
  static Illegal<"it has ended"> on(Done&&, signal::Expired&&);
};
struct WithoutLast {
  static To<Done> on(Queued&&, signal::Cancelled&&);
  static To<Done> on(Queued&&, signal::Expired&&);
  static Ignore<"it has ended"> on(Done&&, signal::Cancelled&&);
};

#if CASE == 0
using Table = Whole;
using States = TwoStates;
using Sent = TwoSignals;
static_assert(handles_all<Transitions>(static_cast<const State*>(nullptr), Signals()));
#elif CASE == 1
// assert Transitions::on: a pair without an overload
using Table = WithoutLast;
using States = TwoStates;
using Sent = TwoSignals;
#elif CASE == 2
// assert Transitions::on: a new signal without its pairs
struct Paid {};
using Table = Transitions;
using States = State;
using Sent = TypeList<signal::Cancelled, Paid>;
#elif CASE == 3
// assert Transitions::on: a new state without its pairs
struct Paused {};
using Table = Transitions;
using States = std::variant<Queued, Paused>;
using Sent = Signals;
#elif CASE == 4
// assert Transitions::on: a template is a fallback, even where every pair has an overload of its own
struct Table : Whole {
  using Whole::on;
  template <class S, class Signal>
  static Illegal<"whatever"> on(S&&, Signal&&);
};
using States = TwoStates;
using Sent = TwoSignals;
#elif CASE == 5
// assert Transitions::on: an overload that takes any state by conversion is no overload of the pair
struct Table : WithoutLast {
  using WithoutLast::on;
  static Illegal<"it has ended"> on(TwoStates&&, signal::Expired&&);
};
using States = TwoStates;
using Sent = TwoSignals;
#elif CASE == 6
// assert Transitions::on: nor one that takes any signal
struct AnySignal {
  AnySignal(const signal::Expired&);  // NOLINT(google-explicit-constructor)
};
struct Table : WithoutLast {
  using WithoutLast::on;
  static Illegal<"it has ended"> on(Done&&, AnySignal);
};
using States = TwoStates;
using Sent = TwoSignals;
#elif CASE == 7
// assert Transitions::on: nor one that takes the state as a base class
struct Table {
  static To<Draining> on(Seated&&, signal::Cancelled&&);
};
using States = std::variant<Prefilling, Decoding>;
using Sent = TypeList<signal::Cancelled>;
#elif CASE == 8
// assert Transitions::on: a pair says what becomes of it
struct Table : WithoutLast {
  using WithoutLast::on;
  static void on(Done&&, signal::Expired&&);
};
using States = TwoStates;
using Sent = TwoSignals;
#elif CASE == 9
// no-match on: what is no state of the list finds no overload
struct Paused {};
using Table = decltype(Transitions::on(Paused(), signal::Cancelled()));
using States = State;
using Sent = Signals;
#elif CASE == 10
// no-match on: what is no signal of the list finds no overload
using Table = decltype(Transitions::on(Queued(), 1));
using States = State;
using Sent = Signals;
#elif CASE == 11
// no-match on: a state is given up to a transition
Queued queued;
using Table = decltype(Transitions::on(queued, signal::Cancelled()));
using States = State;
using Sent = Signals;
#endif

static_assert(handles_all<Table>(static_cast<const States*>(nullptr), Sent()),
              "a (state, signal) pair has no Transitions::on");
