// SPDX-License-Identifier: Apache-2.0
// Many seeds over a few processes. One that a seed crashes is replaced, and the crash is that seed's violation.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "coverage.h"

namespace tokenspeed::control::sim {

struct Seeds {
  std::uint64_t first = 1;
  std::uint64_t count = 1;
  std::size_t num_jobs = 1;
};

struct Totals {
  std::map<std::uint64_t, std::string> violations;  // by seed
  std::map<std::uint64_t, std::uint64_t> plan_hashes;
  Coverage coverage;
};

[[nodiscard]] Totals run_seeds(const Seeds& seeds);

}  // namespace tokenspeed::control::sim
