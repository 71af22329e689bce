// SPDX-License-Identifier: Apache-2.0
// Invariants that hold after every call, counted from the pages themselves and not from the counters.
#pragma once

#include "device.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

// Throws Violation.
void audit(const Scheduler& scheduler, const Device& device);

}  // namespace tokenspeed::control::sim
