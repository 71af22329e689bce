// SPDX-License-Identifier: Apache-2.0
// How a state moves inside the scheduler: the one place that sends a signal and keeps the lists in step with it.
#pragma once

#include <utility>

#include "scheduler.h"

namespace tokenspeed::control {

template <class Signal>
void Scheduler::send(Slot slot, Signal&& incoming) {
  const List before = list_of(at(slot));
  // Once it has left it may be at home nowhere.
  Roster* const leaving = is_leaving(before) ? &roster_of(at(slot).grant().home()) : nullptr;
  at(slot).handle(std::forward<Signal>(incoming));
  const List after = list_of(at(slot));
  if (before != after) {
    if (leaving != nullptr) {
      --leaving->num_leaving;
    }
    leave(before, slot);
    enter(after, slot);
  }
  if (after == List::kGivingWay || after == List::kEnding) {
    drain_if_idle(slot);
  }
}

}  // namespace tokenspeed::control
