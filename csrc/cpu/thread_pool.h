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

// A loop whose items may be computed twice. compute works an item out into `result`, memory of the thread that calls
// it; commit writes that down, and is called once for each item.
struct BackupTask {
  void (*compute)(const BackupTask& task, std::int64_t item, float* result);
  void (*commit)(const BackupTask& task, std::int64_t item, const float* result);
  std::int64_t count;
  std::size_t num_result_floats;
};

// As parallel_for, but does not wait for a thread that has lost its core in the middle of an item: after a moment the
// caller computes that item as well (a backup task, as in MapReduce, OSDI 2004), and whoever is first commits it.
// The other is late: until the end of the LateScope, or of this call where there is none, it may read the task and all
// that `compute` reads. So the task lies in lasting memory, and so does what the caller would write over.
void parallel_with_backup(const BackupTask& task);

// Memory of the calling thread, aligned to 64 bytes, that nobody reads any more; for its next parallel_with_backup.
std::byte* lasting_memory(std::size_t num_bytes);

// As long as it lives, loops of this thread leave late threads behind; its end waits for them.
class LateScope {
 public:
  LateScope();
  ~LateScope();
  LateScope(const LateScope&) = delete;
  LateScope(LateScope&&) = delete;
  LateScope& operator=(const LateScope&) = delete;
  LateScope& operator=(LateScope&&) = delete;
};

// Threads of a loop, the caller included. Starts as the number of processors that the process may use.
int num_threads();
void set_num_threads(int count);

// A buffer of this thread, aligned to 64 bytes, valid until its next call with the same slot. Grows, never shrinks.
constexpr int kNumScratchSlots = 7;
float* scratch(int slot, std::size_t num_floats);

}  // namespace tokenspeed::cpu
