// SPDX-License-Identifier: Apache-2.0
// Traps of the cache: what is published, what matches, what goes first, what it costs.
#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <time.h>
#include <tuple>
#include <utility>
#include <vector>

#include "traps.h"

namespace tokenspeed::control::testing {
namespace {

// All kinds of groups, with pages of different size.
std::vector<GroupSpec> hybrid(std::int64_t scale = 1, std::int64_t host_blocks = 0) {
  return {full(16, 256 * scale, host_blocks), full(32, 128 * scale, host_blocks),
          window(48, 16, 128 * scale, host_blocks), state(32, 64 * scale, host_blocks)};
}

// A turn of the session that has ended and is held; gives the history after it.
std::vector<std::int32_t> turn(Harness& harness, std::int32_t index, const std::vector<std::int32_t>& prompt,
                               const std::string& session, RequestKey& key) {
  key = harness.submit(index, prompt, 3, [&](Submit& submit) {
    submit.retain = Retention{.session = session, .ttl_ms = 1'000'000, .priority = 0};
  });
  harness.run();
  EXPECT(harness.known(key).finish == FinishCode::kLength);
  return joined(prompt, harness.known(key).generated);
}

void trap_09_superseded_snapshots_do_not_pile_up_over_turns() {
  // The states of one turn fit many times over, those of all turns do not.
  Harness harness(config_of({full(16, 512), state(16, 24)}));
  RequestKey key;
  const RequestKey other = harness.submit(0, ids(9000, 100), 1);
  harness.run();
  std::vector<std::int32_t> history = ids(100, 40);
  for (std::int32_t index = 0; index < 40; ++index) {
    history = turn(harness, 1, history, "session", key);
    EXPECT(index == 0 || harness.known(key).cached_len >= static_cast<std::int64_t>(history.size()) - 3 - 20 - 16 - 16,
           index, harness.known(key).cached_len, history.size());
    history = joined(history, ids(20'000 + 100 * index, 20));
    EXPECT(harness.stats().num_held == 1);
    // A held session keeps the one state that its next turn resumes from.
    EXPECT(harness.partition().groups().recurrent.front().device().num_used() <= Blocks(2), index,
           harness.partition().groups().recurrent.front().device().num_used());
  }
  // Another's only snapshot was used longer ago than all of these, and has not been pushed out by them.
  EXPECT(harness.known(other).finish == FinishCode::kLength);
  const RequestKey again = harness.submit(0, ids(9000, 100), 1);
  harness.run();
  EXPECT(harness.known(again).cached_len == 96, harness.known(again).cached_len);
}

void trap_10_exact_fit_pools_and_page_boundary_prompts() {
  for (const std::size_t depth : {0U, 1U}) {
    for (const std::int64_t blocks : {1, 2, 3, 5}) {
      for (const std::int64_t less : {0, 1, 2, 15, 16, 17}) {
        const std::int64_t len = 16 * blocks - less;
        if (len < 1) {
          continue;
        }
        Harness harness(config_of({full(16, blocks)}));
        harness.depth = depth;
        for (int round = 0; round < 3; ++round) {
          const RequestKey key = harness.submit(round, ids(100, len), 1000);
          harness.run();
          // K/V of all but the last token are in the pool.
          EXPECT(harness.known(key).generated.size() == static_cast<std::size_t>(16 * blocks + 1 - len), blocks, len,
                 harness.known(key).generated.size());
        }
        harness.expect_idle();
      }
      Harness harness(config_of({full(16, blocks)}));
      const RequestKey key = harness.submit(0, ids(100, 16 * blocks + 1), 1);
      harness.apply();
      EXPECT(harness.refusals().size() == 1 && harness.refusals().front().key == key);
      EXPECT(harness.refusals().front().needed > harness.refusals().front().capacity);
    }
  }
}

void trap_10_exact_fit_in_bounded_groups() {
  for (const std::int64_t blocks : {4, 6, 8, 12, 40}) {
    Harness harness(config_of({window(32, 16, blocks), state(32, blocks)}));
    std::size_t num_submitted = 0;
    for (const std::int64_t len : {1, 31, 32, 33, 47, 63, 64, 65}) {
      (void)harness.submit(static_cast<std::int32_t>(num_submitted++), ids(100, len), 40);
    }
    harness.run();
    EXPECT(harness.finished().size() + harness.refusals().size() == num_submitted && !harness.finished().empty(),
           blocks, harness.finished().size(), harness.refusals().size());
    harness.expect_idle();
  }
}

void trap_11_a_full_prompt_hit_still_computes_a_token_in_a_page_of_its_own() {
  for (const auto& groups : {std::vector<GroupSpec>{full(16, 64)}, hybrid()}) {
    const std::int64_t unit = groups.size() == 1 ? 16 : 32;
    for (const std::size_t depth : {0U, 1U}) {
      Harness harness(config_of(groups));
      harness.depth = depth;
      const RequestKey first = harness.submit(0, ids(100, 128), 4);
      harness.run();
      // Two at once: both share what is cached, and neither writes to it.
      const RequestKey second = harness.submit(1, ids(100, 128), 4);
      const RequestKey third = harness.submit(2, ids(100, 128), 4);
      harness.run();
      for (const RequestKey& key : {second, third}) {
        EXPECT(harness.known(key).cached_len == 128 - unit, harness.known(key).cached_len);
        EXPECT(harness.known(key).num_computed == unit + 3, harness.known(key).num_computed);
        EXPECT(harness.known(key).generated == harness.known(first).generated);
      }
      harness.expect_idle();
    }
  }
}

// Each group loses other pages; where a prompt resumes, all of them have what the next token reads.
void trap_12_all_groups_can_resume_at_the_matched_boundary() {
  for (std::size_t scarce = 0; scarce < 4; ++scarce) {
    std::vector<GroupSpec> groups = hybrid();
    groups[scarce].num_blocks = Blocks(groups[scarce].block_size == Tokens(32) ? 14 : 26);
    Harness harness(config_of(groups));
    std::int64_t num_resumed = 0;
    for (std::int32_t round = 0; round < 24; ++round) {
      // Prompts that share more or less of one another, so that eviction leaves gaps.
      const std::int32_t first = 1000 * (round * 7 % 3);
      const RequestKey key = harness.submit(0, joined(ids(first, 64 + 32 * (round % 4)), ids(50'000 + round, 70)), 2);
      harness.run();
      EXPECT(harness.known(key).finish == FinishCode::kLength && harness.known(key).cached_len % 32 == 0);
      num_resumed += harness.known(key).cached_len > 0 ? 1 : 0;
    }
    EXPECT(num_resumed > 0, scarce);
    harness.expect_idle();
  }
}

void trap_14_states_are_published_on_their_boundary_only() {
  for (const std::int64_t budget : {8, 20, 40, 64, 100, 1000}) {
    for (const std::int64_t len : {31, 32, 33, 64, 65, 100, 256, 257, 300}) {
      Config config = config_of({full(16, 256), state(32, 64)});
      config.max_num_batched_tokens = budget;
      Harness harness(config);
      const RequestKey key = harness.submit(0, ids(100, len), 3);
      // Others take part of each step's tokens, so that chunks start and end where they may.
      (void)harness.submit(1, ids(5000, 37), 60);
      (void)harness.submit(2, ids(7000, 211), 3);
      harness.run();
      const RequestKey again = harness.submit(3, ids(100, len), 3);
      harness.run();
      EXPECT(harness.known(again).generated == harness.known(key).generated);
      // The last boundary before the prompt's last token: reuse is not silently nothing.
      EXPECT(harness.known(again).cached_len == (len - 1) / 32 * 32, budget, len, harness.known(again).cached_len);
      harness.expect_idle();
    }
  }
}

// The harness compares the tables at every call; here they see growth, expiry, snapshots, drafts and preemption.
void trap_19_tables_made_from_deltas_equal_the_planes() {
  for (const std::size_t depth : {0U, 1U}) {
    Config config = config_of({full(16, 40), window(32, 16, 60)});
    Harness harness(config);
    harness.depth = depth;
    harness.accepts = [](std::int32_t drafts) { return 1 + drafts / 2; };
    for (std::int32_t index = 0; index < 12; ++index) {
      (void)harness.submit(index, ids(100 * index, 20 + 9 * index), 60,
                           [&](Submit& submit) { submit.draft_width = index % 4; });
    }
    bool seen_hole = false;
    harness.run_until([&] {
      const PlanCopy* plan = harness.step();
      for (const auto& row : plan == nullptr ? Rows<4>() : plan->page_delta) {
        // Page 0 is the null page: what is padded or expired points at it, and nobody ever gets it.
        seen_hole = seen_hole || row[3] == 0;
        EXPECT(row[3] >= 0 && (row[3] != 0 || row[1] == 1), row[1], row[3]);
      }
      return !harness.plane().has_work();
    });
    harness.run();
    EXPECT(seen_hole && harness.stats().num_preemptions > 0 && harness.finished().size() == 12);
    harness.expect_idle();
  }
}

double thread_us() {
  timespec now{};
  EXPECT(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now) == 0);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

// Least time of a step that plans one decode row; the least is no matter of luck.
double least_step_us(std::int64_t context, std::int64_t blocks) {
  Config config = config_of({full(16, blocks), window(64, 16, blocks), state(64, blocks)});
  config.max_num_batched_tokens = 4096;
  config.max_model_len = 100'000;
  Scheduler plane(config);
  Submit submit;
  submit.key = RequestKey{.index = 0, .generation = 0};
  submit.token_ids = ids(0, context);
  submit.max_new_tokens = Tokens(1000);
  plane.enqueue(std::move(submit));
  (void)plane.apply();
  double least = 1e9;
  std::size_t num_deltas = 0;
  const std::array<std::int32_t, 2> none{0, 0};
  const std::array<std::int32_t, 2> one{0, 1};
  const std::array<std::int32_t, 1> token{7};
  const std::array<std::int32_t, 1> fault{0};
  for (std::int64_t step = 0; step < context / 2048 + 400; ++step) {
    const double start = thread_us();
    const StepPlan* plan = plane.next_plan();
    const bool samples = plan->rows.row(0)[1] != 0;
    const bool decodes = plan->rows.row(0)[1] == 2;
    num_deltas += decodes ? plan->page_delta.num_rows() : 0;
    plane.advance(StepResult{.step_id = plan->step_id,
                             .accepted_offsets = samples ? std::span(one) : std::span(none),
                             .token_ids = samples ? std::span(token) : std::span<const std::int32_t>(),
                             .row_faults = fault});
    least = decodes ? std::min(least, thread_us() - start) : least;
    (void)plane.take_events();
  }
  // What does not change is not said: about a page in each group every 16 and 64 tokens, and as many that expire.
  EXPECT(num_deltas <= 100, num_deltas);
  return least;
}

void trap_22_plan_time_follows_changes() {
  const double small = least_step_us(200, 5000);
  const double large = least_step_us(60'000, 5000);
  const double roomy = least_step_us(200, 200'000);
  EXPECT(large < 5 * small + 2 && roomy < 5 * small + 2, small, large, roomy);
}

// A copy of the index that a router would keep.
class Replay {
 public:
  void take(Scheduler& plane) {
    const KvEvents& events = plane.take_kv_events();
    std::size_t num_tokens = 0;
    for (std::size_t row = 0; row < events.rows.size(); row += KvEvents::kWidth) {
      const auto* field = &events.rows[row];
      const Key key(field[1], field[2], field[3], field[4]);
      num_tokens += static_cast<std::size_t>(field[7]);
      if (field[0] == static_cast<std::int64_t>(KvEventKind::kStored)) {
        EXPECT(blocks_.emplace(key, num_tokens).second, "stored twice");
      } else {
        EXPECT(blocks_.erase(key) == 1, "removed what is not there");
      }
    }
    EXPECT(num_tokens == events.token_ids.size());
  }

  // The same blocks as the plane's indices, no more and no fewer.
  void expect_equal(const Scheduler& plane) const {
    std::size_t count = 0;
    for (const Partition& partition : plane.partitions()) {
      partition.each_group([&](const auto& group) {
        count += group.index().size() + group.host_index().size();
        for (const auto& [key, unused] : blocks_) {
          const auto& [tier, number, high, low] = key;
          const BlockHash hash{.high = std::bit_cast<std::uint64_t>(high), .low = std::bit_cast<std::uint64_t>(low)};
          if (number == group.number()) {
            EXPECT(tier == 0 ? group.index().find(hash).has_value() : group.host_index().find(hash).has_value());
          }
        }
      });
    }
    EXPECT(count == blocks_.size(), count, blocks_.size());
  }
  [[nodiscard]] std::size_t size() const { return blocks_.size(); }

 private:
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
  std::map<Key, std::size_t> blocks_;
};

void trap_23_kv_events_replay_to_the_exact_index() {
  for (const HostStore host_store : {HostStore::kOnSeal, HostStore::kOnPressure}) {
    Config config = config_of({full(16, 40, 30), window(48, 16, 60, 10), state(32, 20, 8)});
    config.kv_events = true;
    config.host_store = host_store;
    config.num_partitions = 2;
    Harness harness(config);
    harness.depth = 1;
    Replay replay;
    for (std::int32_t round = 0; round < 30; ++round) {
      (void)harness.submit(round % 4, ids(1000 * (round * 5 % 7), 40 + 11 * (round % 9)), 10);
      harness.run_until([&] {
        (void)harness.step();
        replay.take(harness.plane());
        replay.expect_equal(harness.plane());
        return harness.stats().num_waiting + harness.stats().num_running < 3;
      });
      harness.acks = round % 3 != 0;
      if (!harness.acks && !harness.leases().empty()) {
        harness.acknowledge(harness.leases().front(), false);
      }
      harness.run_until([&] {
        (void)harness.step();
        harness.acks = true;
        return !harness.plane().has_work();
      });
    }
    harness.run();
    replay.take(harness.plane());
    replay.expect_equal(harness.plane());
    EXPECT(replay.size() > 40, replay.size());
  }
}

constexpr std::array kTests{
    Test{.name = "trap_09_superseded_snapshots_do_not_pile_up_over_turns",
         .run = trap_09_superseded_snapshots_do_not_pile_up_over_turns},
    Test{.name = "trap_10_exact_fit_pools_and_page_boundary_prompts",
         .run = trap_10_exact_fit_pools_and_page_boundary_prompts},
    Test{.name = "trap_10_exact_fit_in_bounded_groups", .run = trap_10_exact_fit_in_bounded_groups},
    Test{.name = "trap_11_a_full_prompt_hit_still_computes_a_token_in_a_page_of_its_own",
         .run = trap_11_a_full_prompt_hit_still_computes_a_token_in_a_page_of_its_own},
    Test{.name = "trap_12_all_groups_can_resume_at_the_matched_boundary",
         .run = trap_12_all_groups_can_resume_at_the_matched_boundary},
    Test{.name = "trap_14_states_are_published_on_their_boundary_only",
         .run = trap_14_states_are_published_on_their_boundary_only},
    Test{.name = "trap_19_tables_made_from_deltas_equal_the_planes",
         .run = trap_19_tables_made_from_deltas_equal_the_planes},
    Test{.name = "trap_22_plan_time_follows_changes", .run = trap_22_plan_time_follows_changes},
    Test{.name = "trap_23_kv_events_replay_to_the_exact_index", .run = trap_23_kv_events_replay_to_the_exact_index},
};

}  // namespace

std::span<const Test> cache_traps() { return kTests; }

}  // namespace tokenspeed::control::testing
