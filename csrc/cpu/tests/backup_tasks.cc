// SPDX-License-Identifier: Apache-2.0
// Loops whose threads lose their core in the middle of an item: nobody waits for them, each item is committed once,
// what they read stays as it was until they are done, and the end of the scope waits for them.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <new>
#include <thread>
#include <vector>

#include "thread_pool.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kItems = 24, kNumbers = 64;
constexpr auto kAway = std::chrono::milliseconds(20);

std::atomic<int> num_late{0};     // items that a thread that was away has computed
std::atomic<int> num_spoilt{0};   // of these, such as found their numbers changed
std::atomic<int> num_reading{0};  // threads within `compute`
std::thread::id caller;

struct Sums : BackupTask {
  float numbers[kNumbers];
  float* out;
  int* num_commits;
  bool loses_cores;
};

float sum_of(const Sums& sums, std::int64_t item) {
  float total = 0.0F;
  for (const float number : sums.numbers) {
    total += number * static_cast<float>(item + 1);
  }
  return total;
}

void compute(const BackupTask& task, std::int64_t item, float* result) {
  const auto& sums = static_cast<const Sums&>(task);
  num_reading += 1;
  *result = sum_of(sums, item);
  if (sums.loses_cores && std::this_thread::get_id() != caller) {
    std::this_thread::sleep_for(kAway);
    num_late += 1;
    num_spoilt += sum_of(sums, item) == *result ? 0 : 1;
  }
  num_reading -= 1;
}

void commit(const BackupTask& task, std::int64_t item, const float* result) {
  const auto& sums = static_cast<const Sums&>(task);
  sums.out[item] = *result;
  sums.num_commits[item] += 1;
}

// Whether one loop over numbers that begin with `first` gave what it should.
bool is_right(float first, bool loses_cores) {
  std::vector<float> out(kItems, -1.0F);
  std::vector<int> num_commits(kItems, 0);
  auto* sums = new (lasting_memory(sizeof(Sums))) Sums{{compute, commit, kItems, 1}, {}, nullptr, nullptr, false};
  for (std::int64_t i = 0; i < kNumbers; ++i) {
    sums->numbers[i] = first + static_cast<float>(i);
  }
  sums->out = out.data();
  sums->num_commits = num_commits.data();
  sums->loses_cores = loses_cores;
  const Sums expected = *sums;
  parallel_with_backup(*sums);
  for (std::int64_t item = 0; item < kItems; ++item) {
    const auto place = static_cast<std::size_t>(item);
    if (out[place] != sum_of(expected, item) || num_commits[place] != 1) {
      std::printf("item %d: %g, committed %d times\n", static_cast<int>(item), static_cast<double>(out[place]),
                  num_commits[place]);
      return false;
    }
  }
  return true;
}

bool holds(bool condition, const char* what) {
  if (!condition) {
    std::printf("backup tasks: %s\n", what);
  }
  return condition;
}

// Many loops while their threads are away: far sooner than if each were waited for.
bool leaves_late_threads_behind() {
  constexpr int kLoops = 200;
  const auto began = std::chrono::steady_clock::now();
  bool is_good = true;
  {
    const LateScope scope;
    for (int loop = 0; loop < kLoops; ++loop) {
      is_good = is_right(static_cast<float>(loop), true) && is_good;
    }
  }
  is_good = holds(num_reading == 0, "a thread still reads after the end of the scope") && is_good;
  is_good = holds(num_late > 0, "no thread was away, so nothing was tried") && is_good;
  is_good = holds(num_spoilt == 0, "a late thread found other numbers") && is_good;
  return holds(std::chrono::steady_clock::now() - began < kLoops * kAway / 2, "late threads were waited for") &&
         is_good;
}

// Without a scope the call itself waits for them.
bool ends_without_readers() {
  bool is_good = true;
  for (int loop = 0; loop < 5; ++loop) {
    is_good = is_right(1.0F, true) && holds(num_reading == 0, "a thread reads after the call") && is_good;
  }
  return is_good;
}

bool takes_turns() {
  bool is_good = true;
  const LateScope scope;
  for (int loop = 0; loop < 20000; ++loop) {
    is_good = is_right(static_cast<float>(loop % 97), false) && is_good;
  }
  return is_good;
}

}  // namespace
}  // namespace tokenspeed::cpu

int main() {
  using namespace tokenspeed::cpu;  // NOLINT: a test program
  caller = std::this_thread::get_id();
  bool is_good = true;
  for (const int count : {1, 2, 3, 5}) {
    set_num_threads(count);
    is_good = takes_turns() && is_good;
    if (count > 1) {
      is_good = leaves_late_threads_behind() && ends_without_readers() && is_good;
    }
  }
  std::printf("backup tasks: %s\n", is_good ? "right" : "WRONG");
  return is_good ? 0 : 1;
}
