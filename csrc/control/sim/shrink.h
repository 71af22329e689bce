// SPDX-License-Identifier: Apache-2.0
// Makes a failing seed short: fewer rounds, then fewer events, while the same kind of violation comes.
#pragma once

#include <string>

#include "simulation.h"

namespace tokenspeed::control::sim {

struct Shrunk {
  Setup setup;
  std::string violation;
  int num_attempts = 0;
};

// A seed that crashes is tried in child processes, so that the shrinker outlives it.
[[nodiscard]] Shrunk shrink(const Setup& setup);

// The arguments that run it again.
[[nodiscard]] std::string replay_arguments(const Setup& setup);

}  // namespace tokenspeed::control::sim
