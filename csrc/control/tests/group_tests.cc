// SPDX-License-Identifier: Apache-2.0
// Cache groups: what a sequence still needs, where a prompt may resume, what is set aside.
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "group_rig.h"
#include "partition.h"

namespace tokenspeed::control::testing {
namespace {

using Full = kind::FullAttention;
using Window = kind::SlidingWindow;
using State = kind::RecurrentState;

void each_kind_needs_its_own_blocks() {
  const Rig<Full> all(full(8));
  const Rig<Window> last_eight(window(8, 8));
  const Rig<State> state(recurrent(8));
  // The token at `context` sees the window's eight, itself included; a state is read where the last token left it.
  const std::array<std::array<std::int64_t, 4>, 6> expected{
      {{0, 0, 0, 0}, {7, 0, 0, 1}, {8, 0, 0, 1}, {10, 0, 0, 2}, {11, 0, 1, 2}, {23, 0, 4, 5}}};
  for (const auto& [context, full_first, window_first, state_first] : expected) {
    EXPECT(all.group.first_needed(Tokens(context)) == Blocks(full_first), context);
    EXPECT(last_eight.group.first_needed(Tokens(context)) == Blocks(window_first), context);
    EXPECT(state.group.first_needed(Tokens(context)) == Blocks(state_first), context);
  }
}

void full_attention_resumes_after_an_unbroken_prefix() {
  Rig<Full> rig(full(8));
  const Prompt prompt(1);
  rig.publish(prompt, 0, 3);
  EXPECT(rig.resumable(prompt, 32) == 12 && rig.resumable(prompt, 8) == 8 && rig.resumable(Prompt(2), 32) == 0);
  EXPECT(rig.group.resumable(prompt.hashes(), Tokens(32), Tokens(8), false) == Tokens(8));  // a multiple of the unit
}

void a_window_resumes_where_all_that_it_sees_is_there() {
  Rig<Window> rig(window(8, 8));
  const Prompt prompt(1);
  rig.publish(prompt, 1, 2);  // block 0 has expired
  EXPECT(rig.resumable(prompt, 12) == 12 && rig.resumable(prompt, 32) == 12);
  EXPECT(rig.resumable(prompt, 8) == 0);  // which would read block 0
}

void a_state_resumes_only_at_a_snapshot() {
  Rig<State> rig(recurrent(8));
  const Prompt prompt(1);
  rig.publish(prompt, 1, 1);
  EXPECT(rig.resumable(prompt, 32) == 8 && rig.resumable(prompt, 8) == 8 && rig.resumable(prompt, 4) == 0);
}

void all_groups_resume_at_one_boundary() {
  KvLog log(false);
  const Settling settling;
  const std::array specs{full(8), window(8, 8), recurrent(4, Tokens(8))};
  Partition partition(PartitionId(0), specs, 1, options_with(log, HostStore::kOnPressure));
  const Prompt prompt(1);
  EXPECT(partition.boundary_unit() == Tokens(8) && partition.snapshot_unit() == Tokens(8));
  const auto publish = [&]<class Kind>(CacheGroup<Kind>& group, std::int64_t first, std::int64_t end) {
    PageTable<Kind> table;
    table.skip_to(Blocks(first));
    for (std::int64_t block = first; block < end; ++block) {
      const Tokens tokens = group.tokens_in(Blocks(block + 1));
      (void)group.grow(table, tokens);
      group.seal(table, tokens, prompt.hashes(), prompt.ids(), settling.ledger.receipt());
    }
    group.give_back(std::move(table), settling.ledger.retirement(Seat(0)));
  };
  const auto boundary = [&](std::int64_t limit) {
    return partition.common_boundary(prompt.hashes(), Tokens(limit), true).value();
  };
  publish(partition.group<Full>(Group(0)), 0, 7);
  EXPECT(boundary(31) == 0);
  publish(partition.group<State>(Group(2)), 1, 2);
  EXPECT(boundary(31) == 0);
  publish(partition.group<Window>(Group(1)), 4, 6);
  EXPECT(boundary(31) == 0);  // the window could go on at 24, where there is no snapshot, and not at 16, where there is
  publish(partition.group<Window>(Group(1)), 2, 4);
  EXPECT(boundary(31) == 16);
  EXPECT(boundary(15) == 0);
  publish(partition.group<State>(Group(2)), 2, 3);
  EXPECT(boundary(31) == 24 && boundary(23) == 16);
}

void demand_counts_what_is_only_cached_and_not_what_others_use() {
  Rig<Full> rig(full(8));
  const Prompt prompt(1);
  PageTable<Full> table = rig.fill(prompt, 0, 3);
  Demand demand = rig.group.demand(prompt.hashes(), Tokens(12), Tokens(18));
  EXPECT(demand.fresh == Blocks(2) && demand.only_cached == Blocks(0));
  rig.give_back(std::move(table));
  demand = rig.group.demand(prompt.hashes(), Tokens(12), Tokens(18));
  EXPECT(demand.fresh == Blocks(2) && demand.only_cached == Blocks(3));
  demand = rig.group.demand(prompt.hashes(), Tokens(0), Tokens(18));
  EXPECT(demand.fresh == Blocks(5) && demand.only_cached == Blocks(0));
}

void a_window_demands_only_what_it_sees() {
  Rig<Window> rig(window(8, 8));
  const Prompt prompt(1);
  rig.publish(prompt, 0, 4);
  const Demand demand = rig.group.demand(prompt.hashes(), Tokens(16), Tokens(18));
  EXPECT(demand.fresh == Blocks(0) && demand.only_cached == Blocks(2));
}

void an_opened_table_shares_what_matched() {
  Rig<Window> rig(window(8, 8));
  const Prompt prompt(1);
  PageTable<Window> first = rig.fill(prompt, 0, 4);
  PageTable<Window> second;
  std::vector<LoadItem<Window>> loads;
  rig.group.open(second, prompt.hashes(), Tokens(16), false, loads);
  EXPECT(loads.empty() && second.first() == Blocks(2) && second.size() == Blocks(4));
  EXPECT(second.page(Blocks(0)).is_null() && second.page(Blocks(3)) == first.page(Blocks(3)));
  EXPECT(rig.group.device().num_shares(first.page(Blocks(3))) == 2);
  rig.give_back(std::move(first));
  rig.give_back(std::move(second));
  EXPECT(rig.group.device().num_cached() == Blocks(4) && rig.group.device().num_shared() == Blocks(0));
}

void a_state_needs_one_page_and_skips_what_lies_between() {
  Rig<State> rig(recurrent(8));
  PageTable<State> table;
  EXPECT(rig.group.missing(table, Tokens(16)) == Blocks(1) && rig.group.next_block(table, Tokens(16)) == Blocks(3));
  (void)rig.group.grow(table, Tokens(16));
  EXPECT(table.size() == Blocks(4) && rig.group.device().num_writable() == Blocks(1));
  EXPECT(rig.group.missing(table, Tokens(16)) == Blocks(0) && rig.group.missing(table, Tokens(17)) == Blocks(1));
  rig.give_back(std::move(table));
}

void a_state_is_published_only_on_its_boundary() {
  Rig<State> rig(recurrent(8));
  const Prompt prompt(1);
  PageTable<State> table;
  (void)rig.group.grow(table, Tokens(8));
  const auto seal = [&](std::int64_t computed) {
    rig.group.seal(table, Tokens(computed), prompt.hashes(), prompt.ids(), rig.settling.ledger.receipt());
  };
  seal(7);
  EXPECT(rig.group.index().size() == 0);
  EXPECT(throws([&] { seal(9); }));  // the page holds a later state by now
  seal(8);
  EXPECT(rig.group.index().size() == 1 && rig.resumable(prompt, 32) == 8);
  rig.give_back(std::move(table));
}

void only_what_is_computed_and_full_is_published() {
  Rig<Full> rig(full(8));
  const Prompt prompt(1);
  PageTable<Full> table;
  while (rig.group.missing(table, Tokens(12)) > Blocks(0)) {
    (void)rig.group.grow(table, Tokens(12));
  }
  rig.group.seal(table, Tokens(7), prompt.hashes(), prompt.ids(), rig.settling.ledger.receipt());
  EXPECT(rig.group.index().size() == 1 && table.is_writable(Blocks(1)) && rig.resumable(prompt, 32) == 4);
  EXPECT(rig.group.private_tokens(table) == Tokens(12));
  rig.give_back(std::move(table));
  EXPECT(rig.group.device().num_cached() == Blocks(1) && rig.group.device().num_free() == Blocks(7));
}

void the_first_page_under_a_hash_wins() {
  Rig<Full> rig(full(8));
  const Prompt prompt(1);
  PageTable<Full> first = rig.fill(prompt, 0, 2);
  PageTable<Full> second = rig.fill(prompt, 0, 2);
  EXPECT(rig.group.index().size() == 2 && rig.group.device().num_shared() == Blocks(4));
  rig.give_back(std::move(second));
  EXPECT(rig.group.device().num_free() == Blocks(6));  // nobody could ever match the second
  rig.give_back(std::move(first));
  EXPECT(rig.group.device().num_cached() == Blocks(2));
}

void a_block_expires_when_no_later_turn_can_see_it() {
  const Rig<Window> rig(window(8, 8));
  PageTable<Window> table;
  EXPECT(rig.group.expires_at(table) == Tokens(12));  // 4 + 7, on a common boundary
  table.skip_to(Blocks(3));
  EXPECT(rig.group.expires_at(table) == Tokens(24));
  PageTable<Full> all;
  EXPECT(Rig<Full>(full(8)).group.expires_at(all) > Tokens(1'000'000'000));
}

void an_expired_page_is_the_next_to_be_evicted() {
  Rig<Window> rig(window(3, 8));
  const Prompt other(2);
  const Prompt prompt(1);
  rig.publish(other, 0, 1);
  PageTable<Window> table = rig.fill(prompt, 0, 2);
  const std::int32_t expiring = table.page(Blocks(0)).value();
  std::optional<ExpiredPage<Window>> page = table.expire_first();
  EXPECT(page.has_value());
  if (page) {
    rig.group.release_expired(rig.settling.ledger.retire(std::move(*page)));
  }
  EXPECT(rig.group.grow(table, Tokens(12)).value() == expiring && rig.resumable(other, 4) == 4);
  rig.give_back(std::move(table));
}

void the_deepest_block_of_a_prompt_is_evicted_first() {
  Rig<Full> rig(full(4));
  const Prompt prompt(1);
  rig.publish(prompt, 0, 3);
  PageTable<Full> other;
  for (const std::int64_t left : {12, 8, 4}) {  // a free page is taken before anything is evicted
    (void)rig.group.grow(other, Tokens(16));
    EXPECT(rig.resumable(prompt, 32) == left, "left", left);
  }
  rig.give_back(std::move(other));
}

void without_prefix_caching_nothing_is_published() {
  KvLog log(true);
  const Settling settling;
  CacheOptions options = options_with(log, HostStore::kOnSeal);
  options.prefix_caching = false;
  CacheGroup<Full> group(Group(0), full(2), options);
  const Prompt prompt(1);
  PageTable<Full> table;
  (void)group.grow(table, Tokens(4));
  group.seal(table, Tokens(4), prompt.hashes(), prompt.ids(), settling.ledger.receipt());
  EXPECT(group.index().size() == 0 && log.take().rows.empty());
  group.give_back(std::move(table), settling.ledger.retirement(Seat(0)));
  EXPECT(group.device().num_free() == Blocks(2));
}

void charges_bound_what_runs_and_come_back() {
  Rig<State> rig(recurrent(16));
  const Blocks charge = rig.group.charge_of(Tokens(10'000), 0);
  EXPECT(charge == rig.group.charge_of(Tokens(1'000'000), 0) && charge > Blocks(1) && charge < Blocks(10));
  EXPECT(rig.group.charge_of(Tokens(6), 0) == Blocks(2));  // a short one needs no more than it has blocks
  PageTable<State> first;
  PageTable<State> second;
  rig.group.charge(first, charge);
  EXPECT(throws([&] { rig.group.charge(first, Blocks(1)); }));
  EXPECT(rig.group.charge_room() == Blocks(16) - charge);
  EXPECT(throws([&] { rig.group.charge(second, Blocks(17) - charge); }));
  rig.group.charge(second, Blocks(16) - charge);
  rig.give_back(std::move(first));
  rig.give_back(std::move(second));
  EXPECT(rig.group.charge_room() == Blocks(16));
}

void charges_know_their_kind() {
  EXPECT(Rig<Full>(full(8)).group.charge_of(Tokens(1000), 4) == Blocks(0));
  // A window in a small pool sets the whole sequence aside, in a large one what it can hold at a time.
  const Rig<Window> small(window(8, 8));
  const Rig<Window> large(window(64, 8));
  EXPECT(small.group.holds_whole_sequences() && small.group.charge_of(Tokens(1001), 0) == Blocks(250));
  EXPECT(!large.group.holds_whole_sequences());
  const Blocks charge = large.group.charge_of(Tokens(1001), 0);
  EXPECT(charge < Blocks(12) && charge == large.group.charge_of(Tokens(100'001), 0));
  EXPECT(large.group.charge_of(Tokens(1001), 8) > charge);  // drafts have pages, too
}

void held_pages_are_what_the_next_turn_needs() {
  Rig<Window> rig(window(8, 8));
  const Prompt prompt(1);
  PageTable<Window> table = rig.fill(prompt, 2, 2);
  (void)rig.group.grow(table, Tokens(20));
  std::vector<SealedDevicePage<Window>> kept =
      rig.group.keep(std::move(table), Tokens(17), rig.settling.ledger.retirement(Seat(0)));
  EXPECT(kept.size() == 2 && rig.group.device().num_shared() == Blocks(2));
  EXPECT(rig.group.device().num_free() == Blocks(6));
  rig.group.release(std::move(kept));
  EXPECT(rig.group.device().num_cached() == Blocks(2) && rig.resumable(prompt, 16) == 16);
}

constexpr std::array kTests{
    Test{.name = "each kind needs its own blocks", .run = each_kind_needs_its_own_blocks},
    Test{.name = "full attention resumes after an unbroken prefix",
         .run = full_attention_resumes_after_an_unbroken_prefix},
    Test{.name = "a window resumes where all that it sees is there",
         .run = a_window_resumes_where_all_that_it_sees_is_there},
    Test{.name = "a state resumes only at a snapshot", .run = a_state_resumes_only_at_a_snapshot},
    Test{.name = "all groups resume at one boundary", .run = all_groups_resume_at_one_boundary},
    Test{.name = "demand counts what is only cached", .run = demand_counts_what_is_only_cached_and_not_what_others_use},
    Test{.name = "a window demands only what it sees", .run = a_window_demands_only_what_it_sees},
    Test{.name = "an opened table shares what matched", .run = an_opened_table_shares_what_matched},
    Test{.name = "a state needs one page", .run = a_state_needs_one_page_and_skips_what_lies_between},
    Test{.name = "a state is published only on its boundary", .run = a_state_is_published_only_on_its_boundary},
    Test{.name = "only what is computed and full is published", .run = only_what_is_computed_and_full_is_published},
    Test{.name = "the first page under a hash wins", .run = the_first_page_under_a_hash_wins},
    Test{.name = "a block expires when no later turn can see it", .run = a_block_expires_when_no_later_turn_can_see_it},
    Test{.name = "an expired page is the next to be evicted", .run = an_expired_page_is_the_next_to_be_evicted},
    Test{.name = "the deepest block of a prompt is evicted first",
         .run = the_deepest_block_of_a_prompt_is_evicted_first},
    Test{.name = "without prefix caching nothing is published", .run = without_prefix_caching_nothing_is_published},
    Test{.name = "charges bound what runs and come back", .run = charges_bound_what_runs_and_come_back},
    Test{.name = "charges know their kind", .run = charges_know_their_kind},
    Test{.name = "held pages are what the next turn needs", .run = held_pages_are_what_the_next_turn_needs},
};

}  // namespace

std::span<const Test> group_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
