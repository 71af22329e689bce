// SPDX-License-Identifier: Apache-2.0
// Validation of a batch of events before any of them is applied.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "event.h"
#include "types.h"

namespace tokenspeed::control {

// What validation may ask of the state before the batch.
struct EventContext {
  // The highest generation seen at an index, or -1.
  std::function<std::int32_t(std::int32_t index)> generation;
  // Whether a request that has not ended is at the index, and how many tokens a Finish may keep: what is generated, or
  // any number where the request has ended and the two have crossed.
  std::function<bool(std::int32_t index)> is_live;
  std::function<Tokens(RequestKey key)> most_kept;
  std::int64_t now_ms = 0;
  std::int32_t num_partitions = 1;
  // Most tokens that a row may draft; 0 where a group keeps a state, which cannot be taken back.
  std::int32_t most_drafts = 0;
};

// Throws CheckError with the values of the first invalid event.
void check_events(std::span<const Event> events, const EventContext& context);

}  // namespace tokenspeed::control
