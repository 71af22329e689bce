// SPDX-License-Identifier: Apache-2.0
// The traps that control planes fall into, each with a test of its number. See the list in docs/control-plane.md.
#pragma once

#include <span>

#include "harness.h"

namespace tokenspeed::control::testing {

[[nodiscard]] std::span<const Test> lifecycle_traps();
[[nodiscard]] std::span<const Test> cache_traps();
[[nodiscard]] std::span<const Test> transfer_traps();
[[nodiscard]] std::span<const Test> policy_traps();

}  // namespace tokenspeed::control::testing
