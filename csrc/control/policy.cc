// SPDX-License-Identifier: Apache-2.0
#include "policy.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "check.h"

namespace tokenspeed::control::policy {

namespace {

// Of a pool, the share that is kept ready to go at once where a host tier can hold what is cached.
constexpr std::int64_t kReadyShare = 16;
// Steps that decode in which a backlog would be worked off, were it to stay as long as it is.
constexpr std::int64_t kMixedSteps = 16;

}  // namespace

Rank rank_of(std::int32_t priority, std::int64_t arrival_step, std::int64_t ageing_steps, std::int64_t number) {
  TS_CHECK(ageing_steps >= 1, "ageing_steps", ageing_steps);
  return Rank{.virtual_arrival = arrival_step + priority * ageing_steps, .number = number};
}

std::size_t choose_victim(std::span<const Candidate> running, std::size_t wanting) {
  TS_CHECK(wanting < running.size(), "wanting", wanting, "running", running.size());
  std::size_t victim = wanting;
  for (std::size_t index = wanting + 1; index < running.size(); ++index) {
    const Candidate& candidate = running[index];
    const Candidate& worst = running[victim];
    const bool less_urgent = candidate.priority > worst.priority;
    const bool cheaper = candidate.priority == worst.priority && candidate.restore_cost <= worst.restore_cost;
    if (victim == wanting || less_urgent || cheaper) {
      victim = index;
    }
  }
  return victim;
}

bool reclaimed_before(const HeldRank& a, const HeldRank& b) {
  return std::tuple(-std::int64_t{a.priority}, a.deadline_ms, a.number) <
         std::tuple(-std::int64_t{b.priority}, b.deadline_ms, b.number);
}

std::optional<std::size_t> choose_place(std::span<const Place> places, std::optional<std::int32_t> hint) {
  std::optional<std::size_t> best;
  const auto key = [&](std::size_t index) {
    const bool hinted = hint && std::cmp_equal(*hint, index);
    return std::tuple(-places[index].warm.value(), places[index].num_running, hinted ? 0 : 1, index);
  };
  for (std::size_t index = 0; index < places.size(); ++index) {
    if (places[index].has_room && (!best || key(index) < key(*best))) {
      best = index;
    }
  }
  return best;
}

Tokens prefill_chunk(Tokens start, Tokens len, Tokens budget, Tokens snapshot_unit) {
  Tokens end = std::min(len, start + budget);
  if (snapshot_unit > Tokens(0)) {
    // The prompt's last token is computed after the last snapshot, so that the next turn can resume there.
    const Tokens reached = std::min(end, len - Tokens(1));
    const Tokens last(reached.value() / snapshot_unit.value() * snapshot_unit.value());
    // A block that a short chunk began has a page already, and it is a snapshot only if its end is not passed over.
    const Tokens begun((start.value() + snapshot_unit.value() - 1) / snapshot_unit.value() * snapshot_unit.value());
    const Tokens snapshot = begun > start ? std::min(begun, last) : last;
    end = snapshot > start ? snapshot : end;
  }
  return end - start;
}

Tokens mixed_share(Tokens backlog, Tokens used, Tokens unit) {
  TS_CHECK(unit >= Tokens(1), "unit", unit);
  const auto part = [&](std::int64_t steps) { return (backlog.value() + steps - 1) / steps; };
  const std::int64_t share =
      std::min(part(kMixedSteps), std::max(4 * unit.value() - used.value(), part(kMostMixedSteps)));
  const std::int64_t least = used.value() + std::max({share, unit.value() / 2, std::int64_t{1}});
  return Tokens((least + unit.value() - 1) / unit.value() * unit.value()) - used;
}

Blocks admission_reserve(std::size_t num_running) { return Blocks(static_cast<std::int64_t>(num_running)); }

Blocks ready_reserve(Blocks total, Blocks host_total) {
  return Blocks(std::min(total.value() / kReadyShare, host_total.value() / 2));
}

}  // namespace tokenspeed::control::policy
