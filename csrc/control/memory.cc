// SPDX-License-Identifier: Apache-2.0
// Finding room, and the transfers that make it: held sessions let go, cached pages are copied to the host, loads and
// sends are acknowledged.
#include <algorithm>

#include "books.h"
#include "check.h"
#include "scheduler.h"

namespace tokenspeed::control {

namespace {

// Pages that one plan begins to copy at most, in each group: transfers must not crowd out steps.
constexpr Blocks kMostStores{256};

std::int32_t narrow(std::int64_t value) { return static_cast<std::int32_t>(value); }

// Calls visit(group, page) for each page that a peer takes.
template <class F>
void each_sent(Sequence& sequence, F&& visit) {
  const Tokens len = sequence.computed();
  Grant& grant = sequence.grant();
  grant.home().each(grant.tables(), [&](const auto& group, const auto& table) {
    for (Blocks block = table.first(); block < group.blocks_covering(len) && block < table.size(); block += Blocks(1)) {
      if (!table.page(block).is_null()) {
        visit(group, table.page(block));
      }
    }
  });
}

std::size_t num_sent(Sequence& sequence) {
  std::size_t count = 0;
  each_sent(sequence, [&](const auto&, auto) { ++count; });
  TS_CHECK(count > 0, "request", sequence.key(), "has nothing to send");
  return count;
}

}  // namespace

template <class Kind>
Scheduler::Room Scheduler::find_room(Partition& partition, CacheGroup<Kind>& group, Blocks wanted) {
  for (;;) {
    if (group.num_ready() >= wanted) {
      return Room::kReady;
    }
    make_ready(partition, group, wanted, true);
    if (group.num_ready() >= wanted) {
      return Room::kReady;
    }
    if (group.available() + group.num_storing() >= wanted) {
      return Room::kWait;  // copies under way will let pages go
    }
    if (!reclaim(partition)) {
      break;
    }
  }
  // Pages come back with the next results; taking more now would only be thrash. What awaits a transfer can give way
  // once that has ended, so the first in line does not have to.
  const bool comes_back = roster_of(partition).num_leaving > 0 || group.num_storing() > Blocks(0);
  return comes_back || !group.kKeepsAll ? Room::kWait : Room::kNone;
}

Scheduler::Room Scheduler::room_for(Sequence& sequence, Tokens end) {
  Room worst = Room::kReady;
  Grant& grant = sequence.grant();
  grant.home().each(grant.tables(), [&](auto& group, auto& table) {
    const Blocks missing = group.missing(table, end);
    if (missing > Blocks(0)) {
      worst = std::max(worst, find_room(grant.home(), group, missing));
    }
  });
  return worst;
}

// Whether the pages could be taken now, with nobody giving way.
bool Scheduler::has_ready_for(Sequence& sequence, Tokens end) {
  bool ready = true;
  Grant& grant = sequence.grant();
  grant.home().each(grant.tables(),
                    [&](auto& group, auto& table) { ready = ready && group.num_ready() >= group.missing(table, end); });
  return ready;
}

// The held session that goes first lets go of its pages. False where none is held.
bool Scheduler::reclaim(Partition& partition) {
  Roster& roster = roster_of(partition);
  if (roster.held.empty()) {
    return false;
  }
  send(roster.held.front().slot, signal::Reclaimed());
  return true;
}

template <class Kind>
void Scheduler::make_ready(Partition& partition, CacheGroup<Kind>& group, Blocks wanted, bool may_drop) {
  if (group.num_ready() >= wanted || group.device().num_unsaved() == Blocks(0)) {
    return;
  }
  if (Transfer* stores = stores_of(partition)) {
    group.make_ready(wanted, kMostStores, may_drop, stores->stores.template of<Kind>());
  }
}

template void Scheduler::make_ready(Partition&, CacheGroup<kind::FullAttention>&, Blocks, bool);
template void Scheduler::make_ready(Partition&, CacheGroup<kind::SlidingWindow>&, Blocks, bool);
template void Scheduler::make_ready(Partition&, CacheGroup<kind::RecurrentState>&, Blocks, bool);

// The partition's transfer in the plan that is being made; null where too many are in flight.
Transfer* Scheduler::stores_of(Partition& partition) {
  Roster& roster = roster_of(partition);
  if (roster.stores == nullptr && roster.num_stores < kMaxStoresInFlight) {
    roster.stores = &transfers_.begin(TransferKind::kStore, partition.id());
    ++roster.num_stores;
  }
  return roster.stores;
}

void Scheduler::plan_stores(StepPlan& plan) {
  for (Partition& partition : partitions_) {
    partition.each_group([&]<class Kind>(CacheGroup<Kind>& group) {
      if (!group.has_host()) {
        return;
      }
      if (group.wants_store()) {
        if (Transfer* stores = stores_of(partition)) {
          group.begin_sealed_stores(kMostStores, stores->stores.template of<Kind>());
        }
      }
      if (is_busy() && config_.host_store == HostStore::kOnPressure) {
        make_ready(partition, group, policy::ready_reserve(group.device().total(), group.host().total()), false);
      }
    });
    push_stores(plan, partition);
  }
}

void Scheduler::push_stores(StepPlan& plan, Partition& partition) {
  Roster& roster = roster_of(partition);
  if (roster.stores == nullptr) {
    return;
  }
  Transfer& transfer = *roster.stores;
  roster.stores = nullptr;
  bool any = false;
  transfer.stores.each([&]<class Kind>(std::vector<StoreItem<Kind>>& items) {
    for (const StoreItem<Kind>& item : items) {
      const std::int64_t number = partition.group<Kind>(item.group).number();
      plan.store.push(
          {narrow(transfer.id.value()), narrow(number), item.source.page().value(), item.target.page().value()});
      any = true;
    }
  });
  if (!any) {
    --roster.num_stores;
    transfers_.end(transfer);
  }
}

void Scheduler::plan_sends(StepPlan& plan) {
  // Sequences may share pages, so that not all may find a place; who does not goes with the next plan.
  while (!to_send_.empty() && num_sent(at(to_send_.back())) <= plan.store.room()) {
    const Slot slot = to_send_.back();
    to_send_.pop_back();
    Grant& grant = at(slot).grant();
    Transfer& transfer = transfers_.begin(TransferKind::kSend, grant.home().id());
    transfer.slot = slot;
    transfer.lease.emplace(ledger_.lease(grant.seat()));
    each_sent(at(slot), [&](const auto& group, auto page) {
      plan.store.push({narrow(transfer.id.value()), narrow(group.number()), page.value(), 0});
    });
  }
}

void Scheduler::on(const TransferDone& done) {
  Transfer* transfer = transfers_.settle(done.lease, done.ok);
  if (transfer == nullptr) {
    return;  // late, twice, or of nobody
  }
  blocked_.reset();
  if (transfer->kind == TransferKind::kStore) {
    end_stores(*transfer);
    --rosters_[static_cast<std::size_t>(transfer->partition.value())].num_stores;
    transfers_.end(*transfer);
    return;
  }
  TS_CHECK(transfer->slot.has_value() && transfer->lease.has_value(), "transfer", done.lease, "is of no sequence");
  const Slot slot = *transfer->slot;
  ledger_.retire(std::move(*transfer->lease));
  transfer->lease.reset();
  const bool ok = done.ok;
  end_loads(*transfer, at(slot));
  transfers_.end(*transfer);
  send(slot, signal::TransferEnded{.ok = ok});
}

void Scheduler::end_stores(Transfer& transfer) {
  Partition& partition = partitions_[static_cast<std::size_t>(transfer.partition.value())];
  transfer.stores.each([&]<class Kind>(std::vector<StoreItem<Kind>>& items) {
    // The one used longest ago was begun first, and must become the first to go.
    for (StoreItem<Kind>& item : items) {
      CacheGroup<Kind>& group = partition.group<Kind>(item.group);
      if (transfer.ok) {
        const TransferReceipt written = transfers_.receipt(transfer);
        group.end_store(std::move(item), &written);
        counters_.stored_blocks += group.id() == Group(0) ? 1 : 0;
      } else {
        group.end_store(std::move(item), nullptr);
      }
    }
    items.clear();
  });
}

// Of a load or a remote prefill. A sequence that ended meanwhile gets its pages published all the same: they are good.
void Scheduler::end_loads(Transfer& transfer, Sequence& sequence) {
  Partition& partition = partitions_[static_cast<std::size_t>(transfer.partition.value())];
  Tables& tables = sequence.grant().tables();
  transfer.loads.each([&]<class Kind>(std::vector<LoadItem<Kind>>& items) {
    for (LoadItem<Kind>& item : items) {
      CacheGroup<Kind>& group = partition.group<Kind>(item.group);
      if (transfer.ok) {
        const TransferReceipt written = transfers_.receipt(transfer);
        PageTable<Kind>& table = partition.table<Kind>(tables, item.group);
        const Tokens end = group.tokens_in(item.block + Blocks(1));
        counters_.loaded_tokens += item.source && group.id() == Group(0) ? group.block_size().value() : 0;
        if (end > sequence.len()) {
          group.drop_load(std::move(item));  // a Finish has cut the history before the block's end
          continue;
        }
        group.end_load(table, std::move(item), sequence.block_hashes(end, base_size_), sequence.token_ids(), written);
      } else {
        group.fail_load(std::move(item));
      }
    }
    items.clear();
  });
  if (!transfer.ok && transfer.kind == TransferKind::kLoad) {
    sequence.note_failed_load();
  }
  if (transfer.kind == TransferKind::kReceive) {
    sequence.note_local();
  }
}

}  // namespace tokenspeed::control
