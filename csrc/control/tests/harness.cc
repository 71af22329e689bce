// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <algorithm>
#include <variant>

namespace tokenspeed::control::testing {

namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

GroupSpec group(GroupKind kind, std::int64_t block_size, std::int64_t blocks, std::int64_t host_blocks) {
  return GroupSpec{.kind = kind,
                   .block_size = Tokens(block_size),
                   .num_blocks = Blocks(blocks),
                   .num_host_blocks = Blocks(host_blocks),
                   .window = Tokens(0)};
}

template <std::size_t Width>
Rows<Width> copied(const FlatBuffer<Width>& buffer) {
  Rows<Width> rows(buffer.num_rows());
  for (std::size_t index = 0; index < rows.size(); ++index) {
    std::copy_n(buffer.row(index).begin(), Width, rows[index].begin());
  }
  return rows;
}

template <std::size_t Width>
void add_to(std::uint64_t& hash, const FlatBuffer<Width>& buffer) {
  for (const std::int32_t value : buffer.values()) {
    hash = scramble(hash ^ static_cast<std::uint32_t>(value));
  }
  hash = scramble(hash ^ buffer.num_rows());
}

}  // namespace

GroupSpec full(std::int64_t block_size, std::int64_t blocks, std::int64_t host_blocks) {
  return group(GroupKind::kFull, block_size, blocks, host_blocks);
}

GroupSpec window(std::int64_t size, std::int64_t block_size, std::int64_t blocks, std::int64_t host_blocks) {
  GroupSpec spec = group(GroupKind::kWindow, block_size, blocks, host_blocks);
  spec.window = Tokens(size);
  return spec;
}

GroupSpec state(std::int64_t block_size, std::int64_t blocks, std::int64_t host_blocks) {
  return group(GroupKind::kRecurrent, block_size, blocks, host_blocks);
}

Config config_of(std::vector<GroupSpec> groups) {
  Config config;
  config.groups = std::move(groups);
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 64;
  config.max_model_len = 4096;
  config.ageing_steps = 256;
  return config;
}

std::vector<std::int32_t> ids(std::int32_t first, std::int64_t count) {
  std::vector<std::int32_t> all;
  all.reserve(at(count));
  for (std::int64_t offset = 0; offset < count; ++offset) {
    all.push_back(first + static_cast<std::int32_t>(offset));
  }
  return all;
}

std::vector<std::int32_t> joined(std::vector<std::int32_t> front, const std::vector<std::int32_t>& back) {
  front.insert(front.end(), back.begin(), back.end());
  return front;
}

bool PlanCopy::has_row(std::int32_t seat) const {
  return std::any_of(rows.begin(), rows.end(), [seat](const auto& row) { return row[0] == seat; });
}

Harness::Harness(const Config& config) : plane_(config) {}

RequestKey Harness::submit(std::int32_t index, std::vector<std::int32_t> token_ids, std::int64_t max_new,
                           const Tweak& tweak) {
  Submit event;
  const auto latest = generations_.find(index);
  event.key = RequestKey{.index = index, .generation = latest == generations_.end() ? 0 : latest->second + 1};
  event.token_ids = std::move(token_ids);
  event.max_new_tokens = Tokens(max_new);
  if (tweak) {
    tweak(event);
  }
  generations_[index] = event.key.generation;
  const RequestKey key = event.key;
  known_[{key.index, key.generation}].submit = event;
  plane_.enqueue(std::move(event));
  return key;
}

Known& Harness::known(const RequestKey& key) { return known_.at({key.index, key.generation}); }

void Harness::apply() {
  if (acks) {
    acknowledge_all();
  }
  const std::vector<Refusal> refused = plane_.apply();
  refusals_.insert(refusals_.end(), refused.begin(), refused.end());
  take_events();
  audit();
}

const PlanCopy* Harness::plan() {
  apply();
  const StepPlan* plan = plane_.next_plan();
  if (plan == nullptr) {
    audit();
    return nullptr;
  }
  add_to(plan_hash_, plan->rows);
  add_to(plan_hash_, plan->token_ids);
  add_to(plan_hash_, plan->seated);
  add_to(plan_hash_, plan->page_delta);
  add_to(plan_hash_, plan->load);
  add_to(plan_hash_, plan->store);
  plan_ = PlanCopy{.rows = copied(plan->rows),
                   .seated = copied(plan->seated),
                   .page_delta = copied(plan->page_delta),
                   .load = copied(plan->load),
                   .store = copied(plan->store)};
  take_seats(*plan);
  move_pages(*plan);
  begin_transfers(plan->store, false);
  begin_transfers(plan->load, true);
  run_rows(*plan);
  audit();
  return &plan_;
}

void Harness::advance() {
  EXPECT(!in_flight_.empty(), "no step in flight");
  const InFlight result = std::move(in_flight_.front());
  in_flight_.pop_front();
  plane_.advance(StepResult{.step_id = result.step_id,
                            .accepted_offsets = result.offsets,
                            .token_ids = result.token_ids,
                            .row_faults = result.faults,
                            .fault = result.fault});
  take_events();
  audit();
}

const PlanCopy* Harness::step() {
  if (in_flight_.size() >= kMaxStepsInFlight) {
    advance();
  }
  const PlanCopy* made = plan();
  if (in_flight_.size() > depth || (made == nullptr && !in_flight_.empty())) {
    advance();
  }
  return made;
}

void Harness::run(int most_steps) {
  apply();
  run_until([this] { return !plane_.has_work() && in_flight_.empty(); }, most_steps);
  apply();
}

void Harness::run_until(const std::function<bool()>& done, int most_steps) {
  for (int count = 0; !done(); ++count) {
    EXPECT(count < most_steps, "still", stats().num_running, "running and", stats().num_waiting, "waiting");
    (void)step();
  }
}

std::vector<LeaseId> Harness::leases() const {
  std::vector<LeaseId> all;
  all.reserve(moving_.size());
  for (const auto& [lease, moving] : moving_) {
    all.emplace_back(lease);
  }
  return all;
}

void Harness::acknowledge(LeaseId lease, bool ok) {
  const auto found = moving_.find(static_cast<std::int32_t>(lease.value()));
  EXPECT(found != moving_.end(), "lease", lease);
  end_transfer(found->second, ok);
  moving_.erase(found);
  plane_.enqueue(TransferDone{.lease = lease, .ok = ok});
}

void Harness::acknowledge_all() {
  for (const LeaseId lease : leases()) {
    acknowledge(lease);
  }
}

std::string Harness::state_of(const RequestKey& key) const {
  for (const auto& sequence : plane_.sequences()) {
    if (sequence && sequence->key() == key) {
      return std::visit([]<class S>(const S&) { return std::string(S::kName); }, sequence->state());
    }
  }
  return "";
}

void Harness::take_events() {
  const SequenceEvents& events = plane_.take_events();
  std::span<const std::int32_t> token_ids = events.token_ids;
  for (std::size_t row = 0; row < events.rows.size(); row += 5) {
    Known& request = known_.at({events.rows[row], events.rows[row + 1]});
    EXPECT(request.finish == FinishCode::kNone, "request", events.rows[row], "goes on after its end");
    const std::size_t count = at(events.rows[row + 2]);
    const auto fresh = token_ids.first(count);
    token_ids = token_ids.subspan(count);
    request.generated.insert(request.generated.end(), fresh.begin(), fresh.end());
    request.finish = static_cast<FinishCode>(events.rows[row + 3]);
    request.cached_len = events.rows[row + 4];
    if (request.finish != FinishCode::kNone) {
      finished_.push_back(request.submit.key);
    }
  }
  EXPECT(token_ids.empty(), "tokens of nobody", token_ids.size());
}

void Harness::audit() const {
  for (const Partition& partition : plane_.partitions()) {
    partition.each_group([&](const auto& group) {
      const auto balance = [&](const auto& pool) {
        EXPECT(pool.num_free() + pool.num_cached() + pool.num_writable() + pool.num_shared() == pool.total(), "group",
               group.number(), pool.num_free(), pool.num_cached(), pool.num_writable(), pool.num_shared());
      };
      balance(group.device());
      balance(group.host());
      EXPECT(group.charge_room() >= Blocks(0), "group", group.number(), group.charge_room());
    });
  }
  for (const auto& sequence : plane_.sequences()) {
    if (!sequence || !sequence->is_running()) {
      continue;
    }
    const Seated& seat = seats_.at(sequence->grant().seat().value());
    EXPECT(seat.key == sequence->key(), "seat", sequence->grant().seat(), "is of", seat.key);
    Partition& home = sequence->grant().home();
    auto& tables = const_cast<Tables&>(sequence->grant().tables());
    home.each(tables, [&](const auto& group, const auto& table) {
      const Table& made = seat.tables[at(group.id().value())];
      const auto size = std::max(static_cast<std::int64_t>(made.size()), table.size().value());
      for (std::int64_t block = 0; block < size; ++block) {
        const std::int32_t mine = at(block) < made.size() ? made[at(block)] : 0;
        const std::int32_t theirs = Blocks(block) < table.size() ? table.page(Blocks(block)).value() : 0;
        EXPECT(mine == theirs, "request", sequence->key(), "group", group.id(), "block", block, mine, theirs);
      }
    });
  }
}

void Harness::expect_idle() const {
  EXPECT(!plane_.has_work() && plane_.num_in_flight() == 0 && plane_.num_transfers() == 0, plane_.num_in_flight(),
         plane_.num_transfers());
  for (const Partition& partition : plane_.partitions()) {
    EXPECT(std::cmp_equal(partition.seats().num_free(), plane_.config().max_num_seqs), partition.seats().num_free());
    partition.each_group([&](const auto& group) {
      EXPECT(group.device().num_used() == Blocks(0) && group.host().num_used() == Blocks(0), "group", group.number(),
             group.device().num_used(), group.host().num_used());
      EXPECT(group.charge_room() == group.chargeable() && group.num_storing() == Blocks(0), "group", group.number());
    });
  }
}

}  // namespace tokenspeed::control::testing
