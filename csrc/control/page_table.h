// SPDX-License-Identifier: Apache-2.0
// The pages of one sequence in one group: shares of sealed pages, then the pages that only it may write.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "page.h"
#include "types.h"

namespace tokenspeed::control {

// Proof that no step in flight uses a seat. Only the ledger mints one; a page table is given back only with it.
class Retirement {
 public:
  Retirement(const Retirement&) = delete;
  Retirement& operator=(const Retirement&) = delete;
  Retirement(Retirement&&) = delete;
  Retirement& operator=(Retirement&&) = delete;
  ~Retirement() = default;

  [[nodiscard]] Seat seat() const { return seat_; }

 private:
  friend class StepLedger;
  explicit Retirement(Seat seat) : seat_(seat) {}

  Seat seat_;
};

class PageTable {
 public:
  PageTable() = default;
  PageTable(PageTable&& other) noexcept
      : sealed_(std::move(other.sealed_)),
        writable_(std::move(other.writable_)),
        head_(std::exchange(other.head_, 0)) {}
  PageTable& operator=(PageTable&&) = delete;
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;
  ~PageTable() = default;

  void reserve(Blocks blocks);
  // Shared blocks come first, while nothing is writable.
  void append(SealedDevicePage&& sealed);
  void append(WritableDevicePage&& writable);
  // Turns the first writable block into a sealed one.
  const SealedDevicePage& seal_next(BlockPool& pool, const StepReceipt& receipt);
  // Deepest first, so that among blocks last used together the deeper ones are evicted first.
  void give_back(BlockPool& pool, const Retirement& retirement);
  void forfeit(const Teardown& teardown) noexcept;

  [[nodiscard]] Blocks num_sealed() const { return Blocks(static_cast<std::int64_t>(sealed_.size())); }
  [[nodiscard]] Blocks num_writable() const { return Blocks(static_cast<std::int64_t>(writable_.size() - head_)); }
  [[nodiscard]] Blocks size() const { return num_sealed() + num_writable(); }
  [[nodiscard]] DevicePage page(Blocks index) const;

 private:
  std::vector<SealedDevicePage> sealed_;
  // Handles before head_ have been given to sealed_; they are erased in bulk to keep sealing cheap.
  std::vector<WritableDevicePage> writable_;
  std::size_t head_ = 0;
};

}  // namespace tokenspeed::control
