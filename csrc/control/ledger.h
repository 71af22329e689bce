// SPDX-License-Identifier: Apache-2.0
// Who may touch what while steps are in flight: seats, the leases that steps and transfers hold on them, the rows of
// each step until its result comes, and the pages that it is the last to have in its tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "check.h"
#include "page.h"
#include "types.h"

namespace tokenspeed::control {

// One step may be planned while another is in flight.
inline constexpr std::size_t kMaxStepsInFlight = 2;

// The seats of one partition; they are numbered over all partitions.
class SeatPool {
 public:
  SeatPool(Seat first, std::int32_t num_seats);

  [[nodiscard]] bool has_free() const { return !free_.empty(); }
  [[nodiscard]] std::size_t num_free() const { return free_.size(); }
  [[nodiscard]] SeatHold take();
  void release(SeatHold&& hold, const Retirement& retirement);

 private:
  std::vector<Seat> free_;
};

// A row of a dispatched step. least, most: tokens that it accepts when it goes well.
struct RowWork {
  Slot slot;
  Tokens query_len;
  std::int32_t least_accepted = 0;
  std::int32_t most_accepted = 0;
  bool is_decode = false;
};

[[nodiscard]] inline RowWork decode_work(Slot slot, std::int32_t drafts) {
  return RowWork{.slot = slot,
                 .query_len = Tokens(1 + std::int64_t{drafts}),
                 .least_accepted = 1,
                 .most_accepted = 1 + drafts,
                 .is_decode = true};
}

[[nodiscard]] inline RowWork prefill_work(Slot slot, Tokens chunk, bool samples) {
  const std::int32_t accepted = samples ? 1 : 0;
  return RowWork{
      .slot = slot, .query_len = chunk, .least_accepted = accepted, .most_accepted = accepted, .is_decode = false};
}

struct StepRow {
  RowWork work;
  Lease lease;
};

template <class Kind>
struct Expired {
  PartitionId partition;
  Group group;
  ExpiredPage<Kind> page;
};
template <class Kind>
using ExpiredPages = std::vector<Expired<Kind>>;

struct StepRecord {
  StepId step_id;
  std::vector<StepRow> rows;
  PerKind<ExpiredPages> expired;
};

class StepLedger {
 public:
  explicit StepLedger(std::int32_t num_seats);

  [[nodiscard]] std::size_t num_in_flight() const { return num_in_flight_; }
  [[nodiscard]] bool is_idle(Seat seat) const { return leases_[index(seat)] == 0; }
  [[nodiscard]] std::int32_t num_leases(Seat seat) const { return leases_[index(seat)]; }

  // What transfers take on a seat.
  [[nodiscard]] Lease lease(Seat seat);
  void retire(Lease&& lease);

  // The step that is being planned; its rows take their leases at once.
  void add_row(const RowWork& work, Seat seat);
  template <class Kind>
  void keep_until_retired(Expired<Kind>&& expired) {
    planning().expired.template of<Kind>().push_back(std::move(expired));
  }
  void dispatch(StepId step_id);

  [[nodiscard]] const StepRecord& oldest() const;
  // The result of the oldest step has come. Then each row is settled in order, which ends its lease.
  void begin_settling(StepId step_id, bool fault);
  const RowWork& settle_next();
  // After all rows: the pages that nobody has in a table any more. The caller empties them.
  [[nodiscard]] PerKind<ExpiredPages>& expired();
  template <class Kind>
  [[nodiscard]] SealedDevicePage<Kind> retire(ExpiredPage<Kind>&& page) {
    TS_CHECK(settling_ && num_settled_ == records_[first_].rows.size(), "page", page.page(), "settled", num_settled_);
    return std::move(page.sealed_);
  }
  void end_settling();
  // Only while a step that did not fault is being settled.
  [[nodiscard]] StepReceipt receipt() const;
  [[nodiscard]] Retirement retirement(Seat seat) const;

  void forfeit(const Teardown& teardown) noexcept;

  // For checks from outside; a record that is not in flight is empty.
  [[nodiscard]] const std::array<StepRecord, kMaxStepsInFlight>& records() const { return records_; }

 private:
  [[nodiscard]] static std::size_t index(Seat seat) { return static_cast<std::size_t>(seat.value()); }
  [[nodiscard]] StepRecord& planning();

  std::vector<std::int32_t> leases_;
  std::array<StepRecord, kMaxStepsInFlight> records_;
  std::size_t first_ = 0;
  std::size_t num_in_flight_ = 0;
  std::size_t num_settled_ = 0;
  bool settling_ = false;
  bool fault_ = false;
};

}  // namespace tokenspeed::control
