// SPDX-License-Identifier: Apache-2.0
// Which signal moves which state where. One on(State&&, Signal) a pair, no fallback: a pair that is missing does not
// compile. The table of docs/control-plane.md is printed from these declarations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "states.h"

namespace tokenspeed::control {

// A text as a template argument.
template <std::size_t N>
struct Why {
  char text[N]{};
  constexpr Why(const char (&from)[N]) { std::copy_n(from, N, text); }  // NOLINT(google-explicit-constructor)
  [[nodiscard]] constexpr std::string_view view() const { return {text, N - 1}; }
};

// The pair leads to one of these states.
template <class... Next>
struct [[nodiscard]] To {
  std::variant<Next...> next;
  template <class S>
  To(S&& state) : next(std::forward<S>(state)) {}  // NOLINT
};
// The pair is in order and moves nothing.
template <Why Reason>
struct Ignore {};
// The pair is a bug of whoever sent the signal.
template <Why Reason>
struct Illegal {};

// What can happen to a sequence. Those that come from outside: Cancelled, Finished, Retained, Released, Expired (a Tick
// reached its deadline), RowDone and Ended (a StepResult), TransferEnded. Those that the planner decides: Admitted,
// PromptPlanned, GaveWay, Reclaimed. Drained: the last lease on the seat has retired.
namespace signal {

struct Admitted {
  static constexpr const char* kName = "Admitted";
  Grant grant;
  bool awaits_transfer = false;
};
struct PromptPlanned {
  static constexpr const char* kName = "PromptPlanned";
};
struct RowDone {
  static constexpr const char* kName = "RowDone";
};
// By its own tokens or by a fault. holds: its pages are to be kept; sends: they go to a peer first.
struct Ended {
  static constexpr const char* kName = "Ended";
  FinishCode reason = FinishCode::kNone;
  bool holds = false;
  bool sends = false;
};
struct Cancelled {
  static constexpr const char* kName = "Cancelled";
};
struct Finished {
  static constexpr const char* kName = "Finished";
  bool holds = false;
};
struct Expired {
  static constexpr const char* kName = "Expired";
};
struct Retained {
  static constexpr const char* kName = "Retained";
};
struct Released {
  static constexpr const char* kName = "Released";
};
struct GaveWay {
  static constexpr const char* kName = "GaveWay";
};
struct TransferEnded {
  static constexpr const char* kName = "TransferEnded";
  bool ok = false;
};
// len: tokens of its history that stay valid, for a hold.
struct Drained {
  static constexpr const char* kName = "Drained";
  const Retirement& retirement;
  Tokens len;
};
struct Reclaimed {
  static constexpr const char* kName = "Reclaimed";
};

}  // namespace signal

template <class... T>
struct TypeList {};

using Signals = TypeList<signal::Admitted, signal::PromptPlanned, signal::RowDone, signal::Ended, signal::Cancelled,
                         signal::Finished, signal::Expired, signal::Retained, signal::Released, signal::GaveWay,
                         signal::TransferEnded, signal::Drained, signal::Reclaimed>;

struct Transitions {
  using A = signal::Admitted;
  static To<AwaitingTransfer, Prefilling> on(Queued&&, A&&);
  static Illegal<"it has its grant"> on(AwaitingTransfer&&, A&&);
  static Illegal<"it has its grant"> on(Prefilling&&, A&&);
  static Illegal<"it has its grant"> on(Decoding&&, A&&);
  static Illegal<"it has ended"> on(Held&&, A&&);
  static To<AwaitingTransfer, Prefilling> on(Preempted&&, A&&);
  static Illegal<"it has ended"> on(SendingKv&&, A&&);
  static Illegal<"its old seat is in use"> on(Draining&&, A&&);
  static Illegal<"it has ended"> on(Done&&, A&&);

  using P = signal::PromptPlanned;
  static Illegal<"it has no seat"> on(Queued&&, P&&);
  static Illegal<"its prefix is not there yet"> on(AwaitingTransfer&&, P&&);
  static To<Decoding> on(Prefilling&&, P&&);
  static Illegal<"its prompt is planned"> on(Decoding&&, P&&);
  static Illegal<"it has ended"> on(Held&&, P&&);
  static Illegal<"it has no seat"> on(Preempted&&, P&&);
  static Illegal<"it has ended"> on(SendingKv&&, P&&);
  static Illegal<"it computes no more"> on(Draining&&, P&&);
  static Illegal<"it has ended"> on(Done&&, P&&);

  using R = signal::RowDone;
  static Illegal<"it has no row"> on(Queued&&, R&&);
  static Illegal<"it has no row"> on(AwaitingTransfer&&, R&&);
  static Ignore<"moves the counters, not the state"> on(Prefilling&&, R&&);
  static Ignore<"moves the counters, not the state"> on(Decoding&&, R&&);
  static Illegal<"it has no row"> on(Held&&, R&&);
  static Illegal<"it has no row"> on(Preempted&&, R&&);
  static Illegal<"it has no row"> on(SendingKv&&, R&&);
  static Ignore<"its last rows come in"> on(Draining&&, R&&);
  static Illegal<"it has no row"> on(Done&&, R&&);

  using E = signal::Ended;
  static Illegal<"it has no row"> on(Queued&&, E&&);
  static Illegal<"it has no row"> on(AwaitingTransfer&&, E&&);
  static To<Draining> on(Prefilling&&, E&&);
  static To<Draining> on(Decoding&&, E&&);
  static Illegal<"it has ended"> on(Held&&, E&&);
  static Illegal<"it has no row"> on(Preempted&&, E&&);
  static Illegal<"it has ended"> on(SendingKv&&, E&&);
  static To<Draining> on(Draining&&, E&&);
  static Illegal<"it has ended"> on(Done&&, E&&);

  using C = signal::Cancelled;
  static To<Done> on(Queued&&, C&&);
  static To<Draining> on(AwaitingTransfer&&, C&&);
  static To<Draining> on(Prefilling&&, C&&);
  static To<Draining> on(Decoding&&, C&&);
  static To<Done> on(Held&&, C&&);
  static To<Done> on(Preempted&&, C&&);
  static To<SendingKv> on(SendingKv&&, C&&);
  static To<Draining> on(Draining&&, C&&);
  static Ignore<"crossed with the end"> on(Done&&, C&&);

  using F = signal::Finished;
  static To<Done> on(Queued&&, F&&);
  static To<Draining> on(AwaitingTransfer&&, F&&);
  static To<Draining> on(Prefilling&&, F&&);
  static To<Draining> on(Decoding&&, F&&);
  static Ignore<"crossed with the end"> on(Held&&, F&&);
  static To<Done> on(Preempted&&, F&&);
  static Ignore<"crossed with the end"> on(SendingKv&&, F&&);
  static To<Draining> on(Draining&&, F&&);
  static Ignore<"crossed with the end"> on(Done&&, F&&);

  using X = signal::Expired;
  static To<Done> on(Queued&&, X&&);
  static To<Draining> on(AwaitingTransfer&&, X&&);
  static To<Draining> on(Prefilling&&, X&&);
  static To<Draining> on(Decoding&&, X&&);
  static To<Done> on(Held&&, X&&);
  static To<Done> on(Preempted&&, X&&);
  static Ignore<"the peer may still read"> on(SendingKv&&, X&&);
  static To<Draining> on(Draining&&, X&&);
  static Ignore<"crossed with the end"> on(Done&&, X&&);

  using K = signal::Retained;
  static Ignore<"noted for the end"> on(Queued&&, K&&);
  static Ignore<"noted for the end"> on(AwaitingTransfer&&, K&&);
  static Ignore<"noted for the end"> on(Prefilling&&, K&&);
  static Ignore<"noted for the end"> on(Decoding&&, K&&);
  static Ignore<"moves the deadline, not the state"> on(Held&&, K&&);
  static Ignore<"noted for the end"> on(Preempted&&, K&&);
  static Ignore<"noted for the end"> on(SendingKv&&, K&&);
  static Ignore<"noted for the end"> on(Draining&&, K&&);
  static Ignore<"its pages are gone"> on(Done&&, K&&);

  using L = signal::Released;
  static Ignore<"noted for the end"> on(Queued&&, L&&);
  static Ignore<"noted for the end"> on(AwaitingTransfer&&, L&&);
  static Ignore<"noted for the end"> on(Prefilling&&, L&&);
  static Ignore<"noted for the end"> on(Decoding&&, L&&);
  static To<Done> on(Held&&, L&&);
  static Ignore<"noted for the end"> on(Preempted&&, L&&);
  static To<SendingKv> on(SendingKv&&, L&&);
  static To<Draining> on(Draining&&, L&&);
  static Ignore<"its pages are gone"> on(Done&&, L&&);

  using G = signal::GaveWay;
  static Illegal<"it owns nothing"> on(Queued&&, G&&);
  static Illegal<"a transfer writes its pages"> on(AwaitingTransfer&&, G&&);
  static To<Draining> on(Prefilling&&, G&&);
  static To<Draining> on(Decoding&&, G&&);
  static Illegal<"it is reclaimed instead"> on(Held&&, G&&);
  static Illegal<"it owns nothing"> on(Preempted&&, G&&);
  static Illegal<"a peer reads its pages"> on(SendingKv&&, G&&);
  static Illegal<"its pages come back anyway"> on(Draining&&, G&&);
  static Illegal<"it owns nothing"> on(Done&&, G&&);

  using T = signal::TransferEnded;
  static Illegal<"it has no transfer"> on(Queued&&, T&&);
  static To<Prefilling, Draining> on(AwaitingTransfer&&, T&&);
  static Illegal<"it has no transfer"> on(Prefilling&&, T&&);
  static Illegal<"it has no transfer"> on(Decoding&&, T&&);
  static Illegal<"it has no transfer"> on(Held&&, T&&);
  static Illegal<"it has no transfer"> on(Preempted&&, T&&);
  static To<Draining> on(SendingKv&&, T&&);
  static Ignore<"its lease retires, the seat drains"> on(Draining&&, T&&);
  static Illegal<"it has no transfer"> on(Done&&, T&&);

  using D = signal::Drained;
  static Illegal<"it has no seat"> on(Queued&&, D&&);
  static Illegal<"it is not draining"> on(AwaitingTransfer&&, D&&);
  static Illegal<"it is not draining"> on(Prefilling&&, D&&);
  static Illegal<"it is not draining"> on(Decoding&&, D&&);
  static Illegal<"it has no seat"> on(Held&&, D&&);
  static Illegal<"it has no seat"> on(Preempted&&, D&&);
  static Illegal<"it is not draining"> on(SendingKv&&, D&&);
  static To<Preempted, SendingKv, Held, Done> on(Draining&&, D&&);
  static Illegal<"it has no seat"> on(Done&&, D&&);

  using M = signal::Reclaimed;
  static Illegal<"it holds nothing"> on(Queued&&, M&&);
  static Illegal<"it gives way instead"> on(AwaitingTransfer&&, M&&);
  static Illegal<"it gives way instead"> on(Prefilling&&, M&&);
  static Illegal<"it gives way instead"> on(Decoding&&, M&&);
  static To<Done> on(Held&&, M&&);
  static Illegal<"it holds nothing"> on(Preempted&&, M&&);
  static Illegal<"a peer reads its pages"> on(SendingKv&&, M&&);
  static Illegal<"its pages come back anyway"> on(Draining&&, M&&);
  static Illegal<"it holds nothing"> on(Done&&, M&&);

 private:
  static Draining drain(Seated& state, Fate fate, FinishCode reason, bool holds = false);
};

template <class Result>
inline constexpr bool kIsOutcome = false;
template <class... Next>
inline constexpr bool kIsOutcome<To<Next...>> = true;
template <Why Reason>
inline constexpr bool kIsOutcome<Ignore<Reason>> = true;
template <Why Reason>
inline constexpr bool kIsOutcome<Illegal<Reason>> = true;

// An overload of exactly this pair: one that takes the state or the signal by a conversion does not count.
template <class Table, class S, class Signal>
using OutcomeOf = decltype(Table::on(std::declval<S>(), std::declval<Signal>()));
template <class Table, class S, class Signal>
concept HandlesPair = requires {
  static_cast<OutcomeOf<Table, S, Signal> (*)(S&&, Signal&&)>(&Table::on);
  requires kIsOutcome<OutcomeOf<Table, S, Signal>>;
};

// A table that takes what no list names has a fallback.
struct NoState {};
struct NoSignal {};

template <class Table, class S, class... Signal>
consteval bool handles_signals(TypeList<Signal...>) {
  return (HandlesPair<Table, S, Signal> && ...) && !HandlesPair<Table, S, NoSignal>;
}

// Every state with every signal.
template <class Table, class... S, class... Signal>
consteval bool handles_all(const std::variant<S...>*, TypeList<Signal...> signals) {
  return (handles_signals<Table, S>(signals) && ...) && !(HandlesPair<Table, NoState, Signal> || ...);
}

static_assert(handles_all<Transitions>(static_cast<const State*>(nullptr), Signals()),
              "a (state, signal) pair has no Transitions::on");

}  // namespace tokenspeed::control
