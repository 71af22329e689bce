// SPDX-License-Identifier: Apache-2.0
#include "ledger.h"

#include <utility>

#include "check.h"

namespace tokenspeed::control {

SeatPool::SeatPool(std::int32_t num_seats) {
  TS_CHECK(num_seats >= 1, "num_seats", num_seats);
  free_.reserve(static_cast<std::size_t>(num_seats));
  for (std::int32_t seat = num_seats - 1; seat >= 0; --seat) {
    free_.emplace_back(seat);
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
  }
}

void StepLedger::add_row(Slot slot, Seat seat, Tokens query_len, bool samples) {
  TS_CHECK(num_in_flight_ < records_.size(), "steps in flight", num_in_flight_);
  StepRecord& record = records_[(first_ + num_in_flight_) % records_.size()];
  record.rows.push_back(StepRow{.slot = slot, .query_len = query_len, .samples = samples, .lease = Lease(seat)});
  ++leases_[index(seat)];
}

void StepLedger::dispatch(StepId step_id) {
  TS_CHECK(num_in_flight_ < records_.size(), "steps in flight", num_in_flight_, "step", step_id);
  records_[(first_ + num_in_flight_) % records_.size()].step_id = step_id;
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

const StepRow& StepLedger::settle_next() {
  StepRecord& record = records_[first_];
  TS_CHECK(settling_ && num_settled_ < record.rows.size(), "step", record.step_id, "row", num_settled_);
  StepRow& row = record.rows[num_settled_];
  const Seat seat = Lease(std::move(row.lease)).consume();
  TS_CHECK(leases_[index(seat)] > 0, "step", record.step_id, "seat", seat);
  --leases_[index(seat)];
  ++num_settled_;
  return row;
}

void StepLedger::end_settling() {
  StepRecord& record = records_[first_];
  TS_CHECK(settling_ && num_settled_ == record.rows.size(), "step", record.step_id, "rows settled", num_settled_);
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
  }
}

}  // namespace tokenspeed::control
