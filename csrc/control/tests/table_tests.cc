// SPDX-License-Identifier: Apache-2.0
// Page tables: pages, holes, and what becomes of them.
#include <array>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "page_table.h"
#include "testing.h"

namespace tokenspeed::control::testing {
namespace {

using Kind = kind::SlidingWindow;
using Pool = BlockPool<tier::Device, Kind>;
using Table = PageTable<Kind>;
using P = DevicePage<Kind>;

void seal_all(Table& table, Pool& pool, const Settling& settling) {
  for (Blocks block = table.sealed_until(); block < table.size(); block = table.sealed_until()) {
    (void)table.seal(block, pool, settling.ledger.receipt());
  }
}

void a_table_lists_what_was_appended() {
  const Settling settling;
  Pool pool(Blocks(2));
  Table table;
  table.append(pool.seal(pool.take_free(), settling.ledger.receipt()));
  table.append(pool.take_free());
  EXPECT(table.size() == Blocks(2) && table.first() == Blocks(0) && table.sealed_until() == Blocks(1));
  EXPECT(table.is_sealed(Blocks(0)) && table.is_writable(Blocks(1)));
  EXPECT(table.page(Blocks(0)) == P(1) && table.page(Blocks(1)) == P(2));
  EXPECT(throws([&] { (void)table.page(Blocks(2)); }));
  EXPECT(throws([&] { (void)table.seal(Blocks(0), pool, settling.ledger.receipt()); }));
  seal_all(table, pool, settling);
  EXPECT(table.sealed_until() == Blocks(2) && table.page(Blocks(1)) == P(2));
  table.give_back(pool, settling.ledger.retirement(Seat(0)));
  EXPECT(pool.num_free() == Blocks(2));
}

void holes_are_null_pages_and_count_as_sealed() {
  const Settling settling;
  Pool pool(Blocks(2));
  Table table;
  table.skip_to(Blocks(2));
  EXPECT(table.first() == Blocks(2) && table.size() == Blocks(2) && table.sealed_until() == Blocks(2));
  table.append(pool.take_free());
  table.skip_to(Blocks(5));
  table.append(pool.take_free());
  EXPECT(table.size() == Blocks(6) && table.sealed_until() == Blocks(2));
  for (const std::int64_t hole : {0, 1, 3, 4}) {
    EXPECT(table.page(Blocks(hole)).is_null() && !table.is_sealed(Blocks(hole)) && !table.is_writable(Blocks(hole)));
  }
  EXPECT(throws([&] { table.skip_to(Blocks(5)); }));
  (void)table.seal(Blocks(2), pool, settling.ledger.receipt());
  EXPECT(table.sealed_until() == Blocks(5));  // past the holes
  table.give_back(pool, settling.ledger.retirement(Seat(0)));
  EXPECT(pool.num_free() == Blocks(2));
}

void only_what_is_sealed_expires() {
  Settling settling;
  Pool pool(Blocks(3));
  Table table;
  table.append(pool.take_free());
  EXPECT(throws([&] { (void)table.expire_first(); }));
  seal_all(table, pool, settling);
  table.skip_to(Blocks(2));
  table.append(pool.take_free());
  std::optional<ExpiredPage<Kind>> page = table.expire_first();
  EXPECT(page && page->page() == P(1) && table.first() == Blocks(1) && table.size() == Blocks(3));
  EXPECT(table.page(Blocks(0)).is_null() && pool.num_free() == Blocks(1));
  EXPECT(!table.expire_first());  // a hole has no page to hand on
  EXPECT(throws([&] { (void)table.expire_first(); }));
  EXPECT(table.page(Blocks(2)) == P(2));
  pool.release(settling.ledger.retire(std::move(*page)));
  table.give_back(pool, settling.ledger.retirement(Seat(0)));
  EXPECT(pool.num_free() == Blocks(3));
}

// A window that slides for long: memory is dropped in bulk, and block numbers go on.
void a_long_slide_keeps_its_numbers() {
  Settling settling;
  constexpr std::int64_t kWindow = 3;
  Pool pool(Blocks(kWindow + 1));
  Table table;
  table.reserve(Blocks(2 * kWindow + 2));
  std::deque<P> model;
  for (std::int64_t block = 0; block < 1000; ++block) {
    table.append(pool.take_free());
    seal_all(table, pool, settling);
    model.push_back(table.page(Blocks(block)));
    if (block >= kWindow) {
      std::optional<ExpiredPage<Kind>> page = table.expire_first();
      EXPECT(page && page->page() == model.front(), "block", block);
      model.pop_front();
      pool.release(settling.ledger.retire(std::move(*page)));
    }
    EXPECT(table.size() == Blocks(block + 1));
    for (std::size_t index = 0; index < model.size(); ++index) {
      EXPECT(table.page(table.first() + Blocks(static_cast<std::int64_t>(index))) == model[index], "block", block);
    }
  }
  table.give_back(pool, settling.ledger.retirement(Seat(0)));
  EXPECT(pool.num_free() == Blocks(kWindow + 1));
}

void the_deepest_block_is_evicted_first() {
  const Settling settling;
  Pool pool(Blocks(3));
  Table table;
  for (std::uint64_t name = 0; name < 3; ++name) {
    table.append(pool.take_free());
    pool.mark_indexed(table.seal(table.sealed_until(), pool, settling.ledger.receipt()), hash_of(name), true);
  }
  table.give_back(pool, settling.ledger.retirement(Seat(0)));
  for (const std::uint64_t name : {2U, 1U, 0U}) {
    EXPECT(pool.evict_oldest(true) == hash_of(name), "name", name);
  }
}

void a_held_sequence_keeps_its_first_sealed_blocks() {
  const Settling settling;
  Pool pool(Blocks(4));
  Table table;
  table.skip_to(Blocks(1));
  for (int count = 0; count < 3; ++count) {
    table.append(pool.take_free());
  }
  (void)table.seal(Blocks(1), pool, settling.ledger.receipt());
  (void)table.seal(Blocks(2), pool, settling.ledger.receipt());
  std::vector<SealedDevicePage<Kind>> kept = table.keep_sealed(Blocks(2), pool, settling.ledger.retirement(Seat(0)));
  EXPECT(kept.size() == 1 && kept.front().page() == P(1));  // block 0 is a hole, block 2 is beyond
  EXPECT(pool.num_free() == Blocks(3) && pool.num_shared() == Blocks(1));
  pool.release(std::move(kept.front()));
  EXPECT(pool.num_free() == Blocks(4));
}

constexpr std::array kTests{
    Test{.name = "a table lists what was appended", .run = a_table_lists_what_was_appended},
    Test{.name = "holes are null pages and count as sealed", .run = holes_are_null_pages_and_count_as_sealed},
    Test{.name = "only what is sealed expires", .run = only_what_is_sealed_expires},
    Test{.name = "a long slide keeps its numbers", .run = a_long_slide_keeps_its_numbers},
    Test{.name = "the deepest block is evicted first", .run = the_deepest_block_is_evicted_first},
    Test{.name = "a held sequence keeps its first sealed blocks", .run = a_held_sequence_keeps_its_first_sealed_blocks},
};

}  // namespace

std::span<const Test> table_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
