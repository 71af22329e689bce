// SPDX-License-Identifier: Apache-2.0
// Traps of who comes in, who gives way, and who waits.
#include <algorithm>
#include <array>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "traps.h"

namespace tokenspeed::control::testing {
namespace {

void trap_07_admission_counts_what_is_cached_and_matched_once() {
  Harness harness(config_of({full(16, 10)}));
  (void)harness.submit(0, ids(100, 80), 1);  // leaves five pages cached
  harness.run();
  const RequestKey running = harness.submit(1, ids(500, 60), 18);  // takes four, and one more
  harness.run_until([&] { return harness.known(running).generated.size() == 2; });
  // Four cached pages match and three are wanted on top; only six are available.
  const RequestKey sharing = harness.submit(2, joined(ids(100, 64), ids(900, 40)), 4);
  harness.run_until([&] {
    (void)harness.step();
    EXPECT(harness.known(running).finish != FinishCode::kNone || harness.known(sharing).num_seatings == 0);
    return harness.known(running).finish != FinishCode::kNone;
  });
  harness.run();
  EXPECT(harness.known(sharing).cached_len == 64 && harness.stats().num_preemptions == 0,
         harness.known(sharing).cached_len, harness.stats().num_preemptions);
  harness.expect_idle();
}

// A hold whose pages somebody else shares gives nothing when it goes.
void trap_07_admission_counts_shared_pages_as_freed() {
  Harness harness(config_of({full(16, 12)}));
  (void)harness.submit(0, ids(100, 100), 1, [](Submit& submit) {
    submit.retain = Retention{.session = "parent", .ttl_ms = 1'000'000, .priority = 0};
  });
  harness.run();
  const RequestKey fork = harness.submit(1, joined(ids(100, 96), ids(900, 10)), 30);
  harness.run_until([&] { return harness.known(fork).generated.size() == 2; });
  EXPECT(harness.stats().num_held == 1 && harness.known(fork).cached_len == 96 && harness.stats().used_blocks == 7);
  // Five pages are available and eight wanted. The hold has six, but they are the fork's, too.
  const RequestKey large = harness.submit(2, ids(2000, 120), 2);
  while (harness.known(fork).finish == FinishCode::kNone) {
    (void)harness.step();
    EXPECT(harness.known(fork).finish != FinishCode::kNone || harness.known(large).num_seatings == 0);
  }
  harness.run();
  EXPECT(harness.known(large).generated.size() == 2 && harness.stats().num_preemptions == 0);
}

void trap_08_admission_leaves_a_page_to_each_that_decodes() {
  Harness harness(config_of({full(16, 12)}));
  std::vector<RequestKey> running;
  running.reserve(3);
  for (std::int32_t index = 0; index < 3; ++index) {
    running.push_back(harness.submit(index, ids(100 * index, 30), 17));
  }
  harness.run_until([&] { return harness.known(running.back()).generated.size() == 1; });
  EXPECT(harness.stats().used_blocks == 6);
  // Six pages are free and it wants four; each of the three will want one before it ends.
  const RequestKey late = harness.submit(3, ids(500, 60), 4);
  for (int round = 0; round < 5; ++round) {
    (void)harness.step();
    EXPECT(harness.known(late).num_seatings == 0, round);
  }
  harness.run();
  EXPECT(harness.stats().num_preemptions == 0 && harness.known(late).num_seatings == 1);
  harness.expect_idle();
}

// States and windows set aside all that one running sequence holds at a time, its last snapshot too.
void trap_08_admission_sets_aside_the_last_snapshot() {
  for (const std::int64_t blocks : {8, 9, 13, 16, 24}) {
    Harness harness(config_of({full(16, 400), window(32, 16, 3 * blocks), state(16, blocks)}));
    harness.depth = 1;
    for (std::int32_t index = 0; index < 16; ++index) {
      (void)harness.submit(index, ids(100 * index, 10 + 7 * index), 60);
    }
    harness.run();
    EXPECT(harness.finished().size() == 16 && harness.stats().num_preemptions == 0, blocks,
           harness.stats().num_preemptions);
    harness.expect_idle();
  }
}

// Long prompts in chunks that want more pages than there are: all end, and within the steps that their tokens take.
void trap_15_preempted_and_readmitted_in_mid_chunk_without_livelock() {
  for (const std::size_t depth : {0U, 1U}) {
    for (const std::int64_t host_blocks : {0, 64}) {
      Config config = config_of({full(16, 20, host_blocks)});
      config.max_num_batched_tokens = 24;
      Harness harness(config);
      harness.depth = depth;
      for (std::int32_t index = 0; index < 10; ++index) {
        (void)harness.submit(index, ids(1000 * index, 60 + 20 * (index % 5)), 120,
                             [&](Submit& submit) { submit.priority = index % 2; });
      }
      harness.run(12'000);
      EXPECT(harness.finished().size() == 10 && harness.stats().num_preemptions > 3, harness.stats().num_preemptions);
      bool readmitted = false;
      for (std::int32_t index = 0; index < 10; ++index) {
        const Known& request = harness.known(RequestKey{.index = index, .generation = 0});
        readmitted = readmitted || request.num_seatings > 1;
        EXPECT(request.generated.size() == 120 && request.num_seatings < 12, index, request.num_seatings);
      }
      EXPECT(readmitted);
      harness.expect_idle();
    }
  }
}

void trap_16_every_decode_gets_on_whatever_comes_beside_it() {
  for (const std::size_t depth : {0U, 1U}) {
    Config config = config_of({full(16, 600)});
    config.max_num_batched_tokens = 32;
    Harness harness(config);
    harness.depth = depth;
    std::vector<RequestKey> talking;
    for (const std::int32_t index : {900, 3, 77, 41}) {  // ids in no order
      talking.push_back(harness.submit(index, ids(index, 20), 100));
    }
    harness.run_until([&] { return harness.known(talking.back()).generated.size() == 1; });
    std::int32_t next = 100;
    for (int round = 0; round < 80; ++round) {
      if (round % 2 == 0) {
        (void)harness.submit(next, ids(10 * next, 300), 1, [](Submit& submit) { submit.priority = -5; });
        ++next;
      }
      std::vector<std::size_t> before;
      before.reserve(talking.size());
      for (const RequestKey& key : talking) {
        before.push_back(harness.known(key).generated.size());
      }
      (void)harness.step();
      for (std::size_t index = 0; index < talking.size(); ++index) {
        EXPECT(harness.known(talking[index]).generated.size() == before[index] + 1, round, talking[index]);
      }
    }
  }
}

struct StepTokens {
  std::int64_t num_decode = 0;
  std::int64_t num_prompt = 0;
};

StepTokens tokens_of(const PlanCopy* plan) {
  StepTokens tokens;
  for (const auto& row : plan == nullptr ? Rows<5>() : plan->rows) {
    (row[1] == static_cast<std::int32_t>(RowKind::kDecode) ? tokens.num_decode : tokens.num_prompt) += row[3];
  }
  return tokens;
}

// Where anybody decodes, in the prompts' partition or in another, they get what is allowed beside it, and no less. As
// soon as nobody does, they get the whole step.
void trap_16_a_step_that_decodes_has_few_prompt_tokens() {
  for (const std::size_t depth : {0U, 1U}) {
    for (const std::int32_t num_partitions : {1, 2}) {
      Config config = config_of({full(16, 600)});
      config.num_partitions = num_partitions;
      config.max_num_mixed_prefill_tokens = 10;
      Harness harness(config);
      harness.depth = depth;
      const RequestKey talking = harness.submit(0, ids(900, 20), 12);
      harness.run_until([&] { return harness.known(talking).generated.size() == 1; });
      // It goes where nobody runs, and is longer than a step.
      std::int64_t left = 250;
      const RequestKey late = harness.submit(1, ids(5000, left), 1);
      int num_mixed = 0;
      int num_alone = 0;
      while (left > 0) {
        const StepTokens tokens = tokens_of(harness.step());
        const std::int64_t allowed = tokens.num_decode > 0 ? 10 : 64;
        EXPECT(tokens.num_prompt == std::min(allowed, left), depth, num_partitions, tokens.num_decode,
               tokens.num_prompt);
        left -= tokens.num_prompt;
        ++(tokens.num_decode > 0 ? num_mixed : num_alone);
      }
      EXPECT(num_mixed >= 9 && num_alone >= 2, num_mixed, num_alone);
      EXPECT(harness.known(late).seat / config.max_num_seqs == num_partitions - 1, harness.known(late).seat);
      harness.run();
      harness.expect_idle();
    }
  }
}

// What is bounded is the prompts' tokens, not those of the step: more decodes than that leave them as many.
void trap_16_no_number_of_decodes_stalls_a_prompt() {
  for (const std::size_t depth : {0U, 1U}) {
    Config config = config_of({full(16, 600)});
    config.max_num_mixed_prefill_tokens = 3;
    Harness harness(config);
    harness.depth = depth;
    for (std::int32_t index = 0; index < 7; ++index) {
      (void)harness.submit(index, ids(100 * index, 9), 100);
    }
    harness.run_until([&] { return harness.known({.index = 6, .generation = 0}).generated.size() == 1; });
    const RequestKey late = harness.submit(7, ids(5000, 30), 1);
    for (int round = 0; round < 10; ++round) {
      const StepTokens tokens = tokens_of(harness.step());
      EXPECT(tokens.num_decode == 7 && tokens.num_prompt == 3, round, tokens.num_decode, tokens.num_prompt);
    }
    harness.run();
    EXPECT(harness.known(late).generated.size() == 1);
    harness.expect_idle();
  }
}

// A prompt alone goes in steps of one unit. With others behind it, seated or not, steps are larger; what the cache
// knows of those does not wait, and neither partition takes what the other will.
void trap_16_a_queue_makes_steps_that_decode_larger() {
  for (const std::int32_t num_partitions : {1, 2}) {
    Config config = config_of({full(16, 600)});
    config.num_partitions = num_partitions;
    config.mixed_step_unit = 16;
    Harness harness(config);
    const std::vector<std::int32_t> known = ids(9000, 400);
    (void)harness.submit(0, known, 1);
    harness.run();
    for (std::int32_t index = 1; index <= num_partitions; ++index) {
      const RequestKey talking = harness.submit(index, ids(900 * index, 20), 90);
      harness.run_until([&] { return harness.known(talking).generated.size() == 1; });
    }
    std::int32_t index = 50;
    const auto largest = [&](const std::vector<std::vector<std::int32_t>>& prompts) {
      for (const std::vector<std::int32_t>& prompt : prompts) {
        (void)harness.submit(index++, prompt, 1);
      }
      std::int64_t most = 0;
      while (harness.finished().empty() || harness.finished().back().index != index - 1) {
        const StepTokens tokens = tokens_of(harness.step());
        EXPECT(tokens.num_decode == num_partitions, tokens.num_decode);
        most = std::max(most, tokens.num_prompt);
      }
      return most;
    };
    EXPECT(largest({ids(5000, 150)}) == 15);
    const std::int64_t warm = largest({ids(6000, 150), joined(known, ids(1, 60))});
    EXPECT(warm == 15, num_partitions, warm);  // both go where the cache knows one of them
    const std::int64_t both = largest({ids(7000, 150), ids(8000, 360)});
    EXPECT(both == (num_partitions == 1 ? 47 : 2 * 31), num_partitions, both);
    harness.run();
    harness.expect_idle();
  }
}

void trap_16_arrival_order_holds_whatever_the_ids() {
  Config config = config_of({full(16, 8)});
  config.max_num_seqs = 2;
  Harness harness(config);
  // Others have ended in an order of their own, so that places inside are taken again in no order.
  for (std::int32_t index = 0; index < 9; ++index) {
    (void)harness.submit(index, ids(10 * index, 5), 1 + index * 5 % 9,
                         [&](Submit& submit) { submit.priority = index * 2 % 3; });
  }
  harness.run();
  std::array<std::vector<RequestKey>, 2> classes;
  for (const std::int32_t index : {50, 7, 99, 11, 23, 64, 12, 80}) {
    const std::int32_t priority = index % 2;
    classes[static_cast<std::size_t>(priority)].push_back(harness.submit(
        index, ids(1000 * index, 20 + index % 13), 12, [&](Submit& submit) { submit.priority = priority; }));
  }
  std::vector<RequestKey> order = classes[0];
  order.insert(order.end(), classes[1].begin(), classes[1].end());
  std::vector<RequestKey> seated;
  harness.run_until([&] {
    const PlanCopy* plan = harness.step();
    for (const auto& row : plan == nullptr ? Rows<3>() : plan->seated) {
      seated.push_back(RequestKey{.index = row[1], .generation = row[2]});
    }
    return !harness.plane().has_work();
  });
  EXPECT(seated == order);
  // One that is too large for now keeps its place: smaller ones that came later do not pass it for ever.
  Harness busy(config_of({full(16, 12)}));
  const RequestKey running = busy.submit(0, ids(0, 90), 40);
  busy.run_until([&] { return busy.known(running).generated.size() == 1; });
  const RequestKey large = busy.submit(1, ids(1000, 150), 2);
  for (std::int32_t index = 2; index < 8; ++index) {
    (void)busy.submit(index, ids(2000 * index, 10), 2);
  }
  busy.run();
  EXPECT(busy.finished()[1] == large, busy.finished()[1]);
}

void trap_21_pages_cover_what_drafts_of_all_steps_in_flight_may_write() {
  using Accepts = std::function<std::int32_t(std::int32_t)>;
  int turn = 0;
  const std::array<Accepts, 3> habits{[](std::int32_t) { return 1; }, [](std::int32_t drafts) { return 1 + drafts; },
                                      [&turn](std::int32_t drafts) { return 1 + (turn++ % (drafts + 1)); }};
  for (const std::size_t depth : {0U, 1U}) {
    for (const Accepts& habit : habits) {
      for (const std::int64_t blocks : {9, 64}) {
        Harness harness(config_of({full(16, blocks), window(32, 16, 4 * blocks)}));
        harness.depth = depth;
        harness.accepts = habit;
        const RequestKey plain = harness.submit(9, ids(100, 30), 60);
        harness.run();
        std::vector<RequestKey> drafting;
        for (const std::int32_t width : {1, 4, 7}) {
          drafting.push_back(
              harness.submit(width, ids(100 * width, 30), 60, [width](Submit& submit) { submit.draft_width = width; }));
        }
        const RequestKey same = harness.submit(0, ids(100, 30), 60, [](Submit& submit) { submit.draft_width = 5; });
        harness.run();
        for (const RequestKey& key : drafting) {
          EXPECT(harness.known(key).generated.size() == 60, key, harness.known(key).generated.size());
        }
        // What is guessed changes no token. (The harness sees whether pages reach.)
        EXPECT(harness.known(same).generated == harness.known(plain).generated);
        harness.expect_idle();
      }
    }
  }
}

// Rejected drafts are refunded: pages follow what is accepted, not what was once reserved.
void trap_21_rejected_drafts_are_refunded() {
  Harness harness(config_of({full(16, 64)}));
  harness.depth = 1;
  harness.accepts = [](std::int32_t) { return 1; };
  const RequestKey key = harness.submit(0, ids(100, 30), 200, [](Submit& submit) { submit.draft_width = 8; });
  harness.run_until([&] {
    (void)harness.step();
    const auto len = 30 + static_cast<std::int64_t>(harness.known(key).generated.size());
    EXPECT(harness.stats().used_blocks <= (len + 2 * 9 + 15) / 16 + 1, len, harness.stats().used_blocks);
    return harness.known(key).finish != FinishCode::kNone;
  });
  EXPECT(harness.known(key).generated.size() == 200);
  harness.run();
  harness.expect_idle();
}

void trap_25_partitions_never_share_a_page() {
  Config config = config_of({full(16, 40), window(32, 16, 60)});
  config.num_partitions = 3;
  config.max_num_seqs = 3;
  Harness harness(config);
  harness.depth = 1;
  for (std::int32_t index = 0; index < 24; ++index) {
    (void)harness.submit(index, joined(ids(100, 64), ids(1000 * index, 10)), 20,
                         [&](Submit& submit) { submit.partition_hint = index % 3; });
  }
  // Groups and seats are numbered over all partitions; a seat's pages are those of its own partition.
  std::set<std::int32_t> used;
  harness.run_until([&] {
    const PlanCopy* plan = harness.step();
    for (const auto& row : plan == nullptr ? Rows<5>() : plan->rows) {
      used.insert(row[0] / 3);
    }
    for (const auto& sequence : harness.plane().sequences()) {
      if (sequence && sequence->is_running()) {
        const std::int32_t home = sequence->grant().home().id().value();
        EXPECT(sequence->grant().seat().value() / 3 == home);
      }
    }
    return !harness.plane().has_work();
  });
  EXPECT(used.size() == 3 && harness.finished().size() == 24);
  harness.run();
  harness.expect_idle();
}

void trap_25_a_warm_partition_that_is_full_starves_nobody() {
  for (const bool by_seats : {true, false}) {
    Config config = config_of({full(16, by_seats ? 200 : 10)});
    config.num_partitions = 2;
    config.max_num_seqs = by_seats ? 1 : 8;
    Harness harness(config);
    // Warms the partition, then somebody fills it for long.
    (void)harness.submit(0, ids(100, 64), 1, [](Submit& submit) { submit.partition_hint = 1; });
    harness.run();
    const RequestKey filling = harness.submit(1, joined(ids(100, 64), ids(900, 60)), 36);
    harness.run_until([&] { return harness.known(filling).generated.size() == 1; });
    EXPECT(harness.known(filling).cached_len == 64 && harness.known(filling).seat >= config.max_num_seqs);
    const RequestKey wanting = harness.submit(2, joined(ids(100, 64), ids(700, 30)), 4);
    (void)harness.step();
    EXPECT(harness.known(wanting).num_seatings == 1 && harness.known(wanting).seat < config.max_num_seqs, by_seats);
    harness.run_until([&] { return harness.known(wanting).finish != FinishCode::kNone; });
    EXPECT(harness.known(filling).finish == FinishCode::kNone);
    harness.run();
    harness.expect_idle();
  }
}

// While a load in one partition waits for its acknowledgement, those that run in another take each other's pages.
void trap_25_a_transfer_in_one_partition_stalls_nobody_in_another() {
  Config config = config_of({full(4, 10, 40)});
  config.num_partitions = 2;
  config.max_num_seqs = 4;
  config.max_model_len = 41;
  Harness harness(config);
  const auto in = [](std::int32_t partition) {
    return [partition](Submit& submit) { submit.partition_hint = partition; };
  };
  // Both are copied to the host, and the first one leaves partition 1.
  for (const auto& prompt : {ids(100, 30), ids(500, 38)}) {
    (void)harness.submit(0, prompt, 1, in(1));
    harness.run();
    while (harness.step() != nullptr) {
    }
  }
  const RequestKey loading = harness.submit(2, ids(100, 33), 2, in(1));
  (void)harness.step();
  EXPECT(harness.state_of(loading) == "AwaitingTransfer" && harness.leases().size() == 1, harness.leases().size());
  const LeaseId load = harness.leases().front();
  harness.acks = false;
  const RequestKey first = harness.submit(3, ids(900, 5), 36, in(0));
  const RequestKey second = harness.submit(4, ids(1000, 5), 36, in(0));
  harness.run_until(
      [&] {
        for (const LeaseId lease : harness.leases()) {
          if (lease != load) {
            harness.acknowledge(lease);
          }
        }
        return harness.known(first).finish != FinishCode::kNone && harness.known(second).finish != FinishCode::kNone;
      },
      400);
  EXPECT(harness.state_of(loading) == "AwaitingTransfer" && harness.stats().num_preemptions > 0);
  EXPECT(harness.known(first).seat < 4 && harness.known(second).seat < 4);
  harness.acks = true;
  harness.run();
  harness.expect_idle();
}

constexpr std::array kTests{
    Test{.name = "trap_07_admission_counts_what_is_cached_and_matched_once",
         .run = trap_07_admission_counts_what_is_cached_and_matched_once},
    Test{.name = "trap_07_admission_counts_shared_pages_as_freed",
         .run = trap_07_admission_counts_shared_pages_as_freed},
    Test{.name = "trap_08_admission_leaves_a_page_to_each_that_decodes",
         .run = trap_08_admission_leaves_a_page_to_each_that_decodes},
    Test{.name = "trap_08_admission_sets_aside_the_last_snapshot",
         .run = trap_08_admission_sets_aside_the_last_snapshot},
    Test{.name = "trap_15_preempted_and_readmitted_in_mid_chunk_without_livelock",
         .run = trap_15_preempted_and_readmitted_in_mid_chunk_without_livelock},
    Test{.name = "trap_16_every_decode_gets_on_whatever_comes_beside_it",
         .run = trap_16_every_decode_gets_on_whatever_comes_beside_it},
    Test{.name = "trap_16_a_step_that_decodes_has_few_prompt_tokens",
         .run = trap_16_a_step_that_decodes_has_few_prompt_tokens},
    Test{.name = "trap_16_no_number_of_decodes_stalls_a_prompt", .run = trap_16_no_number_of_decodes_stalls_a_prompt},
    Test{.name = "trap_16_a_queue_makes_steps_that_decode_larger",
         .run = trap_16_a_queue_makes_steps_that_decode_larger},
    Test{.name = "trap_16_arrival_order_holds_whatever_the_ids", .run = trap_16_arrival_order_holds_whatever_the_ids},
    Test{.name = "trap_21_pages_cover_what_drafts_of_all_steps_in_flight_may_write",
         .run = trap_21_pages_cover_what_drafts_of_all_steps_in_flight_may_write},
    Test{.name = "trap_21_rejected_drafts_are_refunded", .run = trap_21_rejected_drafts_are_refunded},
    Test{.name = "trap_25_partitions_never_share_a_page", .run = trap_25_partitions_never_share_a_page},
    Test{.name = "trap_25_a_warm_partition_that_is_full_starves_nobody",
         .run = trap_25_a_warm_partition_that_is_full_starves_nobody},
    Test{.name = "trap_25_a_transfer_in_one_partition_stalls_nobody_in_another",
         .run = trap_25_a_transfer_in_one_partition_stalls_nobody_in_another},
};

}  // namespace

std::span<const Test> policy_traps() { return kTests; }

}  // namespace tokenspeed::control::testing
