// SPDX-License-Identifier: Apache-2.0
// Runs all traps, or those whose name contains the argument. Built with TOKENSPEED_TESTS and run at the end of its
// build.
#include <cstddef>
#include <cstdio>
#include <exception>
#include <set>
#include <string_view>

#include "traps.h"

int main(int argc, char** argv) {
  using namespace tokenspeed::control::testing;
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  std::set<std::string_view> traps;
  std::size_t num_run = 0;
  std::size_t num_failed = 0;
  for (const auto& tests : {lifecycle_traps(), cache_traps(), transfer_traps(), policy_traps()}) {
    for (const Test& test : tests) {
      if (std::string_view(test.name).find(wanted) == std::string_view::npos) {
        continue;
      }
      ++num_run;
      traps.insert(std::string_view(test.name).substr(0, std::string_view("trap_00").size()));
      try {
        test.run();
      } catch (const std::exception& error) {
        std::printf("FAILED %s: %s\n", test.name, error.what());
        ++num_failed;
      }
    }
  }
  std::printf("%zu tests of %zu traps, %zu failed\n", num_run, traps.size(), num_failed);
  return num_failed == 0 && num_run > 0 ? 0 : 1;
}
