// SPDX-License-Identifier: Apache-2.0
// The pages of one sequence in one group, by block: shares of sealed pages, pages that only it may write, and holes
// (blocks that have expired, or that the group never keeps).
#pragma once

#include <cstddef>
#include <optional>
#include <variant>
#include <vector>

#include "block_pool.h"
#include "page.h"
#include "types.h"

namespace tokenspeed::control {

template <class Kind>
class PageTable {
 public:
  using Pool = BlockPool<tier::Device, Kind>;

  PageTable() = default;
  PageTable(PageTable&&) noexcept = default;
  PageTable& operator=(PageTable&&) = delete;
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;
  ~PageTable() = default;

  void reserve(Blocks blocks);
  void append(SealedDevicePage<Kind>&& sealed);
  void append(WritableDevicePage<Kind>&& writable);
  // Holes up to the block.
  void skip_to(Blocks block);
  // The block's writable page becomes a sealed one.
  template <class Receipt>
  const SealedDevicePage<Kind>& seal(Blocks block, Pool& pool, const Receipt& receipt);
  // Makes a hole of the first block and hands its page, if it is not a hole already, to whoever keeps it until the step
  // retires. Only what is sealed expires.
  [[nodiscard]] std::optional<ExpiredPage<Kind>> expire_first();
  // Deepest first, so that among blocks last used together the deeper ones are evicted first.
  void give_back(Pool& pool, const Retirement& retirement);
  // Of a sequence that ends and is held: shares of its first blocks stay, the rest goes.
  [[nodiscard]] std::vector<SealedDevicePage<Kind>> keep_sealed(Blocks blocks, Pool& pool,
                                                                const Retirement& retirement);
  void forfeit(const Teardown& teardown) noexcept;

  [[nodiscard]] Blocks size() const { return base_ + Blocks(static_cast<std::int64_t>(entries_.size() - head_)); }
  // The first block that may be no hole, and the first that is not sealed.
  [[nodiscard]] Blocks first() const { return base_; }
  [[nodiscard]] Blocks sealed_until() const { return sealed_until_; }
  // The null page for a hole.
  [[nodiscard]] DevicePage<Kind> page(Blocks block) const;
  [[nodiscard]] bool is_sealed(Blocks block) const;
  [[nodiscard]] bool is_writable(Blocks block) const;
  [[nodiscard]] Blocks charged() const { return charged_; }
  void set_charged(Blocks blocks) { charged_ = blocks; }

 private:
  using Entry = std::variant<std::monostate, SealedDevicePage<Kind>, WritableDevicePage<Kind>>;

  [[nodiscard]] Entry* find(Blocks block);
  [[nodiscard]] const Entry* find(Blocks block) const;
  void advance_sealed();
  void drop_head();

  // entries_[head_] is block base_; what lies before is gone and is erased in bulk.
  std::vector<Entry> entries_;
  std::size_t head_ = 0;
  Blocks base_;
  Blocks sealed_until_;
  Blocks charged_;
};

}  // namespace tokenspeed::control
