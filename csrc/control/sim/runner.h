// SPDX-License-Identifier: Apache-2.0
// Runs a seed, here or in a process of its own, and says what it violated.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "coverage.h"
#include "simulation.h"

namespace tokenspeed::control::sim {

struct Outcome {
  std::string violation;  // empty where there is none
  std::int64_t num_rounds = 0;
  std::vector<std::int64_t> event_ids;
  Report report;
};

[[nodiscard]] Outcome run_once(const Setup& setup, Coverage& coverage);
// Some seeds run again, and again with acknowledgements in another order: the plans must be the same.
[[nodiscard]] Outcome run_checked(const Setup& setup, Coverage& coverage);

// What a child process wrote with `say`, up to its end or its crash.
struct ChildOutput {
  std::string text;
  bool crashed = false;
};
using Say = std::function<void(const std::string&)>;
using Work = std::function<void(const Say&)>;

class Child {
 public:
  // quiet: what it writes to stderr is lost.
  Child(const Work& work, bool quiet);

  // Readable when there is something to take.
  [[nodiscard]] int file() const { return file_; }
  // False once the child has ended; then its output is whole.
  bool take();
  [[nodiscard]] const ChildOutput& output() const { return output_; }

 private:
  int process_ = 0;
  int file_ = -1;
  ChildOutput output_;
};

[[nodiscard]] ChildOutput in_child(const Work& work, bool quiet);

}  // namespace tokenspeed::control::sim
