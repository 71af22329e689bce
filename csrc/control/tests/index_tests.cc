// SPDX-License-Identifier: Apache-2.0
// The prefix index, block hashes, the log of KV events, and the ledger of transfers.
#include <array>
#include <bit>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "kv_log.h"
#include "prefix_index.h"
#include "testing.h"
#include "transfers.h"

namespace tokenspeed::control::testing {
namespace {

using Kind = kind::FullAttention;
using Pool = BlockPool<tier::Device, Kind>;

// Random inserts and erasures in a nearly full table, beside a map.
void the_index_equals_a_map() {
  const Settling settling;
  constexpr std::int64_t kBlocks = 64;
  Pool pool((Blocks(kBlocks)));
  PrefixIndex<DevicePage<Kind>> index((Blocks(kBlocks)));
  std::vector<SealedDevicePage<Kind>> pages;
  while (pool.has_free()) {
    pages.push_back(pool.seal(pool.take_free(), settling.ledger.receipt()));
  }
  std::map<std::uint64_t, DevicePage<Kind>> model;
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
      const SealedDevicePage<Kind>& page = pages[(random >> 20U) % pages.size()];
      EXPECT(index.insert(hash, page, settling.ledger.receipt()) == model.emplace(key, page.page()).second);
    }
    const auto found = index.find(hash);
    EXPECT(found.has_value() == model.contains(key) && (!found || *found == model.at(key)));
    EXPECT(index.size() == model.size());
  }
  EXPECT(throws([&] { index.erase(BlockHash{.high = 1000, .low = 0x70}); }));
  for (SealedDevicePage<Kind>& page : pages) {
    pool.release(std::move(page));
  }
}

void hashes_tell_tokens_order_parents_namespaces_and_contents_apart() {
  const std::array<std::int32_t, 4> ascending{1, 2, 3, 4};
  const std::array<std::int32_t, 4> swapped{2, 1, 3, 4};
  const std::array<std::int32_t, 3> shorter{1, 2, 3};
  const BlockHash root = hash_root("", "");
  const ContentSpan cat{.start = Tokens(0), .length = Tokens(2), .hash_high = 1, .hash_low = 2};
  const ContentSpan longer{.start = Tokens(0), .length = Tokens(3), .hash_high = 1, .hash_low = 2};
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
                                   hash_content(block, cat, 1),
                                   hash_content(block, longer, 0)};
  for (std::size_t a = 0; a < all.size(); ++a) {
    for (std::size_t b = a + 1; b < all.size(); ++b) {
      EXPECT(all[a].high != all[b].high && all[a].low != all[b].low, a, b);
    }
  }
  EXPECT(hash_block(root, ascending) == block);
}

void the_log_tells_what_came_and_went_in_order() {
  KvLog log(true);
  const std::array<std::int32_t, 3> ids{7, 8, 9};
  const BlockHash high_bit{.high = std::uint64_t{1} << 63U, .low = 5};
  log.stored(TierCode::kDevice, 2, hash_of(1), high_bit, ids);
  log.stored(TierCode::kHost, 2, hash_of(1), BlockHash{}, {});
  log.removed(TierCode::kDevice, 2, hash_of(1));
  const KvEvents& first = log.take();
  const auto word = [](std::uint64_t value) { return std::bit_cast<std::int64_t>(value); };
  const BlockHash one = hash_of(1);
  const std::vector<std::int64_t> expected{0, 0, 2, word(one.high), word(one.low), word(high_bit.high),
                                           5, 3,  //
                                           0, 1, 2, word(one.high), word(one.low), 0,
                                           0, 0,  //
                                           1, 0, 2, word(one.high), word(one.low), 0,
                                           0, 0};
  EXPECT(first.rows == expected && first.token_ids == std::vector<std::int32_t>(ids.begin(), ids.end()));
  log.removed(TierCode::kHost, 2, one);
  EXPECT(first.rows == expected);  // valid until the next take
  EXPECT(log.take().rows.size() == KvEvents::kWidth);
  EXPECT(log.take().rows.empty());
}

void a_log_that_is_off_keeps_nothing() {
  KvLog log(false);
  log.stored(TierCode::kDevice, 0, hash_of(1), BlockHash{}, {});
  log.removed(TierCode::kDevice, 0, hash_of(1));
  EXPECT(log.take().rows.empty());
}

void an_acknowledgement_counts_once_and_only_while_its_transfer_is_in_flight() {
  TransferLedger ledger(2);
  Transfer& transfer = ledger.begin(TransferKind::kStore, PartitionId(1));
  const LeaseId id = transfer.id;
  EXPECT(id.value() > 0 && ledger.num_in_flight() == 1);
  for (const std::int64_t stranger : {std::int64_t{-1}, std::int64_t{0}, id.value() + 1, id.value() + 2}) {
    EXPECT(ledger.settle(LeaseId(stranger), true) == nullptr, "lease", stranger);
  }
  EXPECT(ledger.settle(id, true) == &transfer && transfer.ok);
  EXPECT(ledger.settle(id, false) == nullptr && transfer.ok);  // twice
  EXPECT(ledger.receipt(transfer).lease() == id);
  ledger.end(transfer);
  EXPECT(ledger.settle(id, true) == nullptr && ledger.num_in_flight() == 0);  // late
}

void a_lease_that_is_used_again_has_a_new_name() {
  TransferLedger ledger(1);
  LeaseId last;
  for (int round = 0; round < 100; ++round) {
    Transfer& transfer = ledger.begin(TransferKind::kLoad, PartitionId(0));
    EXPECT(transfer.id > last && !ledger.has_room());
    EXPECT(ledger.settle(last, true) == nullptr);
    EXPECT(throws([&] { (void)ledger.begin(TransferKind::kLoad, PartitionId(0)); }));
    last = transfer.id;
    ledger.end(transfer);
    EXPECT(ledger.settle(last, true) == nullptr);
  }
}

void a_receipt_takes_a_transfer_that_ended_well() {
  TransferLedger ledger(1);
  Transfer& transfer = ledger.begin(TransferKind::kLoad, PartitionId(0));
  EXPECT(throws([&] { (void)ledger.receipt(transfer); }));
  EXPECT(ledger.settle(transfer.id, false) == &transfer);
  EXPECT(throws([&] { (void)ledger.receipt(transfer); }));
  ledger.end(transfer);
}

void a_transfer_that_owns_something_does_not_end() {
  StepLedger steps(1);
  TransferLedger ledger(1);
  Transfer& transfer = ledger.begin(TransferKind::kLoad, PartitionId(0));
  transfer.lease.emplace(steps.lease(Seat(0)));
  EXPECT(throws([&] { ledger.end(transfer); }));
  steps.retire(std::move(*transfer.lease));
  transfer.lease.reset();
  transfer.loads.full.push_back(LoadItem<Kind>{.group = Group(0), .block = Blocks(0), .source = std::nullopt});
  EXPECT(throws([&] { ledger.end(transfer); }));
  transfer.loads.full.clear();
  ledger.end(transfer);
  EXPECT(ledger.has_room());
}

constexpr std::array kTests{
    Test{.name = "the index equals a map", .run = the_index_equals_a_map},
    Test{.name = "hashes tell what differs apart",
         .run = hashes_tell_tokens_order_parents_namespaces_and_contents_apart},
    Test{.name = "the log tells what came and went in order", .run = the_log_tells_what_came_and_went_in_order},
    Test{.name = "a log that is off keeps nothing", .run = a_log_that_is_off_keeps_nothing},
    Test{.name = "an acknowledgement counts once",
         .run = an_acknowledgement_counts_once_and_only_while_its_transfer_is_in_flight},
    Test{.name = "a lease that is used again has a new name", .run = a_lease_that_is_used_again_has_a_new_name},
    Test{.name = "a receipt takes a transfer that ended well", .run = a_receipt_takes_a_transfer_that_ended_well},
    Test{.name = "a transfer that owns something does not end", .run = a_transfer_that_owns_something_does_not_end},
};

}  // namespace

std::span<const Test> index_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
