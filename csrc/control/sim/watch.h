// SPDX-License-Identifier: Apache-2.0
// Looks at the states of all sequences before and after each call: which transitions happened, that nobody is
// preempted, held or let go who must not be, and that whoever decodes gets on, and the first of the prompts.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "coverage.h"
#include "device.h"
#include "oracle.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

struct HeldThen {
  std::int32_t partition = 0;
  std::int32_t priority = 0;
  std::int64_t deadline_ms = 0;
};

struct Snapshot {
  std::int64_t now_ms = 0;
  ByKey<std::string_view> states;
  std::map<std::int64_t, RequestKey> waiting_for;  // by lease, whose transfer it is
  ByKey<HeldThen> held;
  std::vector<RequestKey> first;  // in rank among those that run, by partition
  std::set<RequestKey, KeyOrder> must_decode;
  std::vector<RequestKey> must_prefill;  // first in rank among a partition's prompts, where it has all its pages
};

[[nodiscard]] Snapshot snapshot(const Scheduler& scheduler);

class Watch {
 public:
  explicit Watch(Coverage& coverage) : coverage_(coverage) {}

  // After each kind of call, with what was the case before it.
  void batch(const Snapshot& before, std::span<const Event> events, const Snapshot& after, Oracle& oracle);
  void plan(const Snapshot& before, const StepPlan* plan, const Snapshot& after, const Scheduler& scheduler,
            Oracle& oracle);
  void result(const Snapshot& before, const DeviceStep& step, const Snapshot& after, Oracle& oracle);

 private:
  void see_states(const Snapshot& before, const Snapshot& after, Oracle& oracle);
  void see_tick(const Snapshot& before, const Tick& tick, const Oracle& oracle,
                const std::set<RequestKey, KeyOrder>& touched);
  void see_rows(const Snapshot& before, const StepPlan& plan, const Snapshot& after);
  void check_progress(const Snapshot& before, const StepPlan* plan, const Snapshot& after, const Scheduler& scheduler);
  void check_reclaimed(const Snapshot& before, const StepPlan* plan, const Snapshot& after, const Oracle& oracle);
  void check_holds(const Snapshot& after, const Oracle& oracle) const;

  Coverage& coverage_;
  ByKey<std::int64_t> num_waits_;  // plans in a row that had no row for it
};

}  // namespace tokenspeed::control::sim
