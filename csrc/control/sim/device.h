// SPDX-License-Identifier: Apache-2.0
// A stand-in for execution: seats with page tables made from deltas only, rows that read and write pages through them.
// Reading anything but the request's own history is a violation, and so is writing what somebody else may use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "layout.h"
#include "memory.h"
#include "oracle.h"
#include "plan.h"
#include "random.h"

namespace tokenspeed::control::sim {

// Group over all partitions, and page.
using PageName = std::pair<std::int64_t, std::int32_t>;

struct DeviceStep {
  std::int64_t step_id = 0;
  bool fault = false;
  std::vector<RowResult> rows;
  std::vector<std::int32_t> seats;
  std::vector<std::set<PageName>> touched;  // by each row: all pages of its tables
  std::set<PageName> written;
};

class Device {
 public:
  // An entry that no delta ever set.
  static constexpr std::int32_t kUntold = -1;

  struct Seated {
    RequestKey key;
    std::vector<std::vector<std::int32_t>> tables;  // by group of the partition
    History root = 0;
    std::vector<History> history;  // of all tokens that the seat knows
    std::vector<std::uint64_t> contents;
    std::int64_t len = 0;  // tokens computed
    bool has_run = false;
    bool failed = false;  // a fault hit it; what follows in flight is garbage
    std::int32_t last_token = 0;
  };

  Device(const Layout& layout, Memory& memory, std::int64_t fault_percent);

  // Seats and tables first; then transfers may begin, and then the rows run.
  void seat(const StepPlan& plan, const Oracle& oracle);
  void run(const StepPlan& plan, Random& random);
  [[nodiscard]] const std::deque<DeviceStep>& in_flight() const { return in_flight_; }
  [[nodiscard]] DeviceStep take_step();

  [[nodiscard]] const Seated& seated(std::int32_t seat) const { return seats_[static_cast<std::size_t>(seat)]; }
  [[nodiscard]] std::int32_t partition_of(std::int32_t seat) const { return seat / layout_.config().max_num_seqs; }
  [[nodiscard]] std::int32_t num_seats() const { return static_cast<std::int32_t>(seats_.size()); }

 private:
  using Row = std::span<const std::int32_t>;

  void check_shape(const StepPlan& plan) const;
  void apply_pages(const StepPlan& plan);
  void run_row(DeviceStep& step, Row row, std::span<const std::int32_t> token_ids, Random& random);
  void run_prompt(Seated& seat, Row row, std::span<const std::int32_t> token_ids);
  // The tokens that were accepted.
  [[nodiscard]] std::vector<std::int32_t> run_decode(Seated& seat, Row row, Random& random);
  void check_reads(std::int32_t seat, std::int64_t start, std::int64_t end) const;
  void check_state(std::int32_t seat, std::int64_t number, std::int64_t start) const;
  void write(DeviceStep& step, std::int32_t seat, std::int64_t start, std::int64_t end, std::int64_t valid);
  void write_cell(DeviceStep& step, std::int32_t seat, std::int64_t number, std::int64_t position, History history);
  void check_writer(const DeviceStep& step, std::int32_t seat, const PageName& name) const;
  // The page of a block, or kUntold.
  [[nodiscard]] std::int32_t entry(const Seated& seat, std::int64_t number, std::int64_t block) const;
  [[nodiscard]] std::int64_t first_number(std::int32_t seat) const { return partition_of(seat) * layout_.num_groups(); }

  Layout layout_;
  Memory& memory_;
  std::int64_t fault_percent_;
  std::vector<Seated> seats_;
  std::deque<DeviceStep> in_flight_;
};

}  // namespace tokenspeed::control::sim
