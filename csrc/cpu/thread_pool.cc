// SPDX-License-Identifier: Apache-2.0
#include "thread_pool.h"

#include <algorithm>
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

class ThreadPool {
 public:
  // Never destroyed: a forked child must not join threads that it does not have.
  static ThreadPool& instance() {
    static auto* pool = new ThreadPool(available_processors());
    return *pool;
  }

  explicit ThreadPool(int count) : num_threads_(count) {}

  [[nodiscard]] int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void set_num_threads(int count) {
    const std::lock_guard caller(caller_);
    retire();
    num_threads_.store(count, std::memory_order_relaxed);
  }

  void run(std::int64_t count, Task task, void* context) {
    std::unique_lock caller(caller_, std::try_to_lock);
    if (count == 1 || !caller.owns_lock() || num_threads() == 1) {
      for (std::int64_t item = 0; item < count; ++item) {
        task(context, item);
      }
      return;
    }
    start();
    for (std::int64_t first = 0; first < count; first += static_cast<std::int64_t>(Ticket::kCountMax)) {
      const auto size = std::min<std::int64_t>(count - first, static_cast<std::int64_t>(Ticket::kCountMax));
      run_some(first, size, task, context);
    }
  }

 private:
  void run_some(std::int64_t first, std::int64_t count, Task task, void* context) {
    first_.store(first, std::memory_order_relaxed);
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    const Ticket previous{ticket_.load(std::memory_order_relaxed)};
    ticket_.store(Ticket::make(previous.epoch() + 1, static_cast<std::uint64_t>(count)).word);
    if (num_sleepers_.load() > 0) {
      const std::lock_guard lock(sleep_);
      wake_.notify_all();
    }
    work();
    for (int spins = 0; num_done_.load(std::memory_order_acquire) < count; ++spins) {
      spins < kNumSpins ? pause() : std::this_thread::yield();
    }
  }

  // Claims and runs items until none is left.
  void work() {
    Ticket ticket{ticket_.load(std::memory_order_acquire)};
    while (ticket.has_items()) {
      if (!ticket_.compare_exchange_weak(ticket.word, ticket.word + 1, std::memory_order_acq_rel)) {
        continue;
      }
      // The loop can not end before this item is done, so these belong to the ticket that was claimed.
      const Task task = task_.load(std::memory_order_relaxed);
      task(context_.load(std::memory_order_relaxed),
           first_.load(std::memory_order_relaxed) + static_cast<std::int64_t>(ticket.next()));
      num_done_.fetch_add(1, std::memory_order_acq_rel);
      ticket.word = ticket_.load(std::memory_order_acquire);
    }
  }

  void serve() {
    while (!is_stopping_.load()) {
      work();
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
      threads_.emplace_back([this] { serve(); });
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
};

}  // namespace

void parallel_for(std::int64_t count, Task task, void* context) {
  if (count > 0) {
    ThreadPool::instance().run(count, task, context);
  }
}

int num_threads() { return ThreadPool::instance().num_threads(); }

void set_num_threads(int count) { ThreadPool::instance().set_num_threads(std::max(1, count)); }

float* scratch(int slot, std::size_t num_floats) {
  thread_local Buffer buffers[kNumScratchSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.size < num_floats) {
    constexpr std::size_t kAlignment = 64;
    const std::size_t bytes = (num_floats * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
    buffer.data.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
    if (buffer.data == nullptr) {
      throw std::bad_alloc();
    }
    buffer.size = num_floats;
  }
  return buffer.data.get();
}

}  // namespace tokenspeed::cpu
