// SPDX-License-Identifier: Apache-2.0
// What was seen, how often: states, events, transitions. A gap here means that the simulator checks less than it says.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tokenspeed::control::sim {

class Coverage {
 public:
  void count(std::string_view name, std::int64_t times = 1) { counts_[std::string(name)] += times; }
  // The state got the signal.
  void saw(std::string_view state, std::string_view signal) {
    ++counts_[std::string(state) + " + " + std::string(signal)];
  }

  [[nodiscard]] const std::map<std::string, std::int64_t>& counts() const { return counts_; }
  // Legal pairs that were never seen, of those that can be.
  [[nodiscard]] std::vector<std::string> unseen() const;

 private:
  std::map<std::string, std::int64_t> counts_;
};

}  // namespace tokenspeed::control::sim
