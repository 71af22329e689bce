// SPDX-License-Identifier: Apache-2.0
#include "partition.h"

#include <algorithm>
#include <numeric>

#include "check.h"

namespace tokenspeed::control {

namespace {

Tokens common_unit(std::span<const GroupSpec> specs, bool states_only) {
  std::int64_t unit = states_only ? 0 : 1;
  for (const GroupSpec& spec : specs) {
    TS_CHECK(spec.block_size >= Tokens(1), "block_size", spec.block_size);
    if (!states_only || spec.kind == GroupKind::kRecurrent) {
      // A chunk ends on one of its boundaries for all groups that keep a state.
      TS_CHECK(!states_only || unit == 0 || spec.block_size == Tokens(unit), "block_size", spec.block_size, unit);
      unit = std::lcm(std::max<std::int64_t>(unit, 1), spec.block_size.value());
    }
  }
  return Tokens(unit);
}

}  // namespace

void HeldPages::release() { home_->release(std::move(pages_)); }

Blocks HeldPages::most_freed() const {
  std::size_t count = 0;
  pages_.each([&](const auto& groups) {
    for (const auto& pages : groups) {
      count += pages.size();
    }
  });
  return Blocks(static_cast<std::int64_t>(count));
}

void HeldPages::forfeit(const Teardown& teardown) noexcept {
  pages_.each([&](auto& groups) {
    for (auto& pages : groups) {
      for (auto& page : pages) {
        page.forfeit(teardown);
      }
    }
  });
}

Partition::Partition(PartitionId id, std::span<const GroupSpec> specs, std::int32_t num_seats,
                     const CacheOptions& options)
    : id_(id),
      seats_(Seat(id.value() * num_seats), num_seats),
      unit_(common_unit(specs, false)),
      snapshot_unit_(common_unit(specs, true)),
      prefix_caching_(options.prefix_caching) {
  CacheOptions own = options;
  own.unit = unit_;
  own.first_group = id.value() * static_cast<std::int64_t>(specs.size());
  std::int32_t number = 0;
  const auto add = [&]<class Kind>(GroupsOf<Kind>& groups, const GroupSpec& spec) {
    positions_.push_back(groups.size());
    groups.emplace_back(Group(number++), spec, own);
  };
  for (const GroupSpec& spec : specs) {
    TS_CHECK(spec.block_size.value() % options.base_size.value() == 0, "block_size", spec.block_size, "base",
             options.base_size);
    if (spec.kind == GroupKind::kFull) {
      add(groups_.full, spec);
    } else if (spec.kind == GroupKind::kWindow) {
      add(groups_.window, spec);
    } else {
      add(groups_.recurrent, spec);
    }
  }
}

Tables Partition::empty_tables() const {
  Tables tables;
  tables.full.resize(groups_.full.size());
  tables.window.resize(groups_.window.size());
  tables.recurrent.resize(groups_.recurrent.size());
  return tables;
}

Tokens Partition::common_boundary(const BlockHashes& hashes, Tokens limit, bool use_host) const {
  if (!prefix_caching_) {
    return Tokens(0);
  }
  Tokens boundary(limit.value() / unit_.value() * unit_.value());
  // Each round either lowers the boundary or is the last.
  for (Tokens before = boundary + Tokens(1); boundary < before;) {
    before = boundary;
    each_group([&](const auto& group) { boundary = group.resumable(hashes, boundary, unit_, use_host); });
  }
  return boundary;
}

Tokens Partition::capacity() const {
  Tokens least(std::numeric_limits<std::int32_t>::max());
  each_group([&]<class Kind>(const CacheGroup<Kind>& group) {
    if (group.holds_whole_sequences()) {
      least = std::min(least, group.capacity());
    }
  });
  return least;
}

bool Partition::could_run(Tokens limit, std::int32_t draft_width) const {
  bool could = true;
  each_group([&](const auto& group) { could = could && group.charge_of(limit, draft_width) <= group.chargeable(); });
  return could;
}

void Partition::take_back(SeatHold&& seat, Tables&& tables, const Retirement& retirement) {
  Tables last(std::move(tables));
  each(last, [&](auto& group, auto& table) { group.give_back(std::move(table), retirement); });
  seats_.release(std::move(seat), retirement);
}

HeldPages Partition::hold(SeatHold&& seat, Tables&& tables, Tokens len, const Retirement& retirement) {
  Tables last(std::move(tables));
  PerKind<KeptOf> kept;
  each(last, [&]<class Kind>(CacheGroup<Kind>& group, PageTable<Kind>& table) {
    kept.template of<Kind>().push_back(group.keep(std::move(table), len, retirement));
  });
  seats_.release(std::move(seat), retirement);
  return HeldPages(*this, std::move(kept));
}

void Partition::release(PerKind<KeptOf>&& pages) {
  PerKind<KeptOf> last(std::move(pages));
  const auto release = [](auto& groups, auto& kept) {
    for (std::size_t index = 0; index < kept.size(); ++index) {
      groups[index].release(std::move(kept[index]));
    }
  };
  release(groups_.full, last.full);
  release(groups_.window, last.window);
  release(groups_.recurrent, last.recurrent);
}

}  // namespace tokenspeed::control
