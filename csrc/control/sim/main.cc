// SPDX-License-Identifier: Apache-2.0
// control_sim --seeds N [--seed S] [--show]: runs seeds S .. S + N - 1. The last line is "N seeds, M violations".
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>

#include "simulation.h"

// The names are the sanitizers' own. A sanitizer's finding ends in abort(), so that the handler below can still name
// the seed. NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
// NOLINTEND(bugprone-reserved-identifier)

namespace {

using tokenspeed::control::sim::Report;
using tokenspeed::control::sim::Simulation;

volatile std::uint64_t current_seed = 0;

void print_replay(std::uint64_t seed) {
  (void)std::fprintf(stderr, "replay: control_sim --seed %llu --seeds 1\n", static_cast<unsigned long long>(seed));
}

extern "C" void on_abort(int) { print_replay(current_seed); }

struct Options {
  std::uint64_t seed = 1;
  std::uint64_t seeds = 1;
  bool show = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int index = 1; index < argc; ++index) {
    const std::string name = argv[index];
    const bool has_value = index + 1 < argc;
    if (name == "--seed" && has_value) {
      options.seed = std::strtoull(argv[++index], nullptr, 10);
    } else if (name == "--seeds" && has_value) {
      options.seeds = std::strtoull(argv[++index], nullptr, 10);
    } else if (name == "--show") {
      options.show = true;
    } else {
      (void)std::fprintf(stderr, "usage: control_sim [--seeds N] [--seed S] [--show]\n");
      std::exit(2);
    }
  }
  return options;
}

void show(std::uint64_t seed, const Report& report) {
  const auto& stats = report.stats;
  std::cout << "seed " << seed << ": plans " << std::hex << report.plan_hash << std::dec << ", "
            << report.config.num_blocks << " x " << report.config.block_size << " pool, " << report.config.max_num_seqs
            << " seats, cache " << (report.config.prefix_caching ? "on" : "off") << ", " << report.num_requests
            << " requests (" << report.num_refused << " refused), " << stats.num_steps << " steps, "
            << stats.num_preemptions << " preemptions, " << stats.prefix_hit_tokens << " of "
            << stats.prefix_query_tokens << " prompt tokens from the cache\n";
}

bool run_seed(std::uint64_t seed, bool showing) {
  try {
    const Report report = Simulation(seed).run();
    if (showing) {
      show(seed, report);
    }
    // Now and then once more: the same events must give the same plans.
    if (seed % 16 == 0 && Simulation(seed).run().plan_hash != report.plan_hash) {
      throw std::runtime_error("two runs made different plans");
    }
    return true;
  } catch (const std::exception& error) {
    (void)std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
    print_replay(seed);
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  (void)std::signal(SIGABRT, on_abort);
  std::uint64_t violations = 0;
  for (std::uint64_t seed = options.seed; seed < options.seed + options.seeds; ++seed) {
    current_seed = seed;
    violations += run_seed(seed, options.show) ? 0U : 1U;
  }
  std::printf("%llu seeds, %llu violations\n", static_cast<unsigned long long>(options.seeds),
              static_cast<unsigned long long>(violations));
  return violations == 0 ? 0 : 1;
}
