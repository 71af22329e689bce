// SPDX-License-Identifier: Apache-2.0
// The host tier of a cache group: what is copied when, what comes back, and what becomes of transfers that fail.
#include <array>
#include <utility>
#include <vector>

#include "group_rig.h"
#include "transfers.h"

namespace tokenspeed::control::testing {
namespace {

using Kind = kind::FullAttention;
using Stores = std::vector<StoreItem<Kind>>;
using Loads = std::vector<LoadItem<Kind>>;

// Transfers that end as the test says.
class Copies {
 public:
  void end(Rig<Kind>& rig, Stores& stores, bool ok) {
    Transfer& transfer = settled(ok);
    for (StoreItem<Kind>& item : stores) {
      if (ok) {
        const TransferReceipt receipt = ledger_.receipt(transfer);
        rig.group.end_store(std::move(item), &receipt);
      } else {
        rig.group.end_store(std::move(item), nullptr);
      }
    }
    stores.clear();
    ledger_.end(transfer);
  }
  void end(Rig<Kind>& rig, PageTable<Kind>& table, Loads& loads, const Prompt& prompt) {
    Transfer& transfer = settled(true);
    for (LoadItem<Kind>& item : loads) {
      const TransferReceipt receipt = ledger_.receipt(transfer);
      rig.group.end_load(table, std::move(item), prompt.hashes(), prompt.ids(), receipt);
    }
    loads.clear();
    ledger_.end(transfer);
  }

 private:
  [[nodiscard]] Transfer& settled(bool ok) {
    Transfer& transfer = ledger_.begin(TransferKind::kStore, PartitionId(0));
    EXPECT(ledger_.settle(transfer.id, ok) == &transfer);
    return transfer;
  }

  TransferLedger ledger_{1};
};

// Takes every page of the device once, so that nothing stays cached there.
void sweep(Rig<Kind>& rig) {
  PageTable<Kind> table;
  while (rig.group.has_ready()) {
    (void)rig.group.grow(table, rig.group.covered(table) + kBlock);
  }
  rig.give_back(std::move(table));
}

// Two blocks that only the host still has.
void move_to_host(Rig<Kind>& rig, const Prompt& prompt) {
  Copies copies;
  Stores stores;
  rig.publish(prompt, 0, 2);
  rig.group.make_ready(rig.group.device().total(), Blocks(8), true, stores);
  copies.end(rig, stores, true);
  sweep(rig);
}

void what_is_sealed_is_copied_once_and_may_then_go() {
  Rig<Kind> rig(full(2, 2), HostStore::kOnSeal);
  Copies copies;
  Stores stores;
  const Prompt prompt(1);
  EXPECT(!rig.group.wants_store());
  rig.publish(prompt, 0, 2);
  EXPECT(rig.group.wants_store() && !rig.group.has_ready() && rig.group.available() == Blocks(2));
  rig.group.begin_sealed_stores(Blocks(1), stores);
  EXPECT(stores.size() == 1 && rig.group.num_storing() == Blocks(1) && rig.group.wants_store());
  rig.group.begin_sealed_stores(Blocks(8), stores);
  EXPECT(stores.size() == 2 && !rig.group.wants_store());
  EXPECT(rig.group.device().num_shared() == Blocks(2));  // pinned
  copies.end(rig, stores, true);
  EXPECT(rig.group.num_ready() == Blocks(2) && rig.group.num_storing() == Blocks(0));
  EXPECT(rig.group.host_index().size() == 2 && rig.group.host().num_cached() == Blocks(2));
  rig.publish(prompt, 0, 2);
  EXPECT(!rig.group.wants_store());
}

void a_block_that_went_comes_back_from_the_host() {
  Rig<Kind> rig(full(2, 2));
  Copies copies;
  const Prompt prompt(1);
  move_to_host(rig, prompt);
  EXPECT(rig.resumable(prompt, 8) == 0 && rig.resumable(prompt, 8, true) == 8);
  EXPECT(rig.group.demand(prompt.hashes(), Tokens(8), Tokens(9)).fresh == Blocks(3));
  PageTable<Kind> table;
  Loads loads;
  rig.group.open(table, prompt.hashes(), Tokens(8), false, loads);
  EXPECT(loads.size() == 2 && loads[0].block == Blocks(0) && loads[0].source.has_value());
  EXPECT(table.is_writable(Blocks(0)) && table.is_writable(Blocks(1)));
  EXPECT(rig.group.host().num_shared() == Blocks(2));  // pinned
  EXPECT(rig.resumable(prompt, 8) == 0);               // nothing matches before the load has ended
  copies.end(rig, table, loads, prompt);
  EXPECT(table.is_sealed(Blocks(1)) && rig.resumable(prompt, 8) == 8);
  EXPECT(rig.group.host().num_shared() == Blocks(0) && rig.group.host().num_cached() == Blocks(2));
  rig.give_back(std::move(table));
  EXPECT(rig.group.num_ready() == Blocks(2));  // the host still has them
}

void pressure_copies_the_oldest_first_and_each_once() {
  Rig<Kind> rig(full(4, 4));
  Copies copies;
  Stores stores;
  const Prompt prompt(1);
  rig.publish(prompt, 0, 4);
  EXPECT(!rig.group.wants_store() && rig.group.num_ready() == Blocks(0));
  rig.group.make_ready(Blocks(2), Blocks(8), false, stores);
  EXPECT(stores.size() == 2);  // the deepest are the oldest
  EXPECT(stores[0].hash == prompt.hashes().before(Tokens(16)) && stores[1].hash == prompt.hashes().before(Tokens(12)));
  rig.group.make_ready(Blocks(2), Blocks(8), false, stores);
  EXPECT(stores.size() == 2);  // those on their way count
  rig.group.make_ready(Blocks(4), Blocks(1), false, stores);
  EXPECT(stores.size() == 3);
  copies.end(rig, stores, true);
  EXPECT(rig.group.num_ready() == Blocks(3) && rig.group.device().num_unsaved() == Blocks(1));
}

void a_store_that_failed_leaves_nothing_in_the_host_and_lets_the_page_go() {
  Rig<Kind> rig(full(2, 2));
  Copies copies;
  Stores stores;
  const Prompt prompt(1);
  rig.publish(prompt, 0, 2);
  rig.group.make_ready(Blocks(2), Blocks(8), false, stores);
  copies.end(rig, stores, false);
  EXPECT(rig.group.host_index().size() == 0 && rig.group.host().num_free() == Blocks(2));
  EXPECT(rig.group.num_ready() == Blocks(2));
}

void a_load_that_failed_forgets_the_copy() {
  Rig<Kind> rig(full(2, 2));
  const Prompt prompt(1);
  move_to_host(rig, prompt);
  PageTable<Kind> table;
  Loads loads;
  rig.group.open(table, prompt.hashes(), Tokens(8), false, loads);
  for (LoadItem<Kind>& item : loads) {
    rig.group.fail_load(std::move(item));
  }
  EXPECT(rig.resumable(prompt, 8, true) == 0 && rig.group.host().num_free() == Blocks(2));
  rig.give_back(std::move(table));
  EXPECT(rig.group.device().num_free() == Blocks(2));  // what may be half-written matches nobody
}

void a_load_that_nobody_wants_leaves_the_copy() {
  Rig<Kind> rig(full(2, 2));
  const Prompt prompt(1);
  move_to_host(rig, prompt);
  PageTable<Kind> table;
  Loads loads;
  rig.group.open(table, prompt.hashes(), Tokens(8), false, loads);
  for (LoadItem<Kind>& item : loads) {
    rig.group.drop_load(std::move(item));
  }
  EXPECT(rig.resumable(prompt, 8) == 0 && rig.resumable(prompt, 8, true) == 8);
  rig.give_back(std::move(table));
}

void a_full_host_tier_keeps_what_protects_cached_pages() {
  Rig<Kind> rig(full(3, 1));
  Copies copies;
  Stores stores;
  const Prompt prompt(1);
  rig.publish(prompt, 0, 3);
  rig.group.make_ready(Blocks(1), Blocks(8), false, stores);
  copies.end(rig, stores, true);
  rig.group.make_ready(Blocks(2), Blocks(8), false, stores);
  EXPECT(stores.empty() && rig.group.num_ready() == Blocks(1));  // a swap would gain nothing
  rig.group.make_ready(Blocks(2), Blocks(8), true, stores);
  EXPECT(stores.empty() && rig.group.num_ready() == Blocks(2) && rig.resumable(prompt, 12) == 4);
}

void a_host_page_that_a_load_reads_is_not_overwritten() {
  Rig<Kind> rig(full(4, 2));
  Copies copies;
  Stores stores;
  const Prompt prompt(1);
  move_to_host(rig, prompt);
  PageTable<Kind> table;
  Loads loads;
  rig.group.open(table, prompt.hashes(), Tokens(8), false, loads);
  rig.publish(Prompt(2), 0, 2);
  rig.group.make_ready(Blocks(4), Blocks(8), false, stores);
  EXPECT(stores.empty());
  copies.end(rig, table, loads, prompt);
  EXPECT(rig.resumable(prompt, 8, true) == 8);
  rig.give_back(std::move(table));
}

void the_log_replays_to_what_both_tiers_have() {
  Rig<Kind> rig(full(2, 2));
  move_to_host(rig, Prompt(1));
  std::array<std::int64_t, 2> balance{};
  const std::vector<std::int64_t>& rows = rig.log.take().rows;
  for (std::size_t row = 0; row < rows.size(); row += KvEvents::kWidth) {
    balance.at(static_cast<std::size_t>(rows[row + 1])) += rows[row] == 0 ? 1 : -1;
  }
  EXPECT(balance[0] == 0 && balance[1] == 2, balance[0], balance[1]);
}

constexpr std::array kTests{
    Test{.name = "what is sealed is copied once and may then go", .run = what_is_sealed_is_copied_once_and_may_then_go},
    Test{.name = "a block that went comes back from the host", .run = a_block_that_went_comes_back_from_the_host},
    Test{.name = "pressure copies the oldest first and each once",
         .run = pressure_copies_the_oldest_first_and_each_once},
    Test{.name = "a store that failed leaves nothing in the host",
         .run = a_store_that_failed_leaves_nothing_in_the_host_and_lets_the_page_go},
    Test{.name = "a load that failed forgets the copy", .run = a_load_that_failed_forgets_the_copy},
    Test{.name = "a load that nobody wants leaves the copy", .run = a_load_that_nobody_wants_leaves_the_copy},
    Test{.name = "a full host tier keeps what protects cached pages",
         .run = a_full_host_tier_keeps_what_protects_cached_pages},
    Test{.name = "a host page that a load reads is not overwritten",
         .run = a_host_page_that_a_load_reads_is_not_overwritten},
    Test{.name = "the log replays to what both tiers have", .run = the_log_replays_to_what_both_tiers_have},
};

}  // namespace

std::span<const Test> host_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
