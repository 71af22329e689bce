// SPDX-License-Identifier: Apache-2.0
// Handles, seats, and the ledger of steps.
#include <array>
#include <optional>
#include <utility>

#include "block_pool.h"
#include "page_table.h"
#include "testing.h"

namespace tokenspeed::control::testing {
namespace {

using Kind = kind::FullAttention;
using Pool = BlockPool<tier::Device, Kind>;

void moving_over_a_live_handle_throws() {
  Pool pool(Blocks(2));
  WritableDevicePage<Kind> first = pool.take_free();
  WritableDevicePage<Kind> second = pool.take_free();
  EXPECT(throws([&] { first = std::move(second); }));
  EXPECT(first.page() == DevicePage<Kind>(1) &&
         second.page() == DevicePage<Kind>(2));  // NOLINT(bugprone-use-after-move)
  pool.release(std::move(first));
  pool.release(std::move(second));
  EXPECT(pool.num_free() == Blocks(2));
}

void a_handle_that_was_given_away_is_dead() {
  Pool pool(Blocks(2));
  WritableDevicePage<Kind> page = pool.take_free();
  pool.release(std::move(page));
  EXPECT(throws([&] { (void)page.page(); }));              // NOLINT(bugprone-use-after-move)
  EXPECT(throws([&] { pool.release(std::move(page)); }));  // NOLINT(bugprone-use-after-move)
  EXPECT(pool.num_free() == Blocks(2));
}

void a_dead_handle_may_be_assigned() {
  Pool pool(Blocks(2));
  WritableDevicePage<Kind> page = pool.take_free();
  pool.release(std::move(page));
  page = pool.take_free();
  EXPECT(page.page() == DevicePage<Kind>(1));
  pool.release(std::move(page));
}

void a_receipt_takes_a_step_that_ended_well() {
  StepLedger ledger(1);
  EXPECT(throws([&] { (void)ledger.receipt(); }));
  ledger.dispatch(StepId(1));
  EXPECT(throws([&] { (void)ledger.receipt(); }));
  ledger.begin_settling(StepId(1), true);
  EXPECT(throws([&] { (void)ledger.receipt(); }));
  ledger.end_settling();
  ledger.dispatch(StepId(2));
  ledger.begin_settling(StepId(2), false);
  EXPECT(ledger.receipt().step_id() == StepId(2));
  ledger.end_settling();
  EXPECT(throws([&] { (void)ledger.receipt(); }));
}

void a_seat_retires_only_when_no_step_leases_it() {
  StepLedger ledger(2);
  ledger.add_row(decode_work(Slot(0), 0), Seat(1));
  ledger.dispatch(StepId(1));
  EXPECT(!ledger.is_idle(Seat(1)) && ledger.is_idle(Seat(0)));
  EXPECT(throws([&] { (void)ledger.retirement(Seat(1)); }));
  ledger.begin_settling(StepId(1), false);
  EXPECT(throws([&] { ledger.end_settling(); }));
  EXPECT(ledger.settle_next().slot == Slot(0));
  EXPECT(throws([&] { (void)ledger.settle_next(); }));
  ledger.end_settling();
  EXPECT(ledger.retirement(Seat(1)).seat() == Seat(1));
}

void a_transfer_keeps_a_seat_from_retiring() {
  StepLedger ledger(1);
  Lease lease = ledger.lease(Seat(0));
  Lease other = ledger.lease(Seat(0));
  EXPECT(ledger.num_leases(Seat(0)) == 2);
  ledger.retire(std::move(lease));
  EXPECT(throws([&] { (void)ledger.retirement(Seat(0)); }));
  EXPECT(throws([&] { ledger.retire(std::move(lease)); }));  // NOLINT(bugprone-use-after-move)
  ledger.retire(std::move(other));
  EXPECT(ledger.retirement(Seat(0)).seat() == Seat(0));
}

void results_come_in_the_order_of_their_steps() {
  StepLedger ledger(1);
  ledger.dispatch(StepId(1));
  ledger.dispatch(StepId(2));
  EXPECT(throws([&] { ledger.dispatch(StepId(3)); }));
  EXPECT(throws([&] { ledger.begin_settling(StepId(2), false); }));
  ledger.begin_settling(StepId(1), false);
  EXPECT(throws([&] { ledger.begin_settling(StepId(1), false); }));
  ledger.end_settling();
  EXPECT(throws([&] { ledger.begin_settling(StepId(1), false); }));
}

void seats_are_numbered_over_all_partitions_and_come_back_with_their_own_retirement() {
  const StepLedger ledger(6);
  SeatPool seats(Seat(4), 2);
  SeatHold first = seats.take();
  SeatHold second = seats.take();
  EXPECT(first.seat() == Seat(4) && second.seat() == Seat(5) && !seats.has_free());
  EXPECT(throws([&] { (void)seats.take(); }));
  EXPECT(throws([&] { seats.release(std::move(first), ledger.retirement(Seat(5))); }));
  seats.release(std::move(second), ledger.retirement(Seat(5)));
  EXPECT(seats.num_free() == 1);
}

// A page that has left a table can still be read by steps in flight, and comes back with the result of the last of
// them.
void an_expired_page_comes_back_when_its_step_has_settled() {
  const Settling good;
  Pool pool(Blocks(1));
  PageTable<Kind> table;
  table.append(pool.take_free());
  (void)table.seal(Blocks(0), pool, good.ledger.receipt());
  StepLedger ledger(1);
  ledger.add_row(decode_work(Slot(0), 0), Seat(0));
  std::optional<ExpiredPage<Kind>> page = table.expire_first();
  EXPECT(page.has_value() && page->page() == DevicePage<Kind>(1));
  ledger.keep_until_retired(Expired<Kind>{.partition = PartitionId(0), .group = Group(0), .page = std::move(*page)});
  ledger.dispatch(StepId(1));
  EXPECT(throws([&] { (void)ledger.expired(); }));
  ledger.begin_settling(StepId(1), true);
  EXPECT(throws([&] { (void)ledger.expired(); }));
  (void)ledger.settle_next();
  EXPECT(throws([&] { ledger.end_settling(); }));
  auto& expired = ledger.expired().full;
  EXPECT(expired.size() == 1 && pool.num_free() == Blocks(0));
  pool.release(ledger.retire(std::move(expired.front().page)));
  expired.clear();
  ledger.end_settling();
  EXPECT(pool.num_free() == Blocks(1));
}

constexpr std::array kTests{
    Test{.name = "moving over a live handle throws", .run = moving_over_a_live_handle_throws},
    Test{.name = "a handle that was given away is dead", .run = a_handle_that_was_given_away_is_dead},
    Test{.name = "a dead handle may be assigned", .run = a_dead_handle_may_be_assigned},
    Test{.name = "a receipt takes a step that ended well", .run = a_receipt_takes_a_step_that_ended_well},
    Test{.name = "a seat retires only when no step leases it", .run = a_seat_retires_only_when_no_step_leases_it},
    Test{.name = "a transfer keeps a seat from retiring", .run = a_transfer_keeps_a_seat_from_retiring},
    Test{.name = "results come in the order of their steps", .run = results_come_in_the_order_of_their_steps},
    Test{.name = "seats come back with their own retirement",
         .run = seats_are_numbered_over_all_partitions_and_come_back_with_their_own_retirement},
    Test{.name = "an expired page comes back when its step has settled",
         .run = an_expired_page_comes_back_when_its_step_has_settled},
};

}  // namespace

std::span<const Test> handle_tests() { return kTests; }

}  // namespace tokenspeed::control::testing
