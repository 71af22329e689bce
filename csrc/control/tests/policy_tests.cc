// SPDX-License-Identifier: Apache-2.0
// Policy: pure decisions on plain numbers.
#include <array>
#include <optional>

#include "policy.h"
#include "testing.h"

namespace tokenspeed::control::testing {
namespace {

Candidate candidate(std::int32_t priority, std::int64_t cost) {
  return Candidate{.priority = priority, .restore_cost = Tokens(cost)};
}

Place place(bool has_room, std::int64_t warm, std::size_t num_running) {
  return Place{.has_room = has_room, .warm = Tokens(warm), .num_running = num_running};
}

void the_victim_is_never_before_the_one_in_want() {
  const std::array running{candidate(0, 1), candidate(0, 90), candidate(0, 10), candidate(0, 40)};
  EXPECT(policy::choose_victim(running, 0) == 2);  // the cheapest to restore of those after it
  EXPECT(policy::choose_victim(running, 2) == 3);
  EXPECT(policy::choose_victim(running, 3) == 3);  // the last gives way itself
  EXPECT(throws([&] { (void)policy::choose_victim(running, 4); }));
}

void the_least_urgent_gives_way_before_the_cheapest() {
  const std::array running{candidate(0, 5), candidate(2, 90), candidate(1, 1), candidate(2, 80)};
  EXPECT(policy::choose_victim(running, 0) == 3);
  EXPECT(policy::choose_victim(running, 1) == 3);
  const std::array equals{candidate(0, 5), candidate(1, 7), candidate(1, 7)};
  EXPECT(policy::choose_victim(equals, 0) == 2);  // the last to come
}

void waiting_counts_as_much_as_priority() {
  const Rank old = policy::rank_of(1, 100, 50, 0);
  EXPECT(policy::rank_of(0, 149, 50, 1) < old);
  EXPECT(old < policy::rank_of(0, 150, 50, 2));
  EXPECT(policy::rank_of(0, 7, 50, 3) < policy::rank_of(0, 7, 50, 4));  // arrival breaks ties
  EXPECT(throws([] { (void)policy::rank_of(0, 0, 0, 0); }));
}

void a_chunk_fits_the_budget_and_the_prompt() {
  EXPECT(policy::prefill_chunk(Tokens(0), Tokens(100), Tokens(30), Tokens(0)) == Tokens(30));
  EXPECT(policy::prefill_chunk(Tokens(90), Tokens(100), Tokens(30), Tokens(0)) == Tokens(10));
}

void a_chunk_ends_where_a_state_can_be_published() {
  const Tokens unit(16);
  EXPECT(policy::prefill_chunk(Tokens(0), Tokens(100), Tokens(40), unit) == Tokens(32));
  EXPECT(policy::prefill_chunk(Tokens(32), Tokens(100), Tokens(10), unit) == Tokens(10));  // reaches none
  EXPECT(policy::prefill_chunk(Tokens(42), Tokens(100), Tokens(40), unit) == Tokens(6));   // that of the block it began
  EXPECT(policy::prefill_chunk(Tokens(80), Tokens(100), Tokens(40), unit) == Tokens(16));  // the prompt's last one
  EXPECT(policy::prefill_chunk(Tokens(96), Tokens(100), Tokens(40), unit) == Tokens(4));
  // At the prompt's end a snapshot would leave the next turn no token to compute.
  EXPECT(policy::prefill_chunk(Tokens(0), Tokens(32), Tokens(40), unit) == Tokens(16));
  EXPECT(policy::prefill_chunk(Tokens(16), Tokens(32), Tokens(40), unit) == Tokens(16));
}

// Whatever the budgets, a prompt gets done, no chunk passes the last snapshot, and none passes the one it began.
void chunks_of_any_budget_stop_at_the_snapshots_that_count() {
  const Tokens unit(8);
  for (std::int64_t len = 1; len <= 40; ++len) {
    const Tokens last((len - 1) / 8 * 8);
    for (std::int64_t budget = 1; budget <= 20; ++budget) {
      for (Tokens start; start < Tokens(len);) {
        const Tokens chunk = policy::prefill_chunk(start, Tokens(len), Tokens(budget), unit);
        const Tokens end = start + chunk;
        EXPECT(chunk > Tokens(0) && chunk <= Tokens(budget) && end <= Tokens(len), len, budget, start);
        EXPECT(start >= last || end <= last, "passes the last snapshot", len, budget, start);
        const Tokens begun((start.value() + 7) / 8 * 8);
        EXPECT(start == begun || begun > last || end <= begun, "passes what it began", len, budget, start);
        start = end;
      }
    }
  }
}

void the_warmest_place_wins_then_the_emptiest_then_the_hint() {
  const std::array places{place(true, 0, 1), place(true, 64, 5), place(true, 64, 3), place(false, 128, 0)};
  EXPECT(policy::choose_place(places, std::nullopt) == 2);
  const std::array equals{place(true, 0, 1), place(true, 0, 1), place(true, 0, 1)};
  EXPECT(policy::choose_place(equals, std::nullopt) == 0);
  EXPECT(policy::choose_place(equals, 1) == 1);
  EXPECT(policy::choose_place(places, 0) == 2);  // a hint decides between equals only
  const std::array full{place(false, 64, 0), place(false, 0, 0)};
  EXPECT(!policy::choose_place(full, 0));
}

void a_hold_goes_by_class_then_deadline_then_last_use() {
  const HeldRank urgent{.priority = 0, .deadline_ms = 10, .number = 0};
  const HeldRank sooner{.priority = 1, .deadline_ms = 20, .number = 5};
  const HeldRank later{.priority = 1, .deadline_ms = 30, .number = 1};
  const HeldRank later_used{.priority = 1, .deadline_ms = 30, .number = 2};
  EXPECT(policy::reclaimed_before(sooner, urgent) && !policy::reclaimed_before(urgent, sooner));
  EXPECT(policy::reclaimed_before(sooner, later) && !policy::reclaimed_before(later, sooner));
  EXPECT(policy::reclaimed_before(later, later_used) && !policy::reclaimed_before(later_used, later));
  EXPECT(!policy::reclaimed_before(later, later));
}

void reserves_grow_with_what_runs_and_stay_small() {
  EXPECT(policy::admission_reserve(0) == Blocks(0) && policy::admission_reserve(7) == Blocks(7));
  EXPECT(policy::ready_reserve(Blocks(1600), Blocks(10'000)) == Blocks(100));
  EXPECT(policy::ready_reserve(Blocks(1600), Blocks(10)) == Blocks(5));
  EXPECT(policy::ready_reserve(Blocks(1600), Blocks(0)) == Blocks(0));
}

void what_waits_decides_how_much_a_step_that_decodes_takes() {
  const auto share = [](std::int64_t backlog, std::int64_t used, std::int64_t unit) {
    return policy::mixed_share(Tokens(backlog), Tokens(used), Tokens(unit)).value();
  };
  EXPECT(share(1024, 16, 256) == 240);  // a whole unit with the decodes
  EXPECT(share(16 * 240, 16, 256) == 240);
  EXPECT(share(16 * 241, 16, 256) == 496);                                         // more waits: another unit
  EXPECT(share(16 * 1008, 16, 256) == 1008 && share(64 * 1008, 16, 256) == 1008);  // four units of a longer queue too
  EXPECT(share(64 * 1009, 16, 256) == 1264 && share(393'216, 16, 256) == 6384);    // but not of a very long one
  EXPECT(share(500'000, 2000, 256) == 7984);
  EXPECT(share(1, 128, 256) == 128 && share(1, 129, 256) == 383);  // half a unit at least, however many decode
  EXPECT(share(0, 1, 1) == 1 && share(17, 1, 1) == 2);
  EXPECT(throws([&] { (void)share(1, 1, 0); }));
}

constexpr std::array kTests{
    Test{.name = "the victim is never before the one in want", .run = the_victim_is_never_before_the_one_in_want},
    Test{.name = "the least urgent gives way before the cheapest",
         .run = the_least_urgent_gives_way_before_the_cheapest},
    Test{.name = "waiting counts as much as priority", .run = waiting_counts_as_much_as_priority},
    Test{.name = "a chunk fits the budget and the prompt", .run = a_chunk_fits_the_budget_and_the_prompt},
    Test{.name = "a chunk ends where a state can be published", .run = a_chunk_ends_where_a_state_can_be_published},
    Test{.name = "chunks of any budget stop at the snapshots that count",
         .run = chunks_of_any_budget_stop_at_the_snapshots_that_count},
    Test{.name = "what waits decides how much a step that decodes takes",
         .run = what_waits_decides_how_much_a_step_that_decodes_takes},
    Test{.name = "the warmest place wins, then the emptiest, then the hint",
         .run = the_warmest_place_wins_then_the_emptiest_then_the_hint},
    Test{.name = "a hold goes by class, then deadline, then last use",
         .run = a_hold_goes_by_class_then_deadline_then_last_use},
    Test{.name = "reserves grow with what runs and stay small", .run = reserves_grow_with_what_runs_and_stay_small},
};

}  // namespace

std::span<const Test> policy_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
