// SPDX-License-Identifier: Apache-2.0
// Threads that share the items of one loop. Does not know what an item is.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tokenspeed::cpu {

using Task = void (*)(void* context, std::int64_t item);

// Calls task(context, item) for each item in [0, count), on the caller and on idle pool threads, and returns when all
// are done. Items are claimed one by one, so a thread whose core is taken by somebody else delays at most its own item.
// A second caller at the same time runs its items alone; so does a child of fork.
void parallel_for(std::int64_t count, Task task, void* context);

// Threads of a loop, the caller included. Starts as the number of processors that the process may use.
int num_threads();
void set_num_threads(int count);

// A buffer of this thread, aligned to 64 bytes, valid until its next call with the same slot. Grows, never shrinks.
constexpr int kNumScratchSlots = 6;
float* scratch(int slot, std::size_t num_floats);

}  // namespace tokenspeed::cpu
