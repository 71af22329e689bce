// SPDX-License-Identifier: Apache-2.0
// The memory of one rank of data-parallel attention: its cache groups and seats. A sequence lives in one partition.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "cache_groups.h"
#include "ledger.h"
#include "page_table.h"
#include "types.h"

namespace tokenspeed::control {

template <class Kind>
using GroupsOf = std::vector<CacheGroup<Kind>>;
template <class Kind>
using TablesOf = std::vector<PageTable<Kind>>;
template <class Kind>
using KeptOf = std::vector<std::vector<SealedDevicePage<Kind>>>;

using Groups = PerKind<GroupsOf>;
// One table a group, in the order of the groups of its kind.
using Tables = PerKind<TablesOf>;

class Partition;

// The pages of a held sequence: shares of sealed pages, no seat. Made from pages that no step in flight uses.
class [[nodiscard]] HeldPages {
 public:
  HeldPages(HeldPages&&) noexcept = default;
  HeldPages& operator=(HeldPages&&) = delete;
  HeldPages(const HeldPages&) = delete;
  HeldPages& operator=(const HeldPages&) = delete;
  ~HeldPages() = default;

  [[nodiscard]] Partition& home() const { return *home_; }
  // The most pages that letting go could make available.
  [[nodiscard]] Blocks most_freed() const;
  [[nodiscard]] const PerKind<KeptOf>& pages() const { return pages_; }
  void release();
  void forfeit(const Teardown& teardown) noexcept;

 private:
  friend class Partition;
  HeldPages(Partition& home, PerKind<KeptOf>&& pages) : home_(&home), pages_(std::move(pages)) {}

  Partition* home_;
  PerKind<KeptOf> pages_;
};

class Partition {
 public:
  Partition(PartitionId id, std::span<const GroupSpec> specs, std::int32_t num_seats, const CacheOptions& options);
  Partition(const Partition&) = delete;
  Partition& operator=(const Partition&) = delete;
  Partition(Partition&&) noexcept = default;
  Partition& operator=(Partition&&) = delete;
  ~Partition() = default;

  [[nodiscard]] PartitionId id() const { return id_; }
  [[nodiscard]] Groups& groups() { return groups_; }
  [[nodiscard]] const Groups& groups() const { return groups_; }
  [[nodiscard]] SeatPool& seats() { return seats_; }
  [[nodiscard]] const SeatPool& seats() const { return seats_; }
  [[nodiscard]] Tables empty_tables() const;

  // Calls visit(group, table) for every group.
  template <class F>
  void each(Tables& tables, F&& visit) {
    zip(groups_.full, tables.full, visit);
    zip(groups_.window, tables.window, visit);
    zip(groups_.recurrent, tables.recurrent, visit);
  }
  template <class F>
  void each_group(F&& visit) {
    groups_.each([&](auto& groups) {
      for (auto& group : groups) {
        visit(group);
      }
    });
  }
  template <class F>
  void each_group(F&& visit) const {
    groups_.each([&](const auto& groups) {
      for (const auto& group : groups) {
        visit(group);
      }
    });
  }
  // The group of that number and kind.
  template <class Kind>
  [[nodiscard]] CacheGroup<Kind>& group(Group id) {
    return groups_.template of<Kind>()[positions_[static_cast<std::size_t>(id.value())]];
  }
  template <class Kind>
  [[nodiscard]] PageTable<Kind>& table(Tables& tables, Group id) const {
    return tables.template of<Kind>()[positions_[static_cast<std::size_t>(id.value())]];
  }

  // The largest boundary up to `limit` at which every group can resume, a multiple of boundary_unit().
  [[nodiscard]] Tokens common_boundary(const BlockHashes& hashes, Tokens limit, bool use_host) const;
  [[nodiscard]] Tokens boundary_unit() const { return unit_; }
  // Ends of chunks that make a snapshot, or nothing where no group keeps a state.
  [[nodiscard]] Tokens snapshot_unit() const { return snapshot_unit_; }
  [[nodiscard]] bool prefix_caching() const { return prefix_caching_; }
  // What a sequence may be long at most, and whether one of `limit` tokens can run at all.
  [[nodiscard]] Tokens capacity() const;
  [[nodiscard]] bool could_run(Tokens limit, std::int32_t draft_width) const;

  void take_back(SeatHold&& seat, Tables&& tables, const Retirement& retirement);
  // Keeps what the next turn needs after `len` tokens.
  [[nodiscard]] HeldPages hold(SeatHold&& seat, Tables&& tables, Tokens len, const Retirement& retirement);
  void release(PerKind<KeptOf>&& pages);

 private:
  template <class G, class T, class F>
  static void zip(std::vector<G>& groups, std::vector<T>& tables, F& visit) {
    for (std::size_t index = 0; index < groups.size(); ++index) {
      visit(groups[index], tables[index]);
    }
  }

  PartitionId id_;
  Groups groups_;
  SeatPool seats_;
  std::vector<std::size_t> positions_;  // of each group among those of its kind
  Tokens unit_;
  Tokens snapshot_unit_;
  bool prefix_caching_;
};

}  // namespace tokenspeed::control
