// SPDX-License-Identifier: Apache-2.0
// A stand-in for execution: seats with page tables made from deltas only, and pages that remember which history each
// position was written with, so that reading the wrong K/V is seen at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "oracle.h"
#include "plan.h"
#include "random.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

struct DeviceResult {
  std::int64_t step_id = 0;
  std::vector<std::int32_t> offsets;
  std::vector<std::int32_t> token_ids;
  std::vector<std::int32_t> row_faults;
  bool fault = false;
  std::vector<std::vector<std::int32_t>> tables;  // pages that each row may touch while in flight
  std::vector<std::int32_t> seats;
};

class Device {
 public:
  Device(const Config& config, std::int64_t fault_percent);

  // Runs a step at once; its result is delivered when the simulation says so.
  void run(const StepPlan& plan, Oracle& oracle, Random& random);
  [[nodiscard]] bool is_busy() const { return !in_flight_.empty(); }
  [[nodiscard]] std::size_t num_in_flight() const { return in_flight_.size(); }
  [[nodiscard]] DeviceResult take_result();

  [[nodiscard]] const std::vector<std::int32_t>& table(Seat seat) const {
    return seats_[static_cast<std::size_t>(seat.value())].table;
  }

 private:
  struct SeatState {
    std::int32_t request = -1;
    std::int32_t generation = -1;
    std::vector<std::int32_t> table;
    std::vector<std::uint64_t> history;  // at each position
    std::uint64_t root = 0;
    std::int32_t last_token = 0;
    bool failed = false;  // a fault hit it; what follows in flight is garbage
  };

  void apply_seats(const StepPlan& plan, Oracle& oracle);
  void apply_pages(const StepPlan& plan);
  void check_shape(const StepPlan& plan) const;
  void run_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids, bool garbage);
  void write(SeatState& seat, std::int64_t position, std::int32_t token_id, bool garbage);
  void check_reads(const SeatState& seat, std::int64_t until) const;
  void check_writer(const SeatState& seat, std::int32_t page) const;
  void fail(SeatState& seat, Oracle& oracle) const;
  [[nodiscard]] std::uint64_t& cell(const SeatState& seat, std::int64_t position);

  Config config_;
  std::int64_t fault_percent_;
  std::vector<SeatState> seats_;
  std::vector<std::uint64_t> cells_;
  std::deque<DeviceResult> in_flight_;
};

}  // namespace tokenspeed::control::sim
