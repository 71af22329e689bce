// SPDX-License-Identifier: Apache-2.0
// Invariants that hold after every call, counted from the handles themselves and not from the counters.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device.h"
#include "layout.h"
#include "oracle.h"
#include "scheduler.h"
#include "transport.h"

namespace tokenspeed::control::sim {

// What is found in sequences, steps and transfers, by page of one group in one tier.
struct Handles {
  std::vector<std::int32_t> writers;
  std::vector<std::int32_t> shares;
  std::int64_t charged = 0;
  std::int64_t in_use = 0;  // pages in tables, each as often as it is named
};

struct Books {
  std::vector<Handles> device;  // by group number
  std::vector<Handles> host;
  std::int64_t num_running = 0;
  std::int64_t num_waiting = 0;
  std::int64_t num_held = 0;
  std::int64_t num_sequences = 0;
};

[[nodiscard]] Books count_handles(const Layout& layout, const Scheduler& scheduler);

// Visits visit(group, item) for each group of a partition and its table, or its kept pages.
template <class Items, class F>
void each_of(const Partition& partition, const Items& items, F&& visit) {
  const auto walk = [&](const auto& groups, const auto& of_kind) {
    for (std::size_t index = 0; index < of_kind.size(); ++index) {
      visit(groups[index], of_kind[index]);
    }
  };
  walk(partition.groups().full, items.full);
  walk(partition.groups().window, items.window);
  walk(partition.groups().recurrent, items.recurrent);
}

// All throw Violation.
void check_pools(const Layout& layout, const Scheduler& scheduler, const Books& books);
// The device's tables, made from deltas only, are the sequences' tables.
void check_tables(const Scheduler& scheduler, const Device& device);
void check_stats(const Scheduler& scheduler, const Books& books, const Oracle& oracle, const Transport& transport);
// Nothing is used any more but what is cached.
void check_baseline(const Layout& layout, const Scheduler& scheduler);

}  // namespace tokenspeed::control::sim
