// SPDX-License-Identifier: Apache-2.0
// What the unit tests of the control plane's parts share: a list of tests a file, expectations, and the proofs
// (receipts, retirements) that only the ledgers hand out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "check.h"
#include "ledger.h"
#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control::testing {

struct Test {
  const char* name;
  void (*run)();
};

// One a file.
[[nodiscard]] std::span<const Test> handle_tests();
[[nodiscard]] std::span<const Test> pool_tests();
[[nodiscard]] std::span<const Test> table_tests();
[[nodiscard]] std::span<const Test> index_tests();
[[nodiscard]] std::span<const Test> group_tests();
[[nodiscard]] std::span<const Test> host_tests();
[[nodiscard]] std::span<const Test> options_tests();
[[nodiscard]] std::span<const Test> policy_tests();

#define EXPECT(condition, ...) TS_CHECK(condition __VA_OPT__(, ) __VA_ARGS__)

template <class Function>
bool throws(Function&& function) {
  try {
    std::forward<Function>(function)();
  } catch (const CheckError&) {
    return true;
  }
  return false;
}

// A ledger in the middle of a good step, which is what a receipt takes. Its seats are idle, so retirements can be had.
struct Settling {
  Settling() : ledger(1) {
    ledger.dispatch(StepId(1));
    ledger.begin_settling(StepId(1), false);
  }
  StepLedger ledger;
};

inline BlockHash hash_of(std::uint64_t value) { return BlockHash{.high = value * 7, .low = value * 1'000'003}; }

}  // namespace tokenspeed::control::testing
