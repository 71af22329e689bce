// SPDX-License-Identifier: Apache-2.0
// Transfers as they happen outside: each copies its pages at some moment between the plan and its acknowledgement, in
// any order, and may fail. Acknowledgements come late, twice, and for transfers that nobody began.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "device.h"
#include "event.h"
#include "layout.h"
#include "memory.h"
#include "oracle.h"
#include "random.h"

namespace tokenspeed::control::sim {

struct TransferMood {
  std::int64_t done_percent = 50;  // of those in flight, in each round
  std::int64_t fail_percent = 0;
  // Of several: its transfers do not end before all do.
  std::optional<std::int64_t> stuck_partition;
};

class Transport {
 public:
  Transport(const Layout& layout, Memory& memory, const TransferMood& mood);

  // What a plan begins. Its seats must be taken already, its rows must not have run.
  void begin(const StepPlan& plan, const Device& device, const Oracle& oracle, Random& random);
  // Some of what is in flight moves on, and some of it is done. With `all`, everything is.
  [[nodiscard]] std::vector<TransferDone> work(Random& random, bool all);
  // The acknowledgements have been applied.
  void settle(std::span<const TransferDone> batch);

  [[nodiscard]] std::size_t num_in_flight() const { return pending_.size(); }
  [[nodiscard]] bool is_pending(std::int64_t lease) const { return pending_.contains(lease); }
  // Of group 0 of each partition: blocks that were stored, tokens that were loaded.
  [[nodiscard]] std::int64_t stored_blocks() const { return stored_blocks_; }
  [[nodiscard]] std::int64_t loaded_tokens() const { return loaded_tokens_; }

 private:
  // No host page: a peer, which knows the right contents.
  struct Item {
    bool is_load = false;
    std::int64_t number = 0;
    std::int32_t device = 0;
    std::int32_t host = 0;
    bool copied = false;
    std::vector<History> image;
  };
  struct Pending {
    std::vector<Item> items;
    bool fails = false;
    bool done = false;
  };

  void begin_load(std::span<const std::int32_t> row, std::vector<History>&& image, const Device& device);
  void begin_store(std::span<const std::int32_t> row, const Device& device);
  [[nodiscard]] std::vector<History> image_of(const StepPlan& plan, std::span<const std::int32_t> row,
                                              const Device& device, const Oracle& oracle) const;
  [[nodiscard]] bool is_stuck(const Pending& pending) const;
  void copy(Item& item);
  void finish(Pending& pending, Random& random);
  void unpin(const Item& item);

  Layout layout_;
  Memory& memory_;
  TransferMood mood_;
  std::map<std::int64_t, Pending> pending_;
  std::vector<std::int64_t> settled_;
  std::int64_t stored_blocks_ = 0;
  std::int64_t loaded_tokens_ = 0;
};

}  // namespace tokenspeed::control::sim
