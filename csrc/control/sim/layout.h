// SPDX-License-Identifier: Apache-2.0
// What follows from a configuration, stated here a second time and apart from the plane: sizes of blocks, what fits,
// what must be refused.
#pragma once

#include <cstddef>
#include <cstdint>

#include "random.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

class Layout {
 public:
  explicit Layout(const Config& config);

  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] std::int64_t num_groups() const { return static_cast<std::int64_t>(config_.groups.size()); }
  [[nodiscard]] std::int64_t num_numbers() const { return num_groups() * config_.num_partitions; }
  // number: of a group over all partitions.
  [[nodiscard]] const GroupSpec& spec(std::int64_t number) const {
    return config_.groups[static_cast<std::size_t>(number % num_groups())];
  }
  [[nodiscard]] bool keeps_states() const { return keeps_states_; }
  [[nodiscard]] std::int64_t base_size() const { return base_size_; }
  [[nodiscard]] std::int64_t unit() const { return unit_; }
  // Tokens that a request can have at most, whatever it asks for.
  [[nodiscard]] std::int64_t capacity() const { return capacity_; }
  // Whether a request can never fit.
  [[nodiscard]] bool must_refuse(const Submit& submit) const;
  // Tokens after which a request ends.
  [[nodiscard]] std::int64_t limit(const Submit& submit) const;
  // Pages of a bounded group that no request sets aside.
  [[nodiscard]] std::int64_t margin(const GroupSpec& spec) const;

 private:
  [[nodiscard]] bool holds_whole(const GroupSpec& spec) const;
  [[nodiscard]] std::int64_t kept_pages(const GroupSpec& spec, std::int32_t draft_width) const;
  [[nodiscard]] std::int64_t most_pages(const GroupSpec& spec, std::int64_t len, std::int32_t draft_width) const;

  Config config_;
  bool keeps_states_ = false;
  std::int64_t base_size_ = 0;
  std::int64_t unit_ = 1;
  std::int64_t capacity_ = 0;
};

// Small pools of all kinds, so that there is never room for all. typical_len: of the prompts that go with it.
[[nodiscard]] Config random_config(Random& random, std::int64_t typical_len);

}  // namespace tokenspeed::control::sim
