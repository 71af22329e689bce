// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

#include "simulation.h"

using namespace tokenspeed::control::sim;

int main(int argc, char** argv) {
  std::uint64_t seed = 1, seeds = 1;
  bool trace = false, show = false;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--seed") seed = std::strtoull(argv[++i], nullptr, 10);
    if (name == "--seeds") seeds = std::strtoull(argv[++i], nullptr, 10);
    if (name == "--trace") trace = true;
    if (name == "--show") show = true;
  }
  Coverage coverage;
  std::uint64_t violations = 0;
  for (std::uint64_t s = seed; s < seed + seeds; ++s) {
    Setup setup;
    setup.seed = s;
    setup.trace = trace ? &std::cout : nullptr;
    std::int64_t round = 0;
    try {
      Simulation simulation(setup, coverage);
      try {
        const Report report = simulation.run();
        if (s % 16 == 0) {
          Setup other = setup;
          other.shuffles = true;
          if (Simulation(other, coverage).run().plan_hash != report.plan_hash) throw std::runtime_error("shuffle");
        }
      } catch (...) { round = simulation.num_rounds(); throw; }
    } catch (const std::exception& error) {
      ++violations;
      std::fflush(stdout);
      std::fprintf(stderr, "seed %llu round %lld: %s\n", static_cast<unsigned long long>(s), static_cast<long long>(round), error.what());
    }
  }
  if (show) {
    for (const auto& [name, count] : coverage.counts()) std::printf("%10lld %s\n", static_cast<long long>(count), name.c_str());
    for (const auto& name : coverage.unseen()) std::printf("unseen: %s\n", name.c_str());
  }
  std::printf("%llu seeds, %llu violations\n", static_cast<unsigned long long>(seeds), static_cast<unsigned long long>(violations));
}
