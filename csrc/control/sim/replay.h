// SPDX-License-Identifier: Apache-2.0
// The KV event stream, replayed: it must lead to the exact index of both tiers, and what an index names must hold the
// very history that its hash stands for.
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <vector>

#include "layout.h"
#include "memory.h"
#include "oracle.h"
#include "scheduler.h"

namespace tokenspeed::control::sim {

class Replay {
 public:
  explicit Replay(const Layout& layout);

  // Takes what was logged since the last call, then compares.
  void check(Scheduler& scheduler, const Memory& memory, const Oracle& oracle);

 private:
  // Tier, group number, hash.
  using Entry = std::tuple<std::int64_t, std::int64_t, std::uint64_t, std::uint64_t>;
  // What a page held when it was looked at last.
  struct Seen {
    std::uint32_t version = 0;
    BlockHash hash;
  };

  void take(const KvEvents& events, const Oracle& oracle);
  template <class Pool>
  std::size_t check_tier(std::int64_t tier, std::int64_t number, const Pool& pool, const Memory& memory,
                         const Oracle& oracle);

  Layout layout_;
  std::set<Entry> entries_;
  std::vector<std::vector<std::vector<Seen>>> seen_;  // by tier, group number, page
};

}  // namespace tokenspeed::control::sim
