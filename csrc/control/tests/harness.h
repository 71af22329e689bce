// SPDX-License-Identifier: Apache-2.0
// Drives a scheduler by hand: submits, steps on a scripted device, acknowledgements. The device keeps page tables made
// from deltas only and knows which history every cell of every page was written with, so reading what is not there yet,
// or not there any more, fails at once; so does a write to what somebody else may read.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "event.h"
#include "scheduler.h"

#define EXPECT(...) TS_CHECK(__VA_ARGS__)

namespace tokenspeed::control::testing {

struct Test {
  const char* name;
  void (*run)();
};

// Whether it is a CheckError that ends the function.
template <class Function>
bool throws(Function&& function) {
  try {
    std::forward<Function>(function)();
  } catch (const CheckError&) {
    return true;
  }
  return false;
}

// Spreads every input bit over the output.
[[nodiscard]] constexpr std::uint64_t scramble(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31U);
}

[[nodiscard]] GroupSpec full(std::int64_t block_size, std::int64_t blocks, std::int64_t host_blocks = 0);
[[nodiscard]] GroupSpec window(std::int64_t size, std::int64_t block_size, std::int64_t blocks,
                               std::int64_t host_blocks = 0);
[[nodiscard]] GroupSpec state(std::int64_t block_size, std::int64_t blocks, std::int64_t host_blocks = 0);
// Eight seats, 64 tokens a step, 4096 tokens a sequence.
[[nodiscard]] Config config_of(std::vector<GroupSpec> groups);
// first, first + 1, ...
[[nodiscard]] std::vector<std::int32_t> ids(std::int32_t first, std::int64_t count);
[[nodiscard]] std::vector<std::int32_t> joined(std::vector<std::int32_t> front, const std::vector<std::int32_t>& back);

// A plan's arrays as vectors.
template <std::size_t Width>
using Rows = std::vector<std::array<std::int32_t, Width>>;

struct PlanCopy {
  Rows<5> rows;
  Rows<3> seated;
  Rows<4> page_delta;
  Rows<4> load;
  Rows<4> store;

  [[nodiscard]] bool has_row(std::int32_t seat) const;
};

// What is known of a request from outside.
struct Known {
  Submit submit;
  std::vector<std::int32_t> generated;
  FinishCode finish = FinishCode::kNone;
  std::int64_t cached_len = 0;
  std::int64_t num_computed = 0;  // tokens in rows
  std::int32_t num_seatings = 0;
  std::int32_t seat = -1;
};

using Tweak = std::function<void(Submit&)>;

class Harness {
 public:
  explicit Harness(const Config& config);

  // Settings. depth: steps planned ahead of the last result. acks: transfers are acknowledged before the next plan.
  std::size_t depth = 0;
  bool acks = true;
  bool step_fault = false;
  std::set<std::int32_t> faulty;                                       // requests (by index) whose rows fault
  std::map<std::int32_t, std::map<std::size_t, std::int32_t>> forced;  // index → nth generated token
  std::function<std::int32_t(std::int32_t)> accepts = [](std::int32_t drafts) { return 1 + drafts; };

  // The next generation of the index.
  RequestKey submit(std::int32_t index, std::vector<std::int32_t> token_ids, std::int64_t max_new,
                    const Tweak& tweak = {});
  void enqueue(Event&& event) { plane_.enqueue(std::move(event)); }
  void apply();
  // What was enqueued, then a plan that runs on the device; null where there is none.
  const PlanCopy* plan();
  // The result of the oldest step in flight.
  void advance();
  // A plan, and a result where more than `depth` are in flight then or where nothing else can be done.
  const PlanCopy* step();
  // Until no work is left; fails where that takes too long.
  void run(int most_steps = 20'000);
  void run_until(const std::function<bool()>& done, int most_steps = 20'000);

  // Leases that are not acknowledged, oldest first.
  [[nodiscard]] std::vector<LeaseId> leases() const;
  void acknowledge(LeaseId lease, bool ok = true);
  void acknowledge_all();

  [[nodiscard]] Scheduler& plane() { return plane_; }
  [[nodiscard]] Known& known(const RequestKey& key);
  [[nodiscard]] Stats stats() const { return plane_.stats(); }
  [[nodiscard]] const std::vector<RequestKey>& finished() const { return finished_; }
  [[nodiscard]] const std::vector<Refusal>& refusals() const { return refusals_; }
  // Of all plans so far, and of what transfers they asked for.
  [[nodiscard]] std::uint64_t plan_hash() const { return plan_hash_; }
  // The state of a request that exists, or "".
  [[nodiscard]] std::string state_of(const RequestKey& key) const;
  [[nodiscard]] const Partition& partition(std::size_t id = 0) const { return plane_.partitions()[id]; }
  // Pages add up, and tables made from deltas equal the plane's. Called after every call that changes anything.
  void audit() const;
  // Nothing is used, set aside, leased or on its way.
  void expect_idle() const;

 private:
  using Table = std::vector<std::int32_t>;
  struct Seated {
    RequestKey key;
    std::vector<std::int32_t> token_ids;
    std::vector<std::uint64_t> history;  // of as many tokens
    std::vector<Table> tables;           // one a group
    std::int64_t len = -1;               // tokens whose K/V is written
    bool failed = false;
  };
  struct InFlight {
    StepId step_id;
    std::vector<std::int32_t> offsets;
    std::vector<std::int32_t> token_ids;
    std::vector<std::int32_t> faults;
    bool fault = false;
    std::map<std::int32_t, std::vector<Table>> tables;  // of its rows' seats
  };
  struct Moving {
    bool is_load = false;
    Rows<4> rows;
    std::vector<std::vector<std::uint64_t>> content;  // at the time of the plan
  };
  using Cells = std::vector<std::uint64_t>;

  [[nodiscard]] std::uint64_t extend(const Submit& submit, std::uint64_t history, std::int64_t position,
                                     std::int32_t token) const;
  void say(Seated& seat, std::int32_t token) const;
  // The token that follows, as the script or the history says.
  std::int32_t sample(Seated& seat) const;
  [[nodiscard]] std::size_t group_number(std::int32_t seat, std::size_t group) const;
  [[nodiscard]] const GroupSpec& spec(std::size_t number) const;
  [[nodiscard]] Cells& device_cells(std::size_t number, std::int32_t page);
  void take_seats(const StepPlan& plan);
  void move_pages(const StepPlan& plan);
  void begin_transfers(const FlatBuffer<4>& rows, bool is_load);
  void end_transfer(const Moving& moving, bool ok);
  void fill_from_peer(std::size_t number, std::int32_t page);
  void run_rows(const StepPlan& plan);
  void run_row(std::span<const std::int32_t> row, std::span<const std::int32_t> token_ids, InFlight& result);
  void touch(std::int32_t id, Seated& seat, std::int64_t start, std::int64_t count, std::int64_t good);
  void write(std::int32_t id, std::size_t number, std::int32_t page, std::size_t cell, std::uint64_t value);
  void read(const Seated& seat, std::size_t number, std::int32_t page, std::size_t cell, std::int64_t position);
  void take_events();

  Scheduler plane_;
  std::map<std::pair<std::int32_t, std::int32_t>, Known> known_;
  std::map<std::int32_t, std::int32_t> generations_;
  std::vector<RequestKey> finished_;
  std::vector<Refusal> refusals_;
  std::map<std::int32_t, Seated> seats_;
  std::deque<InFlight> in_flight_;
  std::map<std::int32_t, Moving> moving_;  // by lease
  std::map<std::pair<std::size_t, std::int32_t>, Cells> device_;
  std::map<std::pair<std::size_t, std::int32_t>, Cells> host_;
  PlanCopy plan_;
  std::uint64_t plan_hash_ = 0;
};

}  // namespace tokenspeed::control::testing
