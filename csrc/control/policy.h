// SPDX-License-Identifier: Apache-2.0
// Pure decisions: who goes first, how much of a prompt a step takes, who gives way, where a request runs. Knows no
// pages and no state.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
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

// A running sequence as a candidate for preemption. restore_cost: tokens that it would compute again.
struct Candidate {
  std::int32_t priority = 0;
  Tokens restore_cost;
};

// A held session as a candidate for reclaiming.
struct HeldRank {
  std::int32_t priority = 0;
  std::int64_t deadline_ms = 0;
  std::int64_t number = 0;  // of the hold, in order of last use
};

// A partition as a place for a request: whether it has room now, prompt tokens it would not compute, and its load.
struct Place {
  bool has_room = false;
  Tokens warm;
  std::size_t num_running = 0;
};

namespace policy {

[[nodiscard]] Rank rank_of(std::int32_t priority, std::int64_t arrival_step, std::int64_t ageing_steps,
                           std::int64_t number);

// Which of the running (in rank order) gives its pages to the one at `wanting`: never one before it, so the first
// always gets on, and no two can displace each other in turn. Of those after it the least urgent class, then the
// cheapest to restore, then the last to come; itself where there is none.
[[nodiscard]] std::size_t choose_victim(std::span<const Candidate> running, std::size_t wanting);

// Whether a gives up its pages before b: the less urgent class, then the earlier deadline, then the longer unused.
[[nodiscard]] bool reclaimed_before(const HeldRank& a, const HeldRank& b);

// The warmest place that has room, then the least loaded; the hint decides between equals. None where all are full.
[[nodiscard]] std::optional<std::size_t> choose_place(std::span<const Place> places, std::optional<std::int32_t> hint);

// How much of a prompt from `start` to `len` a step takes. snapshot_unit above 0: a chunk that passes a multiple of it
// ends on the last one it reaches, so that the state there can be published; the last one before the prompt's end and
// the one after a `start` between two are never passed over.
[[nodiscard]] Tokens prefill_chunk(Tokens start, Tokens len, Tokens budget, Tokens snapshot_unit);

// Prompt tokens of a step that decodes `used` others, of a backlog of so many: a share, so that a short prompt costs
// those who decode little, and a long queue goes in chunks that are computed well; a smaller share beyond a step of
// four units, so that it takes a very long queue to make everybody wait longer than that. And what is missing to a
// whole number of units, in which there is half a unit at least. Of more than kMostMixedSteps times as much as there
// may be it makes no difference how much it is.
inline constexpr std::int64_t kMostMixedSteps = 64;
[[nodiscard]] Tokens mixed_share(Tokens backlog, Tokens used, Tokens unit);

// Blocks that admission leaves alone so that sequences which already run do not have to preempt the newcomer at once.
[[nodiscard]] Blocks admission_reserve(std::size_t num_running);

// Pages that should be able to go at once where cached pages are copied to the host under pressure. No more than half
// of what the host holds, so that copies do not displace each other.
[[nodiscard]] Blocks ready_reserve(Blocks total, Blocks host_total);

}  // namespace policy
}  // namespace tokenspeed::control
