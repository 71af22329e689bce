// SPDX-License-Identifier: Apache-2.0
// What the command line asks for. A word that is not understood is refused, never read as something near.
#pragma once

#include <fstream>
#include <span>
#include <stdexcept>
#include <string>

#include "simulation.h"
#include "workers.h"

namespace tokenspeed::control::sim {

// Says what is wrong in one line.
class BadUsage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  Seeds seeds;
  Setup setup;  // of one seed
  bool show = false;
  bool trace = false;
  std::string html;
  // Whether it asks for what only one seed has.
  [[nodiscard]] bool is_one() const { return trace || !html.empty() || setup.num_rounds || setup.kept; }
};

// The words after the program's name.
[[nodiscard]] Options parse(std::span<const std::string> words);

// Before anything runs, so that no work is lost for a file that cannot be written.
[[nodiscard]] std::ofstream opened(const std::string& path);

}  // namespace tokenspeed::control::sim
