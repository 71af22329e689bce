// SPDX-License-Identifier: Apache-2.0
// One seed: a random configuration, random events, transfers and results in any order that is allowed, everything
// checked after each call, and a checked end. Each event has random numbers of its own, so that events can be dropped
// and the rest stays what it was.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <set>
#include <vector>

#include "audit.h"
#include "coverage.h"
#include "device.h"
#include "layout.h"
#include "memory.h"
#include "oracle.h"
#include "random.h"
#include "replay.h"
#include "scheduler.h"
#include "sessions.h"
#include "transport.h"
#include "watch.h"

namespace tokenspeed::control::sim {

class Picture;

struct Setup {
  std::uint64_t seed = 1;
  std::optional<std::int64_t> num_rounds;      // fewer than the seed has
  std::optional<std::set<std::int64_t>> kept;  // events; the others do not happen
  bool shuffles = false;                       // acknowledgements that come together
  std::ostream* trace = nullptr;
  Picture* picture = nullptr;
};

struct Report {
  std::uint64_t plan_hash = 0;
  std::int64_t num_requests = 0;
  Stats stats;
};

class Simulation {
 public:
  Simulation(const Setup& setup, Coverage& coverage);

  // Throws Violation or CheckError.
  Report run();

  // How far it came, and the events that happened.
  [[nodiscard]] std::int64_t num_rounds() const { return round_; }
  [[nodiscard]] const std::vector<std::int64_t>& event_ids() const { return event_ids_; }
  [[nodiscard]] const Layout& layout() const { return layout_; }

 private:
  struct Habits {
    explicit Habits(Random& random);
    std::size_t max_in_flight;
    std::int64_t num_rounds;
    std::int64_t event_percent;  // of rounds that bring events
    std::int64_t fault_percent;
    TransferMood transfers;
  };

  [[nodiscard]] Random random_for(std::int64_t what, std::int64_t which) const;
  void run_round();
  void add_events(std::vector<Event>& batch);
  void apply(std::vector<Event>& batch, std::vector<TransferDone> done);
  void try_invalid_batch(Random& random);
  void plan(Random& random);
  void advance();
  void audit();
  void finish_all();
  void check_sends(const StepPlan& plan) const;
  void hash_plan(const StepPlan& plan);

  Setup setup_;
  Random random_;
  Mood mood_;
  Layout layout_;
  Habits habits_;
  Coverage& coverage_;
  Scheduler scheduler_;
  Memory memory_;
  Oracle oracle_;
  Device device_;
  Transport transport_;
  Sessions sessions_;
  Replay replay_;
  Watch watch_;
  std::int64_t round_ = 0;
  std::vector<std::int64_t> event_ids_;
  Report report_;
};

}  // namespace tokenspeed::control::sim
