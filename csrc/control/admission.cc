// SPDX-License-Identifier: Apache-2.0
// Who comes in, where it runs, and what it takes: all its pages at once, so that two half-computed prompts can never
// wait for each other's.
#include <algorithm>
#include <limits>

#include "books.h"
#include "check.h"
#include "scheduler.h"

namespace tokenspeed::control {

namespace {

constexpr Tokens kOneToken{1};

std::int32_t narrow(std::int64_t value) { return static_cast<std::int32_t>(value); }

}  // namespace

// Mints grants, and nothing else does.
class Admission {
 public:
  [[nodiscard]] static Grant mint(Partition& home, SeatHold&& seat, Tables&& tables) {
    return Grant(AdmissionKey(), home, std::move(seat), std::move(tables));
  }
};

void Scheduler::plan_admissions(StepPlan& plan, std::vector<Tokens>& budgets) {
  // Strictly in order: nobody passes the head of the queue, so nobody starves.
  const auto all_spent = [&] {
    return std::all_of(budgets.begin(), budgets.end(), [](Tokens left) { return left == Tokens(0); });
  };
  while (!waiting_.empty() && blocked_ != waiting_.back() && !all_spent()) {
    const Slot slot = waiting_.back();
    const std::optional<std::size_t> place = admit(plan, slot);
    if (!place) {
      blocked_ = slot;
      return;
    }
    Tokens& budget = budgets[*place];
    if (at(slot).is<Prefilling>() && budget > Tokens(0)) {
      budget -= add_prefill_row(plan, slot, budget);
    }
  }
}

// The partition in which it was admitted.
std::optional<std::size_t> Scheduler::admit(StepPlan& plan, Slot slot) {
  Sequence& sequence = at(slot);
  places_.clear();
  for (const Partition& partition : partitions_) {
    places_.push_back(place_in(partition, sequence));
  }
  for (;;) {
    const auto place = policy::choose_place(places_, sequence.request().partition_hint);
    if (!place) {
      return std::nullopt;
    }
    if (make_room_for(partitions_[*place], sequence)) {
      seat(plan, partitions_[*place], slot);
      return place;
    }
    places_[*place].has_room = false;
  }
}

Tokens Scheduler::boundary_in(const Partition& partition, Sequence& sequence) {
  // A full hit still computes one token, in a page of its own.
  const Tokens most = sequence.len() - kOneToken;
  const Tokens limit = std::min(most, sequence.request().match_limit.value_or(most));
  const BlockHashes hashes = sequence.block_hashes(limit, base_size_);
  if (sequence.request().remote == Remote::kReceive) {
    return Tokens(limit.value() / partition.boundary_unit().value() * partition.boundary_unit().value());
  }
  return partition.common_boundary(hashes, limit, sequence.uses_host());
}

// Looks, and changes nothing.
Place Scheduler::place_in(const Partition& partition, Sequence& sequence) {
  const Roster& roster = roster_of(partition);
  const std::size_t num_running = roster.running.size();
  Place place{.has_room = partition.seats().has_free(), .warm = Tokens(0), .num_running = num_running};
  if (!place.has_room) {
    return place;
  }
  place.warm = boundary_in(partition, sequence);
  const BlockHashes hashes = sequence.block_hashes(place.warm, base_size_);
  partition.each_group([&](const auto& group) {
    const Demand demand = group.demand(hashes, place.warm, sequence.len());
    const Blocks reserve = group.kKeepsAll ? policy::admission_reserve(num_running) : Blocks(0);
    const Blocks wanted = demand.fresh + demand.only_cached + reserve;
    const Blocks charge = group.charge_of(sequence.total_limit(), sequence.request().draft_width);
    place.has_room = place.has_room && wanted <= group.available() + group.num_storing() + roster.most_held &&
                     charge <= group.charge_room();
  });
  return place;
}

// Held sessions let go and cached pages are copied until the pages can be taken. False: not now.
bool Scheduler::make_room_for(Partition& partition, Sequence& sequence) {
  for (;;) {
    const Tokens boundary = boundary_in(partition, sequence);
    const BlockHashes hashes = sequence.block_hashes(boundary, base_size_);
    bool fits = true;
    bool waits = false;
    partition.each_group([&](auto& group) {
      const Demand demand = group.demand(hashes, boundary, sequence.len());
      const std::size_t num_running = roster_of(partition).running.size();
      const Blocks reserve = group.kKeepsAll ? policy::admission_reserve(num_running) : Blocks(0);
      const Blocks wanted = demand.fresh + demand.only_cached;
      if (wanted + reserve > group.available() + group.num_storing()) {
        fits = false;
      } else if (wanted > group.num_ready()) {
        make_ready(partition, group, wanted, true);
        waits = waits || wanted > group.num_ready();
      }
    });
    // Making room may have dropped what matched; then the prompt resumes earlier and needs more.
    if (fits && !waits && boundary == boundary_in(partition, sequence)) {
      return true;
    }
    if (waits || (!fits && !reclaim(partition))) {
      return false;
    }
  }
}

void Scheduler::seat(StepPlan& plan, Partition& partition, Slot slot) {
  Sequence& sequence = at(slot);
  const Tokens boundary = boundary_in(partition, sequence);
  const BlockHashes hashes = sequence.block_hashes(boundary, base_size_);
  const bool from_peer = sequence.request().remote == Remote::kReceive;
  Transfer& transfer = transfers_.begin(from_peer ? TransferKind::kReceive : TransferKind::kLoad, partition.id());
  Tables tables = partition.empty_tables();
  partition.each(tables, [&]<class Kind>(CacheGroup<Kind>& group, PageTable<Kind>& table) {
    table.reserve(group.most_blocks(sequence.total_limit(), sequence.request().draft_width));
    group.charge(table, group.charge_of(sequence.total_limit(), sequence.request().draft_width));
    group.open(table, hashes, boundary, from_peer, transfer.loads.template of<Kind>());
    while (group.kKeepsAll && group.missing(table, sequence.len()) > Blocks(0)) {
      (void)group.grow(table, sequence.len());
    }
  });
  SeatHold hold = partition.seats().take();
  const Seat seat = hold.seat();
  // One that gave way in this very plan may have sat there, and lost expired pages before.
  plan.page_delta.drop(seat.value());
  plan.seated.push({seat.value(), sequence.key().index, sequence.key().generation});
  partition.each(tables, [&](auto& group, auto& table) {
    for (Blocks block = table.first(); block < table.size(); block += Blocks(1)) {
      plan.page_delta.push({seat.value(), group.id().value(), narrow(block.value()), table.page(block).value()});
    }
  });
  if (!sequence.cached_len()) {
    counters_.prompt_tokens += sequence.len().value();
    counters_.prefix_query_tokens += sequence.len().value();
    counters_.prefix_hit_tokens += boundary.value();
  }
  const bool loads = push_load(plan, transfer, partition, tables);
  if (loads) {
    transfer.slot = slot;
    transfer.lease.emplace(ledger_.lease(seat));
  } else {
    transfers_.end(transfer);
  }
  sequence.note_admission(boundary);
  supersede(sequence, partition);
  send(slot, signal::Admitted{.grant = Admission::mint(partition, std::move(hold), std::move(tables)),
                              .awaits_transfer = loads});
  note_pages(at(slot));
}

// Whether there is anything to load.
bool Scheduler::push_load(StepPlan& plan, const Transfer& transfer, Partition& partition, Tables& tables) {
  bool any = false;
  transfer.loads.each([&]<class Kind>(const std::vector<LoadItem<Kind>>& items) {
    for (const LoadItem<Kind>& item : items) {
      const DevicePage<Kind> target = partition.table<Kind>(tables, item.group).page(item.block);
      const std::int32_t source = item.source ? item.source->page().value() : 0;
      plan.load.push(
          {narrow(transfer.id.value()), narrow(partition.group<Kind>(item.group).number()), target.value(), source});
      any = true;
    }
  });
  return any;
}

// What the session held for this turn has done its work: the turn has pages of its own now.
void Scheduler::supersede(Sequence& next, Partition& partition) {
  if (!next.request().retain) {
    return;
  }
  const auto session = sessions_.find(next.session());
  if (session == sessions_.end()) {
    return;
  }
  const Tokens most = next.len();
  std::vector<Slot> over;
  for (const Slot slot : session->second) {
    Sequence& held = at(slot);
    const Tokens unit = partition.boundary_unit();
    const Tokens depth(held.computed().value() / unit.value() * unit.value());
    if (depth <= most &&
        held.block_hashes(depth, base_size_).before(depth) == next.block_hashes(depth, base_size_).before(depth)) {
      over.push_back(slot);
    }
  }
  for (const Slot slot : over) {
    send(slot, signal::Reclaimed());
  }
}

}  // namespace tokenspeed::control
