// SPDX-License-Identifier: Apache-2.0
// control_sim [--seeds N] [--seed S] [--jobs J] [--show] runs seeds S .. S + N - 1. Of one seed, --trace prints what
// happens, --html FILE draws it, --rounds R ends it early, and --keep 3,8 lets only these events happen. The last line
// is "N seeds, M violations".
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "options.h"
#include "picture.h"
#include "runner.h"
#include "shrink.h"
#include "workers.h"

// The names are the sanitizers' own. A sanitizer's finding ends in abort(), which is the seed's violation.
// NOLINTBEGIN(bugprone-reserved-identifier)
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }
// NOLINTEND(bugprone-reserved-identifier)

namespace {

using namespace tokenspeed::control::sim;

constexpr std::size_t kMostShrunk = 3;

constexpr const char* kUsage =
    "usage: control_sim [--seeds N] [--seed S] [--jobs J] [--show]\n"
    "       control_sim --seed S [--trace] [--html FILE] [--rounds R] [--keep ID,ID,...|none]\n";

// Here and not in a child, so that a debugger sees it.
int run_one(const Options& options) {
  Setup setup = options.setup;
  Picture picture;
  std::ofstream page = options.html.empty() ? std::ofstream() : opened(options.html);
  setup.trace = options.trace ? &std::cout : nullptr;
  setup.picture = options.html.empty() ? nullptr : &picture;
  Coverage coverage;
  const Outcome outcome = run_checked(setup, coverage);
  if (!options.html.empty()) {
    page << picture.html(setup.seed, outcome.violation) << std::flush;
    if (!page) {
      throw BadUsage("cannot write all of '" + options.html + "'");
    }
    std::cout << "picture: " << options.html << '\n';
  }
  if (!outcome.violation.empty()) {
    std::cout << "seed " << setup.seed << ", round " << outcome.num_rounds << ": " << outcome.violation << '\n';
  }
  std::cout << "1 seeds, " << (outcome.violation.empty() ? 0 : 1) << " violations\n";
  return outcome.violation.empty() ? 0 : 1;
}

void print_shrunk(std::uint64_t seed) {
  Setup setup;
  setup.seed = seed;
  Shrunk shrunk = shrink(setup);
  if (shrunk.violation.empty()) {
    std::cout << "seed " << seed << " does not fail by itself\n";
    return;
  }
  std::cout << "seed " << seed << ", shrunk in " << shrunk.num_attempts << " attempts:\n" << std::flush;
  (void)in_child(
      [&](const Say&) {
        Setup traced = shrunk.setup;
        traced.trace = &std::cout;
        std::cout << std::unitbuf;
        Coverage coverage;
        (void)run_once(traced, coverage);
      },
      true);
  std::cout << "  " << shrunk.violation << "\nreplay: control_sim " << replay_arguments(shrunk.setup) << " --trace\n";
}

void print_coverage(const Totals& totals) {
  std::uint64_t plans = 0;
  for (const auto& [seed, hash] : totals.plan_hashes) {
    plans = scramble(plans ^ hash);
    if (totals.plan_hashes.size() <= 16) {
      std::cout << "seed " << seed << ": plans " << std::hex << hash << std::dec << '\n';
    }
  }
  for (const auto& [name, times] : totals.coverage.counts()) {
    std::cout << std::string(std::max<std::size_t>(1, 12 - std::to_string(times).size()), ' ') << times << "  " << name
              << '\n';
  }
  for (const std::string& pair : totals.coverage.unseen()) {
    std::cout << "     never  " << pair << '\n';
  }
  std::cout << "all plans " << std::hex << plans << std::dec << '\n';
}

int run(const Options& options) {
  if (options.is_one()) {
    return run_one(options);
  }
  const Totals totals = run_seeds(options.seeds);
  for (const auto& [seed, violation] : totals.violations) {
    std::cout << "seed " << seed << ": " << violation << '\n';
  }
  std::size_t num_shrunk = 0;
  for (const auto& [seed, violation] : totals.violations) {
    if (num_shrunk++ < kMostShrunk) {
      print_shrunk(seed);
    }
  }
  if (options.show) {
    print_coverage(totals);
  }
  std::cout << options.seeds.count << " seeds, " << totals.violations.size() << " violations\n";
  return totals.violations.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    return run(parse(words));
  } catch (const BadUsage& bad) {
    (void)std::fprintf(stderr, "control_sim: %s\n%s", bad.what(), words.size() > 1 ? "" : kUsage);
    return 2;
  }
}
