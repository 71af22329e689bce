// SPDX-License-Identifier: Apache-2.0
// Pure decisions: who goes first, how much of a prompt a step takes, who gives way. Knows no pages and no state.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

#include "types.h"

namespace tokenspeed::control {

// A fixed place in the order of service. A request of class p that comes at step t stands as if it had come at
// t + p * ageing_steps in class 0: waiting ageing_steps lifts it past newcomers of the class above. Since ranks never
// change, no two requests can preempt each other in turn.
struct Rank {
  std::int64_t virtual_arrival = 0;
  std::int64_t number = 0;

  auto operator<=>(const Rank&) const = default;
};

// A running sequence as a candidate for preemption. restore_cost: tokens it would compute again at worst.
struct Candidate {
  Rank rank;
  Tokens restore_cost;
};

namespace policy {

[[nodiscard]] Rank rank_of(std::int32_t priority, std::int64_t arrival_step, std::int64_t ageing_steps,
                           std::int64_t number);

// Which of the running (in rank order) gives its pages to the one at `wanting`: never one before it, so the first
// always gets on. Latest virtual arrival; among equals the cheapest to restore, then the last to come.
[[nodiscard]] std::size_t choose_victim(std::span<const Candidate> running, std::size_t wanting);

[[nodiscard]] Tokens prefill_chunk(Tokens remaining, Tokens budget);

// Blocks that admission leaves alone so that sequences which already run do not have to preempt the newcomer at once.
[[nodiscard]] Blocks admission_reserve(std::size_t num_running);

}  // namespace policy
}  // namespace tokenspeed::control
