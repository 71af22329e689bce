// SPDX-License-Identifier: Apache-2.0
// Traps of handles, ends and races.
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "ledger.h"
#include "traps.h"

namespace tokenspeed::control::testing {
namespace {

constexpr std::int32_t kEnd = 1;

using Reach = std::function<RequestKey(Harness&)>;

Config small() {
  Config config = config_of({full(16, 24, 48)});
  config.max_model_len = 300;
  return config;
}

RequestKey retained(Harness& harness, std::int32_t index, std::vector<std::int32_t> token_ids, std::int64_t max_new) {
  return harness.submit(index, std::move(token_ids), max_new, [](Submit& submit) {
    submit.retain = Retention{.session = "session", .ttl_ms = 1000, .priority = 0};
    submit.end_token_ids = {kEnd};
  });
}

// A prefix of the first request, evicted from the device, comes back from the host for the second.
RequestKey reach_loading(Harness& harness) {
  (void)harness.submit(8, ids(100, 128), 1);
  harness.run();
  (void)harness.submit(9, ids(1000, 290), 1);
  harness.run();
  while (harness.step() != nullptr) {
  }
  harness.acks = false;
  const RequestKey key = harness.submit(0, ids(100, 150), 20);
  (void)harness.plan();
  return key;
}

RequestKey reach(Harness& harness, const std::string& state, const RequestKey& key) {
  harness.run_until([&] { return harness.state_of(key) == state; });
  return key;
}

RequestKey reach_preempted(Harness& harness) {
  (void)harness.submit(8, ids(100, 150), 100);
  return reach(harness, "Preempted", harness.submit(0, ids(500, 150), 100));
}

RequestKey reach_sending(Harness& harness) {
  harness.acks = false;
  return reach(harness, "SendingKv",
               harness.submit(0, ids(100, 100), 1, [](Submit& submit) { submit.remote = Remote::kSend; }));
}

// Every state that a sequence can be in, and for each how to get there.
std::map<std::string, Reach> every_state() {
  std::map<std::string, Reach> all;
  all["Queued"] = [](Harness& harness) { return harness.submit(0, ids(100, 150), 20); };
  all["AwaitingTransfer"] = reach_loading;
  all["Prefilling"] = [](Harness& harness) {
    return reach(harness, "Prefilling", harness.submit(0, ids(100, 150), 20));
  };
  all["Decoding"] = [](Harness& harness) { return reach(harness, "Decoding", harness.submit(0, ids(100, 150), 20)); };
  all["Held"] = [](Harness& harness) { return reach(harness, "Held", retained(harness, 0, ids(100, 150), 2)); };
  all["Preempted"] = reach_preempted;
  all["SendingKv"] = reach_sending;
  return all;
}

void trap_01_move_assign_over_a_live_handle() {
  using Pool = BlockPool<tier::Device, kind::FullAttention>;
  Pool pool(Blocks(3));
  auto first = pool.take_free();
  auto second = pool.take_free();
  EXPECT(throws([&] { first = std::move(second); }));
  EXPECT(first.page().value() == 1 && second.page().value() == 2);  // NOLINT(bugprone-use-after-move)
  pool.release(std::move(first));
  first = std::move(second);
  EXPECT(first.page().value() == 2 && throws([&] { (void)second.page(); }));  // NOLINT(bugprone-use-after-move)
  pool.release(std::move(first));
  SeatPool seats(Seat(0), 2);
  SeatHold seat = seats.take();
  SeatHold other = seats.take();
  EXPECT(throws([&] { seat = std::move(other); }));
  StepLedger ledger(2);
  Lease lease = ledger.lease(Seat(0));
  Lease more = ledger.lease(Seat(1));
  EXPECT(throws([&] { lease = std::move(more); }));
  ledger.retire(std::move(lease));
  ledger.retire(std::move(more));  // NOLINT(bugprone-use-after-move)
  seats.release(std::move(seat), ledger.retirement(Seat(0)));
  seats.release(std::move(other), ledger.retirement(Seat(1)));  // NOLINT(bugprone-use-after-move)
  EXPECT(pool.num_free() == Blocks(3) && seats.num_free() == 2);
}

// The prefix that a request shares stays pinned through every move of its state, with steps in flight and without.
void trap_02_a_pin_dropped_on_a_transition() {
  Harness harness(config_of({full(16, 16)}));
  harness.depth = 1;
  (void)harness.submit(9, ids(100, 65), 1);
  harness.run();
  const auto num_shared = [&] { return harness.partition().groups().full.front().device().num_shared(); };
  EXPECT(num_shared() == Blocks(0));
  const RequestKey key = retained(harness, 0, ids(100, 200), 20);
  harness.forced[0][3] = kEnd;
  bool seen_draining = false;
  while (harness.state_of(key) != "Held") {
    (void)harness.step();
    seen_draining = seen_draining || harness.state_of(key) == "Draining";
    EXPECT(num_shared() >= Blocks(4), harness.state_of(key), num_shared());
  }
  EXPECT(seen_draining && num_shared() == Blocks(12), num_shared());
  harness.enqueue(Release{.key = key});
  harness.apply();
  EXPECT(num_shared() == Blocks(0));
  harness.expect_idle();
}

void trap_03_cancel_in_every_state() {
  for (const auto& [state, reach_it] : every_state()) {
    for (const bool in_flight : {false, true}) {
      Harness harness(small());
      const RequestKey key = reach_it(harness);
      if (in_flight && (state == "Prefilling" || state == "Decoding")) {
        (void)harness.plan();
      }
      EXPECT(state == "Queued" || harness.state_of(key) == state, state, harness.state_of(key));
      const bool had_ended = harness.known(key).finish != FinishCode::kNone;
      const std::int32_t seat = harness.known(key).seat;
      harness.enqueue(Cancel{.key = key});
      harness.apply();
      const FinishCode expected = had_ended ? FinishCode::kLength : FinishCode::kCancelled;
      EXPECT(harness.known(key).finish == expected, state, static_cast<int>(harness.known(key).finish));
      // At the next plan already it has no row.
      const PlanCopy* plan = harness.plan();
      EXPECT(plan == nullptr || harness.state_of(key).empty() || !plan->has_row(seat), state);
      harness.enqueue(Cancel{.key = key});  // twice is once
      harness.acks = true;
      harness.run();
      EXPECT(harness.state_of(key).empty(), state, harness.state_of(key));
      harness.expect_idle();
    }
  }
}

void trap_03_cancel_while_draining_and_mid_transfer_frees_nothing_early() {
  Harness harness(small());
  const RequestKey loading = reach_loading(harness);
  const std::int64_t used = harness.stats().used_blocks;
  EXPECT(used == 10 && harness.leases().size() == 1, used);
  harness.enqueue(Cancel{.key = loading});
  harness.apply();
  EXPECT(harness.state_of(loading) == "Draining" && harness.stats().used_blocks == used);
  harness.enqueue(Cancel{.key = loading});
  // Nobody gets its pages, though there is no other room: the transfer may still write them.
  (void)harness.submit(1, ids(2000, 280), 2);
  for (int round = 0; round < 4; ++round) {
    (void)harness.step();
    EXPECT(harness.stats().used_blocks == used && harness.stats().num_running == 0);
  }
  harness.acks = true;
  harness.run();
  EXPECT(harness.finished().size() == 4);
  harness.expect_idle();
}

void trap_04_finish_with_the_next_step_in_flight() {
  for (const std::int64_t keep : {0, 5, 40}) {
    Harness harness(config_of({full(16, 32)}));
    harness.depth = 1;
    const RequestKey key = retained(harness, 0, ids(100, 60), 100);
    harness.run_until([&] { return harness.known(key).generated.size() >= 40; });
    (void)harness.plan();
    const auto said = harness.known(key).generated;
    harness.enqueue(Finish{.key = key, .keep_tokens = Tokens(keep)});
    harness.apply();
    EXPECT(harness.known(key).finish == FinishCode::kStop && harness.state_of(key) == "Draining");
    const std::int64_t told = harness.stats().generated_tokens;
    harness.run();
    // Neither usage nor the history has what came after.
    EXPECT(harness.known(key).generated == said && harness.stats().generated_tokens == told);
    EXPECT(harness.state_of(key) == "Held" && harness.stats().used_blocks == (60 + keep) / 16, keep,
           harness.stats().used_blocks);
    harness.enqueue(Release{.key = key});
    harness.run();
    harness.expect_idle();
  }
}

void trap_05_a_faulted_step_never_matches() {
  for (const std::size_t depth : {0U, 1U}) {
    for (const bool whole_step : {true, false}) {
      Harness harness(config_of({full(16, 64), window(32, 16, 64), state(16, 64)}));
      harness.depth = depth;
      const auto prompt = ids(100, 300);
      const RequestKey key = harness.submit(0, prompt, 5);
      (void)harness.plan();  // 0 .. 64
      (void)(depth == 0 ? harness.advance() : void());
      harness.step_fault = whole_step;
      if (!whole_step) {
        harness.faulty.insert(0);
      }
      (void)harness.plan();
      harness.step_fault = false;
      harness.run();
      EXPECT(harness.known(key).finish == FinishCode::kFault);
      harness.faulty.clear();
      const RequestKey again = harness.submit(0, prompt, 5);
      harness.run();
      EXPECT(harness.known(again).cached_len <= 64 && harness.known(again).finish == FinishCode::kLength, depth,
             whole_step, harness.known(again).cached_len);
      harness.expect_idle();
    }
  }
}

// A session does not get back what a fault may have left behind.
void trap_05_a_faulted_turn_is_not_held() {
  for (const bool whole_step : {true, false}) {
    Harness harness(config_of({full(16, 64)}));
    const RequestKey key = retained(harness, 0, ids(100, 60), 50);
    harness.run_until([&] { return harness.known(key).generated.size() == 20; });
    harness.step_fault = whole_step;
    harness.faulty.insert(0);
    (void)harness.step();
    EXPECT(harness.known(key).finish == FinishCode::kFault && harness.state_of(key).empty(), harness.state_of(key));
    harness.expect_idle();
  }
}

void trap_20_a_late_result_never_reaches_the_next_user_of_an_index() {
  Harness harness(config_of({full(16, 32)}));
  harness.depth = 1;
  const RequestKey old = harness.submit(0, ids(100, 30), 50);
  harness.run_until([&] { return harness.known(old).generated.size() >= 3; });
  (void)harness.plan();
  harness.enqueue(Cancel{.key = old});
  harness.apply();
  harness.advance();
  const RequestKey fresh = harness.submit(0, ids(500, 40), 4);
  const PlanCopy* plan = harness.plan();
  EXPECT(plan != nullptr && plan->rows.size() == 1 && plan->seated.size() == 1);
  EXPECT(harness.known(fresh).seat != harness.known(old).seat);
  harness.advance();  // of the old one
  EXPECT(harness.known(fresh).generated.empty());
  // What is said about the old key touches nobody.
  harness.enqueue(Cancel{.key = old});
  harness.enqueue(Finish{.key = old, .keep_tokens = Tokens(0)});
  harness.enqueue(Retain{.key = old, .deadline_ms = 5});
  harness.enqueue(Release{.key = old});
  harness.run();
  EXPECT(harness.known(fresh).finish == FinishCode::kLength && harness.known(fresh).generated.size() == 4);
  harness.expect_idle();
}

// A held request's index is free, its key is not: what is said about either reaches that one only.
void trap_20_a_held_request_keeps_its_key_when_its_index_is_reused() {
  Harness harness(config_of({full(16, 64)}));
  const RequestKey held = retained(harness, 0, ids(100, 60), 2);
  harness.run();
  const RequestKey fresh = harness.submit(0, ids(500, 40), 30);
  harness.run_until([&] { return harness.known(fresh).generated.size() == 3; });
  EXPECT(harness.state_of(held) == "Held" && harness.state_of(fresh) == "Decoding");
  harness.enqueue(Retain{.key = held, .deadline_ms = 5000});
  harness.enqueue(Tick{.now_ms = 4000});
  harness.apply();
  EXPECT(harness.state_of(held) == "Held" && harness.state_of(fresh) == "Decoding");
  harness.enqueue(Release{.key = held});
  harness.apply();
  EXPECT(harness.state_of(held).empty() && harness.state_of(fresh) == "Decoding");
  harness.enqueue(Cancel{.key = fresh});
  harness.run();
  EXPECT(harness.known(fresh).finish == FinishCode::kCancelled);
  harness.expect_idle();
}

enum class When : std::uint8_t { kBeforeTheEnd, kWhileItDrains, kWhenHeld };

// A turn that ends by itself with a step in flight and is held then, and what is said about it at one of three moments.
RequestKey race(Harness& harness, When when, const std::function<void(const RequestKey&)>& tell) {
  harness.depth = 1;
  const RequestKey key = retained(harness, 0, ids(100, 60), 20);
  harness.forced[0][4] = kEnd;
  harness.run_until([&] { return harness.known(key).generated.size() == 3; });
  if (when == When::kBeforeTheEnd) {
    tell(key);
  }
  harness.run_until([&] { return harness.known(key).finish != FinishCode::kNone; });
  if (when == When::kWhileItDrains) {
    EXPECT(harness.state_of(key) == "Draining", harness.state_of(key));
    tell(key);
  }
  harness.run();
  if (when == When::kWhenHeld) {
    EXPECT(harness.state_of(key) == "Held", harness.state_of(key));
    tell(key);
    harness.apply();
  }
  return key;
}

constexpr std::array kWhens{When::kBeforeTheEnd, When::kWhileItDrains, When::kWhenHeld};

Harness held_harness() { return Harness(config_of({full(16, 32)})); }

void trap_24_release_racing_with_the_end() {
  for (const When when : kWhens) {
    Harness harness = held_harness();
    const RequestKey key = race(harness, when, [&](const RequestKey& told) { harness.enqueue(Release{.key = told}); });
    EXPECT(harness.state_of(key).empty() && harness.stats().num_held == 0, static_cast<int>(when));
    harness.expect_idle();
  }
}

void trap_24_retain_racing_with_the_end() {
  for (const When when : kWhens) {
    Harness harness = held_harness();
    const RequestKey key =
        race(harness, when, [&](const RequestKey& told) { harness.enqueue(Retain{.key = told, .deadline_ms = 5000}); });
    for (const std::int64_t now_ms : {1000, 4999, 5000}) {
      harness.enqueue(Tick{.now_ms = now_ms});
      harness.apply();
      EXPECT((harness.state_of(key) == "Held") == (now_ms < 5000), static_cast<int>(when), now_ms);
    }
    harness.enqueue(Retain{.key = key, .deadline_ms = 9000});  // too late
    harness.apply();
    harness.expect_idle();
  }
}

void trap_24_finish_racing_with_the_end() {
  for (const When when : kWhens) {
    Harness harness = held_harness();
    const RequestKey key = race(
        harness, when, [&](const RequestKey& told) { harness.enqueue(Finish{.key = told, .keep_tokens = Tokens(1)}); });
    EXPECT(harness.state_of(key) == "Held" && harness.stats().used_blocks >= 3, static_cast<int>(when));
    harness.enqueue(Release{.key = key});
    harness.apply();
    harness.expect_idle();
  }
}

// Both in one batch, in both orders: the last word counts, and a release is the last word.
void trap_24_release_and_retain_in_one_batch() {
  for (const When when : kWhens) {
    for (const bool release_first : {true, false}) {
      Harness harness = held_harness();
      const RequestKey key = race(harness, when, [&](const RequestKey& told) {
        if (release_first) {
          harness.enqueue(Release{.key = told});
        }
        harness.enqueue(Retain{.key = told, .deadline_ms = 5000});
        if (!release_first) {
          harness.enqueue(Release{.key = told});
        }
      });
      EXPECT(harness.state_of(key).empty(), static_cast<int>(when), release_first);
      harness.expect_idle();
    }
  }
}

// Whoever says Finish a second time may not know of the first, nor of any other end; no innocent event of its batch is
// lost for it.
void trap_24_a_later_finish_may_keep_more() {
  for (const bool cancelled : {false, true}) {
    Harness harness(config_of({full(16, 64)}));
    harness.depth = 1;
    const RequestKey key = retained(harness, 0, ids(100, 60), 50);
    harness.run_until([&] { return harness.known(key).generated.size() >= 40; });
    (void)harness.plan();
    if (cancelled) {
      harness.enqueue(Cancel{.key = key});
    } else {
      harness.enqueue(Finish{.key = key, .keep_tokens = Tokens(3)});
    }
    harness.apply();
    EXPECT(harness.state_of(key) == "Draining");
    for (const std::int64_t keep : {5, 1000}) {
      harness.enqueue(Finish{.key = key, .keep_tokens = Tokens(keep)});
    }
    const RequestKey innocent = harness.submit(1, ids(2000, 20), 2);
    harness.run();
    EXPECT(harness.known(innocent).finish == FinishCode::kLength);
    EXPECT(harness.state_of(key) == (cancelled ? "" : "Held"), harness.state_of(key));
    EXPECT(harness.stats().used_blocks == (cancelled ? 0 : (60 + 3) / 16), harness.stats().used_blocks);
    harness.enqueue(Release{.key = key});
    harness.run();
    harness.expect_idle();
  }
}

// A timer that is set anew or whose request is gone does not stay for ever.
void trap_24_timers_do_not_pile_up() {
  constexpr std::int64_t kFar = 1'000'000'000;
  constexpr std::size_t kMost = 80;  // of two requests
  Harness harness(config_of({full(16, 64)}));
  const RequestKey held = retained(harness, 0, ids(100, 60), 2);
  harness.run();
  for (std::int64_t round = 0; round < 2000; ++round) {
    harness.enqueue(Retain{.key = held, .deadline_ms = kFar + round % 2});
    const RequestKey key = harness.submit(1, ids(500, 9), 2, [&](Submit& submit) { submit.deadline_ms = kFar; });
    harness.apply();
    harness.enqueue(Cancel{.key = key});
    harness.apply();
    EXPECT(harness.plane().num_timers() < kMost, round, harness.plane().num_timers());
  }
  const RequestKey late = harness.submit(1, ids(500, 9), 9, [&](Submit& submit) { submit.deadline_ms = kFar; });
  harness.enqueue(Tick{.now_ms = kFar - 1});
  harness.apply();
  EXPECT(harness.state_of(held) == "Held" && harness.state_of(late) == "Queued");
  harness.enqueue(Tick{.now_ms = kFar});
  harness.apply();
  EXPECT(harness.state_of(held) == "Held" && harness.known(late).finish == FinishCode::kDeadline);
  harness.enqueue(Tick{.now_ms = kFar + 1});
  harness.apply();
  EXPECT(harness.state_of(held).empty() && harness.plane().num_timers() == 0, harness.plane().num_timers());
  harness.expect_idle();
}

// A time to live that the clock cannot hold is one without an end.
void trap_24_a_hold_without_an_end_stays() {
  constexpr std::int64_t kLast = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t ttl : {kLast, kLast - 5000}) {
    Harness harness(config_of({full(16, 64)}));
    harness.enqueue(Tick{.now_ms = 5000});
    const RequestKey key = harness.submit(0, ids(100, 60), 2, [&](Submit& submit) {
      submit.retain = Retention{.session = "s", .ttl_ms = ttl, .priority = 0};
    });
    harness.run();
    for (const std::int64_t now : {std::int64_t{5001}, kLast - 1}) {
      harness.enqueue(Tick{.now_ms = now});
      harness.apply();
      EXPECT(harness.state_of(key) == "Held", ttl, now);
    }
    harness.enqueue(Tick{.now_ms = kLast});
    harness.apply();
    EXPECT(harness.state_of(key).empty(), ttl);
    harness.expect_idle();
  }
}

constexpr std::array kTests{
    Test{.name = "trap_01_move_assign_over_a_live_handle", .run = trap_01_move_assign_over_a_live_handle},
    Test{.name = "trap_02_a_pin_dropped_on_a_transition", .run = trap_02_a_pin_dropped_on_a_transition},
    Test{.name = "trap_03_cancel_in_every_state", .run = trap_03_cancel_in_every_state},
    Test{.name = "trap_03_cancel_while_draining_and_mid_transfer_frees_nothing_early",
         .run = trap_03_cancel_while_draining_and_mid_transfer_frees_nothing_early},
    Test{.name = "trap_04_finish_with_the_next_step_in_flight", .run = trap_04_finish_with_the_next_step_in_flight},
    Test{.name = "trap_05_a_faulted_step_never_matches", .run = trap_05_a_faulted_step_never_matches},
    Test{.name = "trap_05_a_faulted_turn_is_not_held", .run = trap_05_a_faulted_turn_is_not_held},
    Test{.name = "trap_20_a_late_result_never_reaches_the_next_user_of_an_index",
         .run = trap_20_a_late_result_never_reaches_the_next_user_of_an_index},
    Test{.name = "trap_20_a_held_request_keeps_its_key_when_its_index_is_reused",
         .run = trap_20_a_held_request_keeps_its_key_when_its_index_is_reused},
    Test{.name = "trap_24_release_racing_with_the_end", .run = trap_24_release_racing_with_the_end},
    Test{.name = "trap_24_retain_racing_with_the_end", .run = trap_24_retain_racing_with_the_end},
    Test{.name = "trap_24_finish_racing_with_the_end", .run = trap_24_finish_racing_with_the_end},
    Test{.name = "trap_24_release_and_retain_in_one_batch", .run = trap_24_release_and_retain_in_one_batch},
    Test{.name = "trap_24_a_later_finish_may_keep_more", .run = trap_24_a_later_finish_may_keep_more},
    Test{.name = "trap_24_timers_do_not_pile_up", .run = trap_24_timers_do_not_pile_up},
    Test{.name = "trap_24_a_hold_without_an_end_stays", .run = trap_24_a_hold_without_an_end_stays},
};

}  // namespace

std::span<const Test> lifecycle_traps() { return kTests; }

}  // namespace tokenspeed::control::testing
