// SPDX-License-Identifier: Apache-2.0
// Runs what can only be seen from inside the control plane: handles, pools, tables, the index, cache groups, the host
// tier, policy, and the simulator's command line. Built with TOKENSPEED_TESTS and run at the end of its build.
#include <array>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <span>

#include "testing.h"

int main() {
  using namespace tokenspeed::control::testing;
  const std::array<std::span<const Test>, 8> files{handle_tests(), pool_tests(), table_tests(),  index_tests(),
                                                   group_tests(),  host_tests(), policy_tests(), options_tests()};
  std::size_t num_tests = 0;
  int num_failed = 0;
  for (const std::span<const Test> tests : files) {
    num_tests += tests.size();
    for (const Test& test : tests) {
      try {
        test.run();
      } catch (const std::exception& error) {
        (void)std::printf("FAILED %s: %s\n", test.name, error.what());
        ++num_failed;
      }
    }
  }
  (void)std::printf("%zu tests, %d failed\n", num_tests, num_failed);
  return num_failed == 0 ? 0 : 1;
}
