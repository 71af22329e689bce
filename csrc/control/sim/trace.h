// SPDX-License-Identifier: Apache-2.0
// Events, plans and results as text, one a line.
#pragma once

#include <cstdint>
#include <ostream>
#include <span>

#include "device.h"
#include "event.h"
#include "layout.h"
#include "plan.h"

namespace tokenspeed::control::sim {

// Each does nothing where there is no stream.
void trace_config(std::ostream* out, const Layout& layout);
void trace_events(std::ostream* out, std::int64_t round, std::span<const Event> events);
void trace_plan(std::ostream* out, std::int64_t round, const StepPlan* plan);
void trace_result(std::ostream* out, std::int64_t round, const DeviceStep& step);

}  // namespace tokenspeed::control::sim
