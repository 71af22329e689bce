// SPDX-License-Identifier: Apache-2.0
// A stand-in for execution that costs next to nothing and allocates only when it is made, so that what is measured or
// counted is the control plane. Its tokens are arbitrary and never end a request.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "check.h"
#include "event.h"
#include "ledger.h"
#include "plan.h"
#include "scheduler.h"

namespace tokenspeed::control::testing {

class QuickDevice {
 public:
  explicit QuickDevice(const Config& config) {
    const auto seats = static_cast<std::size_t>(config.max_num_seqs) * static_cast<std::size_t>(config.num_partitions);
    for (Answer& answer : answers_) {
      answer.offsets.reserve(seats + 1);
      answer.token_ids.reserve(seats * kMostAccepted);
      answer.faults.resize(seats, 0);
    }
    leases_.reserve(4096);
  }

  // A drafted row accepts one token, then two, and so on up to all, in turn.
  void run(const StepPlan& plan) {
    TS_CHECK(num_in_flight_ < answers_.size(), "steps in flight", num_in_flight_);
    Answer& answer = answers_[(first_ + num_in_flight_) % answers_.size()];
    ++num_in_flight_;
    answer.step_id = plan.step_id;
    answer.num_rows = plan.rows.num_rows();
    answer.offsets.clear();
    answer.token_ids.clear();
    answer.offsets.push_back(0);
    for (std::size_t index = 0; index < plan.rows.num_rows(); ++index) {
      const auto row = plan.rows.row(index);
      const bool samples = row[1] != static_cast<std::int32_t>(RowKind::kPrefill);
      const std::uint64_t accepted = samples ? 1 + count_ % (static_cast<std::uint64_t>(row[4]) + 1) : 0;
      for (std::uint64_t token = 0; token < accepted; ++token) {
        answer.token_ids.push_back(static_cast<std::int32_t>(2 + (++count_ * 2'654'435'761ULL >> 7U) % 50'000));
      }
      answer.offsets.push_back(static_cast<std::int32_t>(answer.token_ids.size()));
    }
    note_leases(plan.load);
    note_leases(plan.store);
  }

  [[nodiscard]] std::size_t num_in_flight() const { return num_in_flight_; }

  // Of the oldest step; valid until it is retired.
  [[nodiscard]] StepResult result() const {
    const Answer& answer = answers_[first_];
    return StepResult{.step_id = answer.step_id,
                      .accepted_offsets = answer.offsets,
                      .token_ids = answer.token_ids,
                      .row_faults = std::span(answer.faults).first(answer.num_rows)};
  }

  void retire() {
    first_ = (first_ + 1) % answers_.size();
    --num_in_flight_;
  }

  // Transfers that nobody has acknowledged yet.
  [[nodiscard]] std::vector<LeaseId>& leases() { return leases_; }

 private:
  static constexpr std::size_t kMostAccepted = 16;

  struct Answer {
    StepId step_id;
    std::size_t num_rows = 0;
    std::vector<std::int32_t> offsets;
    std::vector<std::int32_t> token_ids;
    std::vector<std::int32_t> faults;
  };

  // Rows of one lease stand together.
  void note_leases(const FlatBuffer<4>& rows) {
    for (std::size_t index = 0; index < rows.num_rows(); ++index) {
      const LeaseId lease(rows.row(index)[0]);
      if (leases_.empty() || leases_.back() != lease) {
        leases_.push_back(lease);
      }
    }
  }

  std::array<Answer, kMaxStepsInFlight> answers_;
  std::size_t first_ = 0;
  std::size_t num_in_flight_ = 0;
  std::uint64_t count_ = 0;
  std::vector<LeaseId> leases_;
};

}  // namespace tokenspeed::control::testing
