// SPDX-License-Identifier: Apache-2.0
// What can only be seen from inside: handles, the index, hashes, the order of eviction, and policy. Built with
// TOKENSPEED_TESTS and run at the end of its build.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache_groups.h"
#include "check.h"
#include "ledger.h"
#include "policy.h"
#include "prefix_index.h"
#include "token_hash.h"

namespace tokenspeed::control {
namespace {

struct Test {
  const char* name;
  void (*run)();
};

#define EXPECT(condition) TS_CHECK(condition)

template <class Function>
bool throws(Function&& function) {
  try {
    std::forward<Function>(function)();
  } catch (const CheckError&) {
    return true;
  }
  return false;
}

// A ledger in the middle of a good step, which is what a receipt takes.
struct Settling {
  Settling() : ledger(1) {
    ledger.dispatch(StepId(1));
    ledger.begin_settling(StepId(1), false);
  }
  StepLedger ledger;
};

BlockHash hash_of(std::uint64_t value) { return BlockHash{.high = value * 7, .low = value * 1'000'003}; }

void moving_over_a_live_handle_throws() {
  BlockPool pool(Blocks(2));
  WritableDevicePage first = pool.take_free();
  WritableDevicePage second = pool.take_free();
  EXPECT(throws([&] { first = std::move(second); }));
  EXPECT(first.page() == DevicePage(1) && second.page() == DevicePage(2));  // NOLINT(bugprone-use-after-move)
  pool.release(std::move(first));
  pool.release(std::move(second));
  EXPECT(pool.num_free() == Blocks(2));
}

void a_handle_that_was_given_away_is_dead() {
  BlockPool pool(Blocks(2));
  WritableDevicePage page = pool.take_free();
  pool.release(std::move(page));
  EXPECT(throws([&] { (void)page.page(); }));              // NOLINT(bugprone-use-after-move)
  EXPECT(throws([&] { pool.release(std::move(page)); }));  // NOLINT(bugprone-use-after-move)
  EXPECT(pool.num_free() == Blocks(2));
}

void the_null_page_is_never_handed_out() {
  BlockPool pool(Blocks(3));
  std::vector<WritableDevicePage> pages;
  while (pool.has_free()) {
    pages.push_back(pool.take_free());
    EXPECT(!pages.back().page().is_null());
  }
  EXPECT(pages.size() == 3);
  EXPECT(throws([&] { (void)pool.take_free(); }));
  for (WritableDevicePage& page : pages) {
    pool.release(std::move(page));
  }
}

void a_shared_page_is_freed_with_its_last_share() {
  const Settling settling;
  BlockPool pool(Blocks(1));
  SealedDevicePage first = pool.seal(pool.take_free(), settling.ledger.receipt());
  SealedDevicePage second = pool.share(first);
  EXPECT(pool.num_shares(first.page()) == 2 && pool.num_shared() == Blocks(1));
  pool.release(std::move(first));
  EXPECT(pool.num_free() == Blocks(0));
  pool.release(std::move(second));
  EXPECT(pool.num_free() == Blocks(1));
}

void a_receipt_takes_a_step_that_ended_well() {
  StepLedger ledger(1);
  EXPECT(throws([&] { (void)ledger.receipt(); }));
  ledger.dispatch(StepId(1));
  EXPECT(throws([&] { (void)ledger.receipt(); }));
  ledger.begin_settling(StepId(1), true);
  EXPECT(throws([&] { (void)ledger.receipt(); }));
  ledger.end_settling();
}

void a_seat_retires_only_when_no_step_leases_it() {
  StepLedger ledger(2);
  ledger.add_row(Slot(0), Seat(1), Tokens(1), true);
  ledger.dispatch(StepId(1));
  EXPECT(!ledger.is_idle(Seat(1)) && ledger.is_idle(Seat(0)));
  EXPECT(throws([&] { (void)ledger.retirement(Seat(1)); }));
  ledger.begin_settling(StepId(1), false);
  EXPECT(throws([&] { ledger.end_settling(); }));
  (void)ledger.settle_next();
  ledger.end_settling();
  EXPECT(ledger.retirement(Seat(1)).seat() == Seat(1));
}

void results_come_in_the_order_of_their_steps() {
  StepLedger ledger(1);
  ledger.dispatch(StepId(1));
  ledger.dispatch(StepId(2));
  EXPECT(throws([&] { ledger.dispatch(StepId(3)); }));
  EXPECT(throws([&] { ledger.begin_settling(StepId(2), false); }));
  ledger.begin_settling(StepId(1), false);
  ledger.end_settling();
  EXPECT(throws([&] { ledger.begin_settling(StepId(1), false); }));
}

// Random inserts and erasures in a nearly full table, beside a map.
void the_index_equals_a_map() {
  const Settling settling;
  constexpr std::int64_t kBlocks = 64;
  BlockPool pool((Blocks(kBlocks)));
  PrefixIndex index((Blocks(kBlocks)));
  std::vector<SealedDevicePage> pages;
  while (pool.has_free()) {
    pages.push_back(pool.seal(pool.take_free(), settling.ledger.receipt()));
  }
  std::map<std::uint64_t, DevicePage> model;
  std::uint64_t random = 1;
  for (int round = 0; round < 20'000; ++round) {
    random = random * 6364136223846793005ULL + 1442695040888963407ULL;
    const std::uint64_t key = (random >> 33U) % 160;
    // All hashes fall on few homes, so that runs are long and wrap around.
    const BlockHash hash{.high = key, .low = (key % 8) * 0x1FULL + 0x70ULL};
    if (model.contains(key) && random % 3 == 0) {
      index.erase(hash);
      model.erase(key);
    } else if (model.size() < pages.size()) {
      const SealedDevicePage& page = pages[(random >> 20U) % pages.size()];
      EXPECT(index.insert(hash, page, settling.ledger.receipt()) == model.emplace(key, page.page()).second);
    }
    const auto found = index.find(hash);
    EXPECT(found.has_value() == model.contains(key) && (!found || *found == model.at(key)));
    EXPECT(index.size() == model.size());
  }
  for (SealedDevicePage& page : pages) {
    pool.release(std::move(page));
  }
}

void blocks_last_used_together_go_deepest_first() {
  const Settling settling;
  FullAttentionGroup group(Blocks(4), Tokens(1), true);
  const std::array<BlockHash, 3> hashes{hash_of(1), hash_of(2), hash_of(3)};
  PageTable table;
  for (const BlockHash& hash : hashes) {
    (void)group.grow(table);
    group.seal_next(table, hash, settling.ledger.receipt());
  }
  group.give_back(std::move(table), settling.ledger.retirement(Seat(0)));
  EXPECT(group.available() == Blocks(4) && group.match(hashes).num_blocks == Blocks(3));
  PageTable other;
  (void)group.grow(other);
  EXPECT(group.match(hashes).num_blocks == Blocks(3));  // a free page is taken before anything is evicted
  (void)group.grow(other);
  EXPECT(group.match(hashes).num_blocks == Blocks(2));
  (void)group.grow(other);
  EXPECT(group.match(hashes).num_blocks == Blocks(1));
  group.give_back(std::move(other), settling.ledger.retirement(Seat(0)));
}

void hashes_tell_tokens_order_parents_namespaces_and_contents_apart() {
  const std::array<std::int32_t, 4> ascending{1, 2, 3, 4};
  const std::array<std::int32_t, 4> swapped{2, 1, 3, 4};
  const std::array<std::int32_t, 3> shorter{1, 2, 3};
  const BlockHash root = hash_root("", "");
  const ContentSpan cat{.start = Tokens(0), .length = Tokens(2), .hash_high = 1, .hash_low = 2};
  const ContentSpan dog{.start = Tokens(0), .length = Tokens(2), .hash_high = 1, .hash_low = 3};
  const BlockHash block = hash_block(root, ascending);
  const std::vector<BlockHash> all{root,
                                   hash_root("a", ""),
                                   hash_root("", "a"),
                                   hash_root("ab", ""),
                                   hash_root("a", "b"),
                                   block,
                                   hash_block(root, swapped),
                                   hash_block(root, shorter),
                                   hash_block(hash_root("a", ""), ascending),
                                   hash_block(block, ascending),
                                   hash_content(block, cat, 0),
                                   hash_content(block, dog, 0),
                                   hash_content(block, cat, 1)};
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      EXPECT(all[a].high != all[b].high && all[a].low != all[b].low);
    }
  }
  EXPECT(hash_block(root, ascending) == block);
}

Candidate candidate(std::int64_t arrival, std::int64_t number, std::int64_t cost) {
  return Candidate{.rank = Rank{.virtual_arrival = arrival, .number = number}, .restore_cost = Tokens(cost)};
}

void the_victim_is_never_before_the_one_in_want() {
  const std::array running{candidate(1, 0, 5), candidate(2, 1, 90), candidate(2, 2, 10), candidate(2, 3, 40)};
  EXPECT(policy::choose_victim(running, 0) == 2);  // latest class and arrival, cheapest to restore
  EXPECT(policy::choose_victim(running, 2) == 3);
  EXPECT(policy::choose_victim(running, 3) == 3);  // the last gives way itself
  EXPECT(policy::choose_victim(std::span(running).first(2), 0) == 1);
}

void waiting_counts_as_much_as_priority() {
  const Rank old = policy::rank_of(1, 100, 50, 0);
  EXPECT(policy::rank_of(0, 149, 50, 1) < old);
  EXPECT(old < policy::rank_of(0, 150, 50, 2));
}

constexpr std::array kTests{
    Test{.name = "moving over a live handle throws", .run = moving_over_a_live_handle_throws},
    Test{.name = "a handle that was given away is dead", .run = a_handle_that_was_given_away_is_dead},
    Test{.name = "the null page is never handed out", .run = the_null_page_is_never_handed_out},
    Test{.name = "a shared page is freed with its last share", .run = a_shared_page_is_freed_with_its_last_share},
    Test{.name = "a receipt takes a step that ended well", .run = a_receipt_takes_a_step_that_ended_well},
    Test{.name = "a seat retires only when no step leases it", .run = a_seat_retires_only_when_no_step_leases_it},
    Test{.name = "results come in the order of their steps", .run = results_come_in_the_order_of_their_steps},
    Test{.name = "the index equals a map", .run = the_index_equals_a_map},
    Test{.name = "blocks last used together go deepest first", .run = blocks_last_used_together_go_deepest_first},
    Test{.name = "hashes tell what differs apart",
         .run = hashes_tell_tokens_order_parents_namespaces_and_contents_apart},
    Test{.name = "the victim is never before the one in want", .run = the_victim_is_never_before_the_one_in_want},
    Test{.name = "waiting counts as much as priority", .run = waiting_counts_as_much_as_priority},
};

}  // namespace
}  // namespace tokenspeed::control

int main() {
  int num_failed = 0;
  for (const auto& test : tokenspeed::control::kTests) {
    try {
      test.run();
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", test.name, error.what());
      ++num_failed;
    }
  }
  std::printf("%zu tests, %d failed\n", tokenspeed::control::kTests.size(), num_failed);
  return num_failed == 0 ? 0 : 1;
}
