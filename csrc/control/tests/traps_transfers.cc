// SPDX-License-Identifier: Apache-2.0
// Traps of what moves between the device, the host and peers.
#include <algorithm>
#include <array>
#include <set>
#include <utility>
#include <vector>

#include "traps.h"

namespace tokenspeed::control::testing {
namespace {

// Eight pages on the device, more on the host.
Config tight(std::int64_t host_blocks, HostStore host_store = HostStore::kOnSeal) {
  Config config = config_of({full(16, 8, host_blocks)});
  config.max_model_len = 129;
  config.host_store = host_store;
  return config;
}

// Runs a prompt of 64 tokens, of which four pages stay.
RequestKey leave_behind(Harness& harness, std::int32_t index, std::int32_t first) {
  const RequestKey key = harness.submit(index, ids(first, 64), 1);
  harness.run();
  return key;
}

void drain_stores(Harness& harness) {
  while (harness.step() != nullptr) {
  }
}

void trap_06_eviction_spares_what_a_transfer_reads() {
  for (const bool ok : {true, false}) {
    Harness harness(tight(32, HostStore::kOnPressure));
    (void)leave_behind(harness, 0, 100);
    (void)leave_behind(harness, 1, 200);
    harness.acks = false;
    // Wants all eight pages: what is cached is copied first, and nothing goes before its copy is there.
    const RequestKey key = harness.submit(2, ids(300, 100), 20);
    const PlanCopy* plan = harness.plan();
    EXPECT(plan != nullptr && plan->rows.empty() && !plan->store.empty());
    std::set<std::int32_t> sources;
    for (const auto& row : plan->store) {
      EXPECT(sources.insert(row[2]).second, "copied twice", row[2]);
    }
    harness.advance();
    for (int round = 0; round < 3; ++round) {
      EXPECT(harness.plan() == nullptr, "took pages that are being copied");
    }
    for (const LeaseId lease : harness.leases()) {
      harness.acknowledge(lease, ok);  // the harness sees whether a source has changed
    }
    harness.acks = true;
    harness.run();
    EXPECT(harness.known(key).finish == FinishCode::kLength);
    const RequestKey again = leave_behind(harness, 3, 100);
    EXPECT(harness.known(again).cached_len == (ok ? 48 : 0), harness.known(again).cached_len);
    harness.expect_idle();
  }
}

void trap_06_the_host_keeps_what_a_load_reads() {
  Harness harness(tight(12));
  for (const std::int32_t first : {300, 400, 500}) {
    (void)leave_behind(harness, 0, first);
  }
  drain_stores(harness);
  harness.acks = false;
  // Its prefix is on the host only; while it is loaded, other pages want the host's memory.
  const RequestKey key = harness.submit(4, ids(300, 65), 4);
  const PlanCopy* plan = harness.plan();
  EXPECT(plan != nullptr && !plan->load.empty());
  const LeaseId lease(plan->load.front()[0]);
  harness.advance();
  const RequestKey other = harness.submit(5, ids(600, 20), 20);
  for (int round = 0; round < 40; ++round) {
    (void)harness.step();
    for (const LeaseId store : harness.leases()) {
      if (store != lease) {
        harness.acknowledge(store);
      }
    }
    harness.apply();
  }
  EXPECT(harness.known(other).generated.size() == 20 && harness.known(key).generated.empty());
  harness.acknowledge(lease);
  harness.acks = true;
  harness.run();
  EXPECT(harness.known(key).generated.size() == 4);
  harness.expect_idle();
}

void trap_06_duplicate_late_and_unknown_acknowledgements() {
  Harness harness(tight(32));
  for (const std::int32_t first : {100, 200, 300}) {
    (void)leave_behind(harness, 0, first);
  }
  drain_stores(harness);
  harness.acks = false;
  const RequestKey key = harness.submit(1, ids(100, 65), 4);
  const PlanCopy* plan = harness.plan();
  EXPECT(plan != nullptr && plan->load.size() == 4);
  const LeaseId lease(plan->load.front()[0]);
  harness.advance();
  const auto tell = [&](std::int64_t id, bool ok) {
    harness.enqueue(TransferDone{.lease = LeaseId(id), .ok = ok});
    harness.apply();
  };
  for (const std::int64_t unknown : {std::int64_t{0}, std::int64_t{-1}, lease.value() + 1, std::int64_t{1} << 30U}) {
    tell(unknown, true);
    EXPECT(harness.state_of(key) == "AwaitingTransfer" && harness.stats().num_transfers == 1, unknown);
  }
  harness.acknowledge(lease);
  tell(lease.value(), false);  // in one batch: the first counts
  EXPECT(harness.state_of(key) == "Prefilling" && harness.stats().loaded_tokens == 64);
  const std::int64_t used = harness.stats().used_blocks;
  tell(lease.value(), true);
  tell(lease.value(), false);
  EXPECT(harness.state_of(key) == "Prefilling" && harness.stats().used_blocks == used &&
         harness.stats().loaded_tokens == 64);
  harness.acks = true;
  harness.run();
  tell(lease.value(), false);
  EXPECT(harness.known(key).generated.size() == 4 && harness.known(key).cached_len == 64);
  harness.expect_idle();
}

void trap_06_a_failed_load_is_computed_instead_and_forgotten() {
  Harness harness(tight(32));
  for (const std::int32_t first : {100, 200, 300}) {
    (void)leave_behind(harness, 0, first);
  }
  drain_stores(harness);
  harness.acks = false;
  const RequestKey key = harness.submit(1, ids(100, 65), 4);
  const PlanCopy* plan = harness.plan();
  EXPECT(plan != nullptr && plan->load.size() == 4);
  harness.acknowledge(LeaseId(plan->load.front()[0]), false);
  harness.advance();
  const std::int64_t on_host = harness.stats().host_used_blocks;
  harness.apply();
  EXPECT(harness.stats().host_used_blocks == on_host - 4, "what could not be read is offered again");
  harness.acks = true;
  harness.run();
  EXPECT(harness.known(key).generated.size() == 4 && harness.stats().loaded_tokens == 0);
  EXPECT(harness.known(key).num_computed == 65 + 3, harness.known(key).num_computed);
  harness.expect_idle();
}

void trap_13_host_depth_is_not_device_depth() {
  // On the device are the first blocks, on the host all.
  Harness deeper(tight(64));
  const RequestKey first = deeper.submit(0, ids(100, 110), 1);
  deeper.run();
  (void)deeper.submit(1, ids(500, 60), 1);  // evicts the deepest
  deeper.run();
  drain_stores(deeper);
  const RequestKey again = deeper.submit(2, ids(100, 110), 1);
  const PlanCopy* plan = deeper.plan();
  EXPECT(plan != nullptr && !plan->load.empty() && plan->load.size() < 6);
  const std::size_t num_loaded = plan->load.size();
  deeper.run();
  EXPECT(deeper.known(again).cached_len == 96 && deeper.known(again).num_computed == 14);
  EXPECT(deeper.known(again).generated == deeper.known(first).generated);
  EXPECT(deeper.stats().loaded_tokens == static_cast<std::int64_t>(16 * num_loaded));

  // On the host are the first blocks only, on the device the rest: nothing resumes across the gap when they are gone.
  Harness gap(tight(3));
  (void)gap.submit(0, ids(100, 110), 1);
  gap.run();
  drain_stores(gap);
  (void)gap.submit(1, ids(500, 120), 1);
  gap.run();
  const RequestKey late = gap.submit(2, ids(100, 110), 1);
  gap.run();
  EXPECT(gap.known(late).cached_len <= 48 && gap.known(late).finish == FinishCode::kLength);
  gap.expect_idle();
}

void trap_17_a_remote_prefill_takes_its_whole_destination_at_once() {
  Harness harness(config_of({full(16, 12), full(32, 8)}));
  harness.acks = false;
  const RequestKey key = harness.submit(0, ids(100, 100), 20, [](Submit& submit) { submit.remote = Remote::kReceive; });
  const PlanCopy* plan = harness.plan();
  EXPECT(plan != nullptr && plan->rows.empty() && harness.state_of(key) == "AwaitingTransfer");
  EXPECT(plan->load.size() == 6 + 3 && plan->page_delta.size() == 7 + 4, plan->load.size(), plan->page_delta.size());
  for (const auto& row : plan->load) {
    EXPECT(row[3] == 0 && row[0] == plan->load.front()[0], "all from the peer, in one transfer");
  }
  harness.advance();
  EXPECT(harness.plan() == nullptr);
  harness.acks = true;
  harness.run();
  EXPECT(harness.known(key).generated.size() == 20 && harness.known(key).num_computed == 4 + 19,
         harness.known(key).num_computed);
  harness.expect_idle();
}

void trap_17_an_aborted_remote_prefill_is_fenced() {
  for (const bool ok : {true, false}) {
    Harness harness(config_of({full(16, 8)}));
    harness.acks = false;
    const RequestKey key =
        harness.submit(0, ids(100, 100), 20, [](Submit& submit) { submit.remote = Remote::kReceive; });
    const PlanCopy* plan = harness.plan();
    EXPECT(plan != nullptr && plan->load.size() == 6);
    const LeaseId lease(plan->load.front()[0]);
    harness.advance();
    harness.enqueue(Cancel{.key = key});
    const RequestKey other = harness.submit(1, ids(500, 100), 4);
    for (int round = 0; round < 5; ++round) {
      EXPECT(harness.plan() == nullptr && harness.stats().used_blocks == 7, "the peer may still write its pages");
    }
    harness.acknowledge(lease, ok);
    harness.acks = true;
    harness.run();
    EXPECT(harness.known(key).finish == FinishCode::kCancelled && harness.known(other).generated.size() == 4);
    harness.expect_idle();
  }
}

void trap_17_a_receive_that_fails_is_computed_here() {
  Harness harness(config_of({full(16, 12)}));
  harness.acks = false;
  const RequestKey key = harness.submit(0, ids(100, 100), 5, [](Submit& submit) { submit.remote = Remote::kReceive; });
  const PlanCopy* plan = harness.plan();
  EXPECT(plan != nullptr && plan->load.size() == 6);
  harness.acknowledge(LeaseId(plan->load.front()[0]), false);
  harness.advance();
  harness.acks = true;
  harness.run();
  EXPECT(harness.known(key).generated.size() == 5 && harness.known(key).num_computed == 100 + 4);
  harness.expect_idle();
}

void trap_17_what_is_sent_stays_until_the_peer_has_it() {
  for (const std::size_t depth : {0U, 1U}) {
    Harness harness(config_of({full(16, 8), window(32, 16, 40)}));
    harness.depth = depth;
    harness.acks = false;
    const RequestKey key = harness.submit(0, ids(100, 100), 50, [](Submit& submit) { submit.remote = Remote::kSend; });
    harness.run_until([&] { return !harness.leases().empty(); });
    EXPECT(harness.state_of(key) == "SendingKv" && harness.known(key).generated.size() == 1);
    const RequestKey other = harness.submit(1, ids(500, 100), 4);
    for (int round = 0; round < 5; ++round) {
      (void)harness.step();
      EXPECT(harness.known(other).num_seatings == 0 && harness.stats().used_blocks == 7);
    }
    harness.acks = true;
    harness.run();
    EXPECT(harness.known(other).generated.size() == 4);
    harness.expect_idle();
  }
}

// Hashes differ with the namespace, as with another seed; acknowledgements of a batch come in one order or another.
std::uint64_t plans_of(const std::string& name_space, bool reversed) {
  Config config = config_of({full(16, 24, 40), window(32, 16, 48, 20), state(32, 24, 12)});
  config.num_partitions = 2;
  config.max_num_seqs = 3;
  Harness harness(config);
  harness.depth = 1;
  harness.acks = false;
  std::int32_t next = 0;
  for (int round = 0; round < 400; ++round) {
    if (round % 7 == 0 && next < 40) {
      (void)harness.submit(next, ids(100 * (next * 5 % 9), 40 + 13 * (next % 8)), 12, [&](Submit& submit) {
        submit.name_space = name_space;
        submit.priority = next % 3;
        if (next % 2 == 0) {
          submit.retain = Retention{.session = std::to_string(next % 5), .ttl_ms = 500, .priority = next % 3};
        }
      });
      ++next;
    }
    std::vector<LeaseId> leases = harness.leases();
    if (round % 3 == 0) {
      if (reversed) {
        std::reverse(leases.begin(), leases.end());
      }
      for (const LeaseId lease : leases) {
        harness.acknowledge(lease, lease.value() % 5 != 0);
      }
    }
    harness.enqueue(Tick{.now_ms = 10 * round});
    (void)harness.step();
  }
  EXPECT(harness.stats().stored_blocks > 20 && harness.stats().loaded_tokens > 0, harness.stats().stored_blocks,
         harness.stats().loaded_tokens);
  return harness.plan_hash();
}

void trap_18_identical_plans_under_shuffled_acknowledgements_and_hash_seeds() {
  const std::uint64_t plans = plans_of("a", false);
  EXPECT(plans_of("a", false) == plans, "twice the same");
  EXPECT(plans_of("a", true) == plans, "acknowledgements in another order");
  for (const char* name_space : {"b", "c", "d"}) {
    EXPECT(plans_of(name_space, false) == plans, "other hashes", name_space);
  }
}

constexpr std::array kTests{
    Test{.name = "trap_06_eviction_spares_what_a_transfer_reads", .run = trap_06_eviction_spares_what_a_transfer_reads},
    Test{.name = "trap_06_the_host_keeps_what_a_load_reads", .run = trap_06_the_host_keeps_what_a_load_reads},
    Test{.name = "trap_06_duplicate_late_and_unknown_acknowledgements",
         .run = trap_06_duplicate_late_and_unknown_acknowledgements},
    Test{.name = "trap_06_a_failed_load_is_computed_instead_and_forgotten",
         .run = trap_06_a_failed_load_is_computed_instead_and_forgotten},
    Test{.name = "trap_13_host_depth_is_not_device_depth", .run = trap_13_host_depth_is_not_device_depth},
    Test{.name = "trap_17_a_remote_prefill_takes_its_whole_destination_at_once",
         .run = trap_17_a_remote_prefill_takes_its_whole_destination_at_once},
    Test{.name = "trap_17_an_aborted_remote_prefill_is_fenced", .run = trap_17_an_aborted_remote_prefill_is_fenced},
    Test{.name = "trap_17_a_receive_that_fails_is_computed_here", .run = trap_17_a_receive_that_fails_is_computed_here},
    Test{.name = "trap_17_what_is_sent_stays_until_the_peer_has_it",
         .run = trap_17_what_is_sent_stays_until_the_peer_has_it},
    Test{.name = "trap_18_identical_plans_under_shuffled_acknowledgements_and_hash_seeds",
         .run = trap_18_identical_plans_under_shuffled_acknowledgements_and_hash_seeds},
};

}  // namespace

std::span<const Test> transfer_traps() { return kTests; }

}  // namespace tokenspeed::control::testing
