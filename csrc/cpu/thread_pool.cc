// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <sched.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace tokenspeed::cpu {
namespace {

// About 40 microseconds: bridges the gap between two kernels of a layer, and little enough to lend the core away.
constexpr int kNumSpins = 1500;
// About 10 microseconds: somewhat longer than an item of a backup task takes.
constexpr int kPatienceSpins = 400;
constexpr std::int64_t kBackupItemsMax = 4096;
constexpr int kThreadsMax = 512;
constexpr int kResultSlot = kNumScratchSlots - 2;  // of scratch

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int available_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// The state of a loop in one word, so that claiming an item can not succeed on a stale loop.
struct Ticket {
  static constexpr int kCountBits = 20;
  static constexpr std::uint64_t kCountMax = (1U << kCountBits) - 1;

  std::uint64_t word;

  static Ticket make(std::uint64_t epoch, std::uint64_t count) {
    return {(epoch << (2 * kCountBits)) | (count << kCountBits)};
  }
  [[nodiscard]] std::uint64_t epoch() const { return word >> (2 * kCountBits); }
  [[nodiscard]] std::uint64_t count() const { return (word >> kCountBits) & kCountMax; }
  [[nodiscard]] std::uint64_t next() const { return word & kCountMax; }
  [[nodiscard]] bool has_items() const { return next() < count(); }
};

// The loop whose item a pool thread computes, by its serial number; 0: none.
struct alignas(64) Held {
  std::atomic<std::uint64_t> serial{0};
};

void compute_and_commit(void* context, std::int64_t item) {
  const auto& task = *static_cast<const BackupTask*>(context);
  float* result = scratch(kResultSlot, task.num_result_floats);
  task.compute(task, item, result);
  task.commit(task, item, result);
}

class ThreadPool {
 public:
  // Never destroyed: a forked child must not join threads that it does not have.
  static ThreadPool& instance() {
    static auto* pool = new ThreadPool(available_processors());
    return *pool;
  }

  explicit ThreadPool(int count) : num_threads_(std::min(count, kThreadsMax)) {}

  [[nodiscard]] int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void set_num_threads(int count) {
    const std::lock_guard caller(caller_);
    retire();
    num_threads_.store(count, std::memory_order_relaxed);
  }

  void run(std::int64_t count, Task task, void* context) {
    std::unique_lock caller(caller_, std::try_to_lock);
    if (!is_shared(count, caller)) {
      run_alone(count, task, context);
      return;
    }
    start();
    for (std::int64_t first = 0; first < count; first += static_cast<std::int64_t>(Ticket::kCountMax)) {
      const auto size = std::min<std::int64_t>(count - first, static_cast<std::int64_t>(Ticket::kCountMax));
      run_some(first, size, task, context);
    }
  }

  // The serial number of the loop where it left a thread behind, or 0.
  std::uint64_t run_with_backup(const BackupTask& task) {
    auto* context = const_cast<BackupTask*>(&task);
    if (task.count > kBackupItemsMax) {
      run(task.count, compute_and_commit, context);
      return 0;
    }
    std::unique_lock caller(caller_, std::try_to_lock);
    if (!is_shared(task.count, caller)) {
      run_alone(task.count, compute_and_commit, context);
      return 0;
    }
    start();
    offer(0, task.count, nullptr, context);
    work(nullptr);
    for (int spins = 0; spins < kPatienceSpins; ++spins) {
      if (num_done_.load(std::memory_order_acquire) == task.count) {
        return 0;
      }
      pause();
    }
    const std::uint64_t serial = serial_.load(std::memory_order_relaxed);
    for (std::int64_t item = 0; item < task.count; ++item) {
      if (committed_[static_cast<std::size_t>(item)].load(std::memory_order_relaxed) != serial) {
        compute(task, serial, item);
      }
    }
    await(task.count);  // for who is in the middle of a commit
    return serial;
  }

  // Whether a thread computes an item of that loop still.
  [[nodiscard]] bool is_held(std::uint64_t serial) const {
    return std::any_of(held_.begin(), held_.begin() + num_threads(),
                       [serial](const Held& held) { return held.serial.load() == serial; });
  }

 private:
  [[nodiscard]] bool is_shared(std::int64_t count, const std::unique_lock<std::mutex>& caller) const {
    return count > 1 && caller.owns_lock() && num_threads() > 1;
  }

  static void run_alone(std::int64_t count, Task task, void* context) {
    for (std::int64_t item = 0; item < count; ++item) {
      task(context, item);
    }
  }

  void run_some(std::int64_t first, std::int64_t count, Task task, void* context) {
    offer(first, count, task, context);
    work(nullptr);
    await(count);
  }

  // Begins a loop. Without a task it is a backup task that the context is.
  void offer(std::int64_t first, std::int64_t count, Task task, void* context) {
    first_.store(first, std::memory_order_relaxed);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    serial_.store(serial_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    const Ticket previous{ticket_.load(std::memory_order_relaxed)};
    ticket_.store(Ticket::make(previous.epoch() + 1, static_cast<std::uint64_t>(count)).word);
    if (num_sleepers_.load() > 0) {
      const std::lock_guard lock(sleep_);
      wake_.notify_all();
    }
  }

  void await(std::int64_t count) const {
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < count; ++spins) {
      spins < kNumSpins ? pause() : std::this_thread::yield();
    }
  }

  // Claims and runs items until none is left. held: where a pool thread says what it is at.
  void work(Held* held) {
    Ticket ticket{ticket_.load(std::memory_order_acquire)};
    while (ticket.has_items()) {
      // Where the claim succeeds the loop was not at its end, so these were its own. Afterwards it may end, if somebody
      // else computes this item too.
      const Task task = task_.load(std::memory_order_relaxed);
      void* context = context_.load(std::memory_order_relaxed);
      const std::int64_t first = first_.load(std::memory_order_relaxed);
      const std::uint64_t serial = serial_.load(std::memory_order_relaxed);
      if (held != nullptr) {
        held->serial.store(serial);
      }
      if (!ticket_.compare_exchange_weak(ticket.word, ticket.word + 1)) {
        continue;
      }
      const std::int64_t item = first + static_cast<std::int64_t>(ticket.next());
      if (task == nullptr) {
        compute(*static_cast<const BackupTask*>(context), serial, item);
      } else {
        task(context, item);
        num_done_.fetch_add(1, std::memory_order_acq_rel);
      }
      ticket.word = ticket_.load(std::memory_order_acquire);
    }
    if (held != nullptr) {
      held->serial.store(0);
    }
  }

  void compute(const BackupTask& task, std::uint64_t serial, std::int64_t item) {
    float* result = scratch(kResultSlot, task.num_result_floats);
    task.compute(task, item, result);
    if (is_first(serial, item)) {
      task.commit(task, item, result);
      num_done_.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  // Serial numbers only grow, so who comes late to a loop that is over does not take the item of a later one for his.
  bool is_first(std::uint64_t serial, std::int64_t item) {
    std::atomic<std::uint64_t>& committed = committed_[static_cast<std::size_t>(item)];
    std::uint64_t seen = committed.load(std::memory_order_relaxed);
    while (seen < serial) {
      if (committed.compare_exchange_weak(seen, serial, std::memory_order_acq_rel)) {
        return true;
      }
    }
    return false;
  }

  void serve(Held* held) {
    while (!is_stopping_.load()) {
      work(held);
      if (!spin()) {
        sleep();
      }
    }
  }

  // Whether work turned up within a moment.
  bool spin() {
    for (int spins = 0; spins < kNumSpins; ++spins) {
      if (is_awaited()) {
        return true;
      }
      pause();
    }
    return false;
  }

  void sleep() {
    std::unique_lock lock(sleep_);
    num_sleepers_.fetch_add(1);
    wake_.wait(lock, [this] { return is_awaited(); });
    num_sleepers_.fetch_sub(1);
  }

  bool is_awaited() { return is_stopping_.load() || Ticket{ticket_.load()}.has_items(); }

  void start() {
    if (owner_ == getpid() && static_cast<int>(threads_.size()) == num_threads() - 1) {
      return;
    }
    retire();
    owner_ = getpid();
    for (int index = 1; index < num_threads(); ++index) {
      threads_.emplace_back([this, index] { serve(&held_[static_cast<std::size_t>(index)]); });
    }
  }

  void retire() {
    if (owner_ == getpid()) {
      is_stopping_.store(true);
      {
        const std::lock_guard lock(sleep_);
        wake_.notify_all();
      }
      for (auto& thread : threads_) {
        thread.join();
      }
      is_stopping_.store(false);
    } else {
      num_sleepers_.store(0);
      for (Held& held : held_) {
        held.serial.store(0);
      }
      for (auto& thread : threads_) {
        thread.detach();
      }
    }
    threads_.clear();
  }

  std::mutex caller_;
  std::atomic<int> num_threads_;
  std::vector<std::thread> threads_;
  pid_t owner_ = 0;

  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<std::int64_t> first_{0};
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<std::int64_t> num_done_{0};
  std::atomic<std::uint64_t> serial_{0};                                 // of the loop
  std::array<std::atomic<std::uint64_t>, kBackupItemsMax> committed_{};  // the last loop that had so many items
  std::array<Held, kThreadsMax> held_;

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<int> num_sleepers_{0};
  std::atomic<bool> is_stopping_{false};
};

struct Free {
  void operator()(float* buffer) const { std::free(buffer); }
};

struct Buffer {
  std::unique_ptr<float, Free> data;
  std::size_t size = 0;

  // At least so many floats, with what it held only if it did not have to grow.
  float* sized(std::size_t num_floats) {
    if (size < num_floats) {
      constexpr std::size_t kAlignment = 64;
      const std::size_t bytes = (num_floats * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
      data.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
      if (data == nullptr) {
        size = 0;
        throw std::bad_alloc();
      }
      size = num_floats;
    }
    return data.get();
  }
};

// Buffers of a thread, one of which its next loop with backups reads. serial: the loop that left a thread behind with
// it, or 0.
class Lasting {
 public:
  static Lasting& own() {
    thread_local Lasting lasting;
    return lasting;
  }

  float* next(std::size_t num_floats) {
    for (next_ = 0; next_ < buffers_.size(); ++next_) {
      std::uint64_t& serial = buffers_[next_].serial;
      if (serial == 0 || !ThreadPool::instance().is_held(serial)) {
        serial = 0;
        break;
      }
    }
    if (next_ == buffers_.size()) {
      buffers_.emplace_back();
    }
    return buffers_[next_].memory.sized(num_floats);
  }

  void run(const BackupTask& task) {
    const std::uint64_t serial = ThreadPool::instance().run_with_backup(task);
    if (serial != 0) {
      buffers_[next_].serial = serial;
      if (num_scopes_ == 0) {
        settle();
      }
    }
  }

  void open() { num_scopes_ += 1; }

  void close() {
    num_scopes_ -= 1;
    if (num_scopes_ == 0) {
      settle();
    }
  }

 private:
  struct Kept {
    Buffer memory;
    std::uint64_t serial = 0;
  };

  // Waits for all that were left behind.
  void settle() {
    for (Kept& kept : buffers_) {
      for (int spins = 0; kept.serial != 0 && ThreadPool::instance().is_held(kept.serial); ++spins) {
        spins < kNumSpins ? pause() : std::this_thread::yield();
      }
      kept.serial = 0;
    }
  }

  std::vector<Kept> buffers_;
  std::size_t next_ = 0;
  int num_scopes_ = 0;
};

}  // namespace

void parallel_for(std::int64_t count, Task task, void* context) {
  if (count > 0) {
    ThreadPool::instance().run(count, task, context);
  }
}

int num_threads() { return ThreadPool::instance().num_threads(); }

void set_num_threads(int count) { ThreadPool::instance().set_num_threads(std::clamp(count, 1, kThreadsMax)); }

void parallel_with_backup(const BackupTask& task) { Lasting::own().run(task); }

std::byte* lasting_memory(std::size_t num_bytes) {
  return reinterpret_cast<std::byte*>(Lasting::own().next((num_bytes + sizeof(float) - 1) / sizeof(float)));
}

LateScope::LateScope() { Lasting::own().open(); }

LateScope::~LateScope() { Lasting::own().close(); }

float* scratch(int slot, std::size_t num_floats) {
  thread_local Buffer buffers[kNumScratchSlots];
  return buffers[slot].sized(num_floats);
}

}  // namespace tokenspeed::cpu
