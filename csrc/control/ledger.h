// SPDX-License-Identifier: Apache-2.0
// Who may touch what while steps are in flight: seats, the leases that dispatched steps hold on them, and the rows
// of each step until its result comes.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <vector>

#include "page.h"
#include "page_table.h"
#include "types.h"

namespace tokenspeed::control {

// One step may be planned while another is in flight.
inline constexpr std::size_t kMaxStepsInFlight = 2;

class SeatPool {
 public:
  explicit SeatPool(std::int32_t num_seats);

  [[nodiscard]] bool has_free() const { return !free_.empty(); }
  [[nodiscard]] std::size_t num_free() const { return free_.size(); }
  [[nodiscard]] SeatHold take();
  void release(SeatHold&& hold, const Retirement& retirement);

 private:
  std::vector<Seat> free_;
};

// A row of a dispatched step.
struct StepRow {
  Slot slot;
  Tokens query_len;
  bool samples = false;
  Lease lease;
};

struct StepRecord {
  StepId step_id;
  std::vector<StepRow> rows;
};

class StepLedger {
 public:
  explicit StepLedger(std::int32_t num_seats);

  [[nodiscard]] std::size_t num_in_flight() const { return num_in_flight_; }
  [[nodiscard]] bool is_idle(Seat seat) const { return leases_[index(seat)] == 0; }

  // The record of the step that is being planned; its rows take their leases at once.
  [[nodiscard]] const StepRecord& planning() const { return records_[(first_ + num_in_flight_) % records_.size()]; }
  void add_row(Slot slot, Seat seat, Tokens query_len, bool samples);
  void dispatch(StepId step_id);

  [[nodiscard]] const StepRecord& oldest() const;
  // The result of the oldest step has come. Then each row is settled in order, which ends its lease.
  void begin_settling(StepId step_id, bool fault);
  const StepRow& settle_next();
  // After all rows: the step leaves the ledger.
  void end_settling();
  // Only while a step that did not fault is being settled.
  [[nodiscard]] StepReceipt receipt() const;
  [[nodiscard]] Retirement retirement(Seat seat) const;

  void forfeit(const Teardown& teardown) noexcept;

 private:
  [[nodiscard]] static std::size_t index(Seat seat) { return static_cast<std::size_t>(seat.value()); }

  std::vector<std::int32_t> leases_;
  std::array<StepRecord, kMaxStepsInFlight> records_;
  std::size_t first_ = 0;
  std::size_t num_in_flight_ = 0;
  std::size_t num_settled_ = 0;
  bool settling_ = false;
  bool fault_ = false;
};

}  // namespace tokenspeed::control
