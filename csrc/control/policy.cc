// SPDX-License-Identifier: Apache-2.0
#include "policy.h"

#include <algorithm>

#include "check.h"

namespace tokenspeed::control::policy {

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
    const bool later = victim == wanting || candidate.rank.virtual_arrival > worst.rank.virtual_arrival;
    const bool cheaper =
        candidate.rank.virtual_arrival == worst.rank.virtual_arrival && candidate.restore_cost <= worst.restore_cost;
    if (later || cheaper) {
      victim = index;
    }
  }
  return victim;
}

Tokens prefill_chunk(Tokens remaining, Tokens budget) { return std::min(remaining, budget); }

Blocks admission_reserve(std::size_t num_running) { return Blocks(static_cast<std::int64_t>(num_running)); }

}  // namespace tokenspeed::control::policy
