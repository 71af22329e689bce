// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <utility>

#include "check.h"

namespace tokenspeed::control {

SeatPool::SeatPool(Seat first, std::int32_t num_seats) {
  TS_CHECK(num_seats >= 1, "num_seats", num_seats);
  free_.reserve(static_cast<std::size_t>(num_seats));
  for (std::int32_t seat = num_seats - 1; seat >= 0; --seat) {
    free_.emplace_back(first.value() + seat);
  }
}

SeatHold SeatPool::take() {
  TS_CHECK(has_free(), "no free seat");
  const Seat seat = free_.back();
  free_.pop_back();
  return SeatHold(seat);
}

void SeatPool::release(SeatHold&& hold, const Retirement& retirement) {
  const Seat seat = SeatHold(std::move(hold)).consume();
  TS_CHECK(seat == retirement.seat(), "seat", seat, "retirement of", retirement.seat());
  free_.push_back(seat);
}

StepLedger::StepLedger(std::int32_t num_seats) : leases_(static_cast<std::size_t>(num_seats), 0) {
  for (StepRecord& record : records_) {
    record.rows.reserve(static_cast<std::size_t>(num_seats));
    record.expired.each([&](auto& pages) { pages.reserve(static_cast<std::size_t>(num_seats)); });
  }
}

StepRecord& StepLedger::planning() {
  TS_CHECK(num_in_flight_ < records_.size(), "steps in flight", num_in_flight_);
  return records_[(first_ + num_in_flight_) % records_.size()];
}

Lease StepLedger::lease(Seat seat) {
  ++leases_[index(seat)];
  return Lease(seat);
}

void StepLedger::retire(Lease&& lease) {
  const Seat seat = Lease(std::move(lease)).consume();
  TS_CHECK(leases_[index(seat)] > 0, "seat", seat);
  --leases_[index(seat)];
}

void StepLedger::add_row(const RowWork& work, Seat seat) {
  planning().rows.push_back(StepRow{.work = work, .lease = lease(seat)});
}

void StepLedger::dispatch(StepId step_id) {
  planning().step_id = step_id;
  ++num_in_flight_;
}

const StepRecord& StepLedger::oldest() const {
  TS_CHECK(num_in_flight_ > 0, "no step in flight");
  return records_[first_];
}

void StepLedger::begin_settling(StepId step_id, bool fault) {
  TS_CHECK(!settling_ && oldest().step_id == step_id, "expected", oldest().step_id, "got", step_id);
  settling_ = true;
  fault_ = fault;
  num_settled_ = 0;
}

const RowWork& StepLedger::settle_next() {
  StepRecord& record = records_[first_];
  TS_CHECK(settling_ && num_settled_ < record.rows.size(), "step", record.step_id, "row", num_settled_);
  StepRow& row = record.rows[num_settled_];
  retire(std::move(row.lease));
  ++num_settled_;
  return row.work;
}

PerKind<ExpiredPages>& StepLedger::expired() {
  StepRecord& record = records_[first_];
  TS_CHECK(settling_ && num_settled_ == record.rows.size(), "step", record.step_id, "rows settled", num_settled_);
  return record.expired;
}

void StepLedger::end_settling() {
  StepRecord& record = records_[first_];
  TS_CHECK(settling_ && num_settled_ == record.rows.size(), "step", record.step_id, "rows settled", num_settled_);
  record.expired.each([&](const auto& pages) { TS_CHECK(pages.empty(), "step", record.step_id, pages.size()); });
  record.rows.clear();
  first_ = (first_ + 1) % records_.size();
  --num_in_flight_;
  settling_ = false;
}

StepReceipt StepLedger::receipt() const {
  TS_CHECK(settling_ && !fault_, "no successful result", num_in_flight_);
  return StepReceipt(records_[first_].step_id);
}

Retirement StepLedger::retirement(Seat seat) const {
  TS_CHECK(is_idle(seat), "seat", seat, "leases", leases_[index(seat)]);
  return Retirement(seat);
}

void StepLedger::forfeit(const Teardown& teardown) noexcept {
  for (StepRecord& record : records_) {
    for (StepRow& row : record.rows) {
      row.lease.forfeit(teardown);
    }
    record.expired.each([&](auto& pages) {
      for (auto& expired : pages) {
        expired.page.forfeit(teardown);
      }
    });
  }
}

}  // namespace tokenspeed::control
