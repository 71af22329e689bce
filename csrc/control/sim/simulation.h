// SPDX-License-Identifier: Apache-2.0
// One seed: a random configuration, random events, results in any order that is allowed, and a checked end.
#pragma once

#include <cstdint>
#include <vector>

#include "device.h"
#include "oracle.h"
#include "random.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

struct Report {
  Config config;
  std::uint64_t plan_hash = 0;
  std::int64_t num_requests = 0;
  std::int64_t num_refused = 0;
  Stats stats;
};

class Simulation {
 public:
  explicit Simulation(std::uint64_t seed);

  // Throws Violation or CheckError.
  Report run();

 private:
  void send_events();
  void send_event();
  void submit();
  void submit_key(std::int32_t index);
  void send_to_any(std::int64_t which);
  void send_invalid_batch();
  void apply();
  void plan();
  void advance();
  [[nodiscard]] const Sequence* first_running() const;
  void hash_plan(const StepPlan& plan);
  void finish_all();
  [[nodiscard]] std::vector<std::int32_t> random_prompt();
  [[nodiscard]] std::int32_t any_request();

  Random random_;
  Config config_;
  std::size_t max_in_flight_;
  std::int64_t num_rounds_;
  std::int64_t event_percent_;  // of rounds that bring events
  std::int64_t end_percent_;    // of events that end a request from outside
  Scheduler scheduler_;
  Oracle oracle_;
  Device device_;
  std::vector<std::int32_t> generations_;
  std::vector<Submit> queued_;
  std::int64_t now_ms_ = 0;
  Report report_;
};

}  // namespace tokenspeed::control::sim
