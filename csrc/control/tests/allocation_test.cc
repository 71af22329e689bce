// SPDX-License-Identifier: Apache-2.0
// After warm-up, making a plan and taking in a result allocate nothing: every operator new is counted while they run.
// And where one fails before that, the plane says from then on that it cannot be used.
// Built with TOKENSPEED_TESTS and run at the end of its build.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "quick_device.h"
#include "scheduler.h"

namespace {

// Not atomic: one thread.
bool counting = false;
bool failing = false;
std::int64_t num_allocations = 0;

void* counted(std::size_t size) {
  num_allocations += counting ? 1 : 0;
  void* memory = failing ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

void* operator new(std::size_t size) { return counted(size); }
void* operator new[](std::size_t size) { return counted(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace tokenspeed::control {
namespace {

using testing::QuickDevice;

struct Case {
  const char* name;
  std::vector<GroupSpec> groups;
  std::int32_t draft_width = 0;
  std::int32_t num_partitions = 1;
  HostStore host_store = HostStore::kOnSeal;
  bool in_step = false;     // all sequences cross a page boundary in the same step
  bool full_cache = false;  // other prompts have left all pages cached, so that each new page evicts
};

GroupSpec group(GroupKind kind, std::int64_t block_size, std::int64_t num_host_blocks = 0) {
  return GroupSpec{.kind = kind,
                   .block_size = Tokens(block_size),
                   .num_blocks = Blocks(34 * (8192 / block_size + 8)),
                   .num_host_blocks = Blocks(num_host_blocks),
                   .window = Tokens(kind == GroupKind::kWindow ? 100 : 0)};
}

std::vector<Case> cases() {
  const GroupSpec full = group(GroupKind::kFull, 16);
  const GroupSpec wide = group(GroupKind::kFull, 64);
  const GroupSpec window = group(GroupKind::kWindow, 16);
  const GroupSpec state = group(GroupKind::kRecurrent, 64);
  const std::vector<GroupSpec> hosted{group(GroupKind::kFull, 16, 2000), group(GroupKind::kWindow, 16, 500),
                                      group(GroupKind::kRecurrent, 64, 200)};
  std::vector<Case> all;
  all.push_back({.name = "full attention", .groups = {full}});
  all.push_back({.name = "full attention, in step", .groups = {full}, .in_step = true});
  all.push_back({.name = "a window", .groups = {window}});
  all.push_back({.name = "a state", .groups = {state}});
  all.push_back({.name = "four groups", .groups = {full, wide, window, state}});
  all.push_back({.name = "four groups, in step", .groups = {full, wide, window, state}, .in_step = true});
  all.push_back({.name = "drafts", .groups = {full, window}, .draft_width = 5});
  all.push_back({.name = "two partitions", .groups = {full, window, state}, .num_partitions = 2});
  all.push_back({.name = "evictions", .groups = {full, wide}, .full_cache = true});
  all.push_back({.name = "copies to the host on sealing", .groups = hosted});
  all.push_back({.name = "copies to the host, in step", .groups = hosted, .in_step = true});
  all.push_back({.name = "copies to the host under pressure",
                 .groups = hosted,
                 .host_store = HostStore::kOnPressure,
                 .full_cache = true});
  return all;
}

constexpr std::int32_t kSeats = 32;
constexpr std::int64_t kWarmUp = 600;
constexpr std::int64_t kSteps = 4000;

// One plan, and the result of the plan before.
void step(Scheduler& plane, QuickDevice& device) {
  if (device.leases().size() > 2) {
    // Acknowledged late and in a batch; taking in events may allocate.
    for (const LeaseId lease : device.leases()) {
      plane.enqueue(TransferDone{.lease = lease, .ok = true});
    }
    device.leases().clear();
    TS_CHECK(plane.apply().empty());
  }
  counting = true;
  const StepPlan* plan = plane.next_plan();
  counting = false;
  if (plan != nullptr) {
    device.run(*plan);
  }
  if (device.num_in_flight() > 1 || (plan == nullptr && device.num_in_flight() > 0)) {
    const StepResult result = device.result();
    counting = true;
    plane.advance(result);
    counting = false;
    device.retire();
  }
  (void)plane.take_events();
}

// Fills the pools with pages that are only cached.
void fill_cache(Scheduler& plane, QuickDevice& device) {
  for (std::int32_t index = 100; index < 150; ++index) {
    Submit submit;
    submit.key = RequestKey{.index = index, .generation = 0};
    submit.token_ids.assign(6500, index);
    submit.max_new_tokens = Tokens(1);
    plane.enqueue(std::move(submit));
    TS_CHECK(plane.apply().empty());
    while (plane.has_work()) {
      step(plane, device);
    }
  }
}

void submit_all(Scheduler& plane, const Case& test) {
  const std::int32_t count = kSeats * test.num_partitions;
  for (std::int32_t index = 0; index < count; ++index) {
    Submit submit;
    submit.key = RequestKey{.index = index, .generation = 0};
    const std::int64_t len = 200 + (test.in_step ? 0 : 3 * std::int64_t{index});
    submit.token_ids.assign(static_cast<std::size_t>(len), 7 + index);
    submit.max_new_tokens = Tokens(7900 - 200 - 3 * count);
    submit.draft_width = test.draft_width;
    plane.enqueue(std::move(submit));
  }
  TS_CHECK(plane.apply().empty());
}

void run(const Case& test) {
  Config config;
  config.groups = test.groups;
  config.num_partitions = test.num_partitions;
  config.max_num_seqs = kSeats;
  config.max_num_batched_tokens = 1024;
  config.max_model_len = 8000;
  config.ageing_steps = 256;
  config.host_store = test.host_store;
  Scheduler plane(config);
  QuickDevice device(config);
  if (test.full_cache) {
    fill_cache(plane, device);
    TS_CHECK(plane.stats().cached_blocks > plane.stats().total_blocks * 9 / 10, plane.stats().cached_blocks);
  }
  submit_all(plane, test);
  // A drafted row accepts several tokens a step.
  const std::int64_t num_steps = test.draft_width > 0 ? kSteps / 4 : kSteps;
  for (std::int64_t index = 0; index < kWarmUp; ++index) {
    step(plane, device);
  }
  const auto count = static_cast<std::int64_t>(kSeats) * test.num_partitions;
  TS_CHECK(plane.stats().num_running == count, "running", plane.stats().num_running);
  const Stats before = plane.stats();
  num_allocations = 0;
  for (std::int64_t index = 0; index < num_steps; ++index) {
    step(plane, device);
    TS_CHECK(num_allocations == 0, test.name, "step", index, "allocations", num_allocations);
  }
  const Stats after = plane.stats();
  TS_CHECK(after.num_running == count && after.generated_tokens - before.generated_tokens >= num_steps * count,
           after.num_running, after.generated_tokens - before.generated_tokens);
  const bool copies = config.groups.front().num_host_blocks > Blocks(0);
  TS_CHECK(!copies || after.stored_blocks > before.stored_blocks, "stored", after.stored_blocks);
}

// Whatever the call, it must not go on from changes that are half made.
void expect_unusable(Scheduler& plane) {
  const std::vector<std::pair<const char*, std::function<void()>>> calls{
      {"enqueue", [&] { plane.enqueue(Tick{.now_ms = 1}); }},
      {"apply", [&] { (void)plane.apply(); }},
      {"next_plan", [&] { (void)plane.next_plan(); }},
      {"advance", [&] { plane.advance(StepResult()); }},
      {"take_events", [&] { (void)plane.take_events(); }},
      {"take_kv_events", [&] { (void)plane.take_kv_events(); }},
      {"stats", [&] { (void)plane.stats(); }},
      {"has_work", [&] { (void)plane.has_work(); }}};
  for (const auto& [name, call] : calls) {
    bool refused = false;
    try {
      call();
    } catch (const CheckError& error) {
      refused = std::string(error.what()).find("failed half-way") != std::string::npos;
    }
    TS_CHECK(refused, name, "was taken by a plane that had failed");
  }
}

void run_out_of_memory() {
  Config config;
  config.groups = {group(GroupKind::kFull, 16)};
  config.max_num_seqs = kSeats;
  config.max_num_batched_tokens = 1024;
  config.max_model_len = 8000;
  config.ageing_steps = 256;
  Scheduler plane(config);
  Submit submit;
  submit.key = RequestKey{.index = 0, .generation = 0};
  submit.token_ids.assign(200, 7);
  submit.max_new_tokens = Tokens(8);
  plane.enqueue(std::move(submit));
  TS_CHECK(plane.apply().empty());
  bool failed = false;
  failing = true;
  try {
    (void)plane.next_plan();
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  failing = false;
  TS_CHECK(failed, "an admission took no memory");
  expect_unusable(plane);
}

}  // namespace
}  // namespace tokenspeed::control

int main() {
  int num_failed = 0;
  try {
    tokenspeed::control::run_out_of_memory();
  } catch (const std::exception& error) {
    std::printf("FAILED out of memory: %s\n", error.what());
    ++num_failed;
  }
  const auto cases = tokenspeed::control::cases();
  for (const auto& test : cases) {
    try {
      tokenspeed::control::run(test);
    } catch (const std::exception& error) {
      std::printf("FAILED allocations, %s: %s\n", test.name, error.what());
      ++num_failed;
    }
  }
  std::printf("%zu cases without an allocation, %d failed\n", cases.size(), num_failed);
  return num_failed == 0 ? 0 : 1;
}
