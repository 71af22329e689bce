// SPDX-License-Identifier: Apache-2.0
// Block pools: who holds a page, and in which order cached pages go.
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "testing.h"

namespace tokenspeed::control::testing {
namespace {

using Kind = kind::FullAttention;
using Pool = BlockPool<tier::Device, Kind>;
using Sealed = SealedDevicePage<Kind>;
using P = DevicePage<Kind>;

// A sealed page that the index names under hash_of(name).
Sealed indexed(Pool& pool, const Settling& settling, std::uint64_t name, bool saved) {
  Sealed sealed = pool.seal(pool.take_free(), settling.ledger.receipt());
  pool.mark_indexed(sealed, hash_of(name), saved);
  return sealed;
}

void the_null_page_is_never_handed_out() {
  Pool pool(Blocks(3));
  std::vector<WritableDevicePage<Kind>> pages;
  while (pool.has_free()) {
    pages.push_back(pool.take_free());
    EXPECT(!pages.back().page().is_null());
  }
  EXPECT(pages.size() == 3 && pool.num_writable() == Blocks(3));
  EXPECT(throws([&] { (void)pool.take_free(); }));
  EXPECT(throws([&] { (void)pool.is_free(P(0)); }));
  EXPECT(throws([&] { (void)pool.is_free(P(4)); }));
  for (WritableDevicePage<Kind>& page : pages) {
    pool.release(std::move(page));
  }
}

void a_shared_page_is_freed_with_its_last_share() {
  const Settling settling;
  Pool pool(Blocks(1));
  Sealed first = pool.seal(pool.take_free(), settling.ledger.receipt());
  Sealed second = pool.share(first);
  EXPECT(pool.num_shares(first.page()) == 2 && pool.num_shared() == Blocks(1));
  pool.release(std::move(first));
  EXPECT(pool.num_free() == Blocks(0));
  pool.release(std::move(second));
  EXPECT(pool.num_free() == Blocks(1) && pool.num_shared() == Blocks(0));
}

void an_indexed_page_without_shares_is_cached_and_comes_back_by_its_hash() {
  const Settling settling;
  Pool pool(Blocks(2));
  Sealed page = indexed(pool, settling, 1, true);
  EXPECT(pool.indexed_as(P(1)) == hash_of(1));
  pool.release(std::move(page));
  EXPECT(pool.num_free() == Blocks(1) && pool.num_cached() == Blocks(1) && pool.available() == Blocks(2));
  Sealed again = pool.share_indexed(P(1), true);
  EXPECT(pool.num_cached() == Blocks(0) && pool.num_shared() == Blocks(1) && pool.available() == Blocks(1));
  EXPECT(throws([&] { (void)pool.share_indexed(P(2), true); }));
  pool.release(std::move(again));
  EXPECT(pool.evict_oldest(true) == hash_of(1));
  EXPECT(pool.num_free() == Blocks(2) && !pool.indexed_as(P(1)));
}

void cached_pages_go_in_the_order_of_last_use() {
  const Settling settling;
  Pool pool(Blocks(3));
  std::vector<Sealed> pages;
  for (std::uint64_t name = 1; name <= 3; ++name) {
    pages.push_back(indexed(pool, settling, name, true));
  }
  for (Sealed& page : pages) {
    pool.release(std::move(page));
  }
  pool.release(pool.share_indexed(P(1), true));
  EXPECT(pool.oldest_saved() == P(2));
  EXPECT(pool.evict_oldest(true) == hash_of(2));
  EXPECT(pool.evict_oldest(true) == hash_of(3));
  EXPECT(pool.evict_oldest(true) == hash_of(1));
  EXPECT(throws([&] { (void)pool.evict_oldest(true); }));
}

// Only what another tier has a copy of may go at once.
void pages_without_a_copy_are_kept_apart() {
  const Settling settling;
  Pool pool(Blocks(2));
  Sealed saved = indexed(pool, settling, 1, true);
  Sealed unsaved = indexed(pool, settling, 2, false);
  pool.release(std::move(unsaved));
  EXPECT(pool.num_cached() == Blocks(1) && pool.num_unsaved() == Blocks(1) && !pool.has_ready());
  EXPECT(pool.oldest_unsaved() == P(2) && !pool.oldest_saved());
  pool.release(std::move(saved));
  EXPECT(pool.num_ready() == Blocks(1) && pool.available() == Blocks(2));
  pool.set_saved(P(2), true);
  EXPECT(pool.num_ready() == Blocks(2) && pool.num_unsaved() == Blocks(0));
  EXPECT(pool.oldest_saved() == P(1));  // what was just copied goes last
  pool.set_saved(P(1), false);
  EXPECT(pool.num_ready() == Blocks(1) && pool.oldest_unsaved() == P(1));
  EXPECT(pool.evict_oldest(false) == hash_of(1));
  EXPECT(pool.evict_oldest(true) == hash_of(2));
}

void a_superseded_page_goes_first_unless_prompts_part_there() {
  const Settling settling;
  Pool pool(Blocks(3));
  Sealed old = indexed(pool, settling, 1, true);
  Sealed superseded = indexed(pool, settling, 2, true);
  Sealed fork = indexed(pool, settling, 3, true);
  pool.release(pool.share_indexed(P(3), true));
  pool.release(pool.share_indexed(P(3), true));
  pool.release(pool.share_indexed(P(2), true));   // one prompt is no fork
  pool.release(pool.share_indexed(P(2), false));  // and a copy is no prompt
  pool.release(std::move(old));
  pool.release_superseded(std::move(superseded));
  pool.release_superseded(std::move(fork));
  EXPECT(pool.evict_oldest(true) == hash_of(2));
  EXPECT(pool.evict_oldest(true) == hash_of(1));
  EXPECT(pool.evict_oldest(true) == hash_of(3));
}

void a_superseded_page_that_others_share_stays() {
  const Settling settling;
  Pool pool(Blocks(1));
  Sealed page = indexed(pool, settling, 1, true);
  Sealed other = pool.share(page);
  pool.release_superseded(std::move(page));
  EXPECT(pool.num_shared() == Blocks(1) && pool.num_cached() == Blocks(0));
  pool.release(std::move(other));
  EXPECT(pool.num_cached() == Blocks(1));
}

void a_forgotten_page_is_freed_with_its_last_share() {
  const Settling settling;
  Pool pool(Blocks(2));
  Sealed shared = indexed(pool, settling, 1, true);
  pool.release(indexed(pool, settling, 2, false));
  pool.forget(P(2));
  EXPECT(pool.num_free() == Blocks(1) && pool.num_cached() == Blocks(0));
  pool.forget(P(1));
  EXPECT(!pool.indexed_as(P(1)) && pool.num_free() == Blocks(1));
  EXPECT(throws([&] { pool.forget(P(1)); }));
  pool.release(std::move(shared));
  EXPECT(pool.num_free() == Blocks(2));
}

void a_pool_of_nothing_is_empty() {
  const BlockPool<tier::Host, Kind> pool((Blocks(0)));
  EXPECT(!pool.has_ready() && !pool.has_free() && pool.available() == Blocks(0) && pool.total() == Blocks(0));
}

constexpr std::array kTests{
    Test{.name = "the null page is never handed out", .run = the_null_page_is_never_handed_out},
    Test{.name = "a shared page is freed with its last share", .run = a_shared_page_is_freed_with_its_last_share},
    Test{.name = "an indexed page without shares is cached",
         .run = an_indexed_page_without_shares_is_cached_and_comes_back_by_its_hash},
    Test{.name = "cached pages go in the order of last use", .run = cached_pages_go_in_the_order_of_last_use},
    Test{.name = "pages without a copy are kept apart", .run = pages_without_a_copy_are_kept_apart},
    Test{.name = "a superseded page goes first unless prompts part there",
         .run = a_superseded_page_goes_first_unless_prompts_part_there},
    Test{.name = "a superseded page that others share stays", .run = a_superseded_page_that_others_share_stays},
    Test{.name = "a forgotten page is freed with its last share", .run = a_forgotten_page_is_freed_with_its_last_share},
    Test{.name = "a pool of nothing is empty", .run = a_pool_of_nothing_is_empty},
};

}  // namespace

std::span<const Test> pool_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
