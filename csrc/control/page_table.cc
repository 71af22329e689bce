// SPDX-License-Identifier: Apache-2.0
#include "page_table.h"

#include <utility>

#include "check.h"

namespace tokenspeed::control {

void PageTable::reserve(Blocks blocks) { sealed_.reserve(static_cast<std::size_t>(blocks.value())); }

void PageTable::append(SealedDevicePage&& sealed) {
  TS_CHECK(num_writable() == Blocks(0), "writable", num_writable(), "page", sealed.page());
  sealed_.push_back(std::move(sealed));
}

void PageTable::append(WritableDevicePage&& writable) { writable_.push_back(std::move(writable)); }

const SealedDevicePage& PageTable::seal_next(BlockPool& pool, const StepReceipt& receipt) {
  TS_CHECK(num_writable() > Blocks(0), "sealed", num_sealed(), "step", receipt.step_id());
  sealed_.push_back(pool.seal(std::move(writable_[head_]), receipt));
  ++head_;
  if (2 * head_ > writable_.size()) {
    writable_.erase(writable_.begin(), writable_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
  return sealed_.back();
}

void PageTable::give_back(BlockPool& pool, const Retirement& retirement) {
  TS_CHECK(head_ <= writable_.size(), "seat", retirement.seat(), "head", head_);
  for (std::size_t left = writable_.size(); left > head_; --left) {
    pool.release(std::move(writable_[left - 1]));
  }
  writable_.clear();
  head_ = 0;
  for (std::size_t left = sealed_.size(); left > 0; --left) {
    pool.release(std::move(sealed_[left - 1]));
  }
  sealed_.clear();
}

void PageTable::forfeit(const Teardown& teardown) noexcept {
  for (WritableDevicePage& page : writable_) {
    page.forfeit(teardown);
  }
  for (SealedDevicePage& page : sealed_) {
    page.forfeit(teardown);
  }
}

DevicePage PageTable::page(Blocks index) const {
  TS_CHECK(index >= Blocks(0) && index < size(), "index", index, "size", size());
  const auto at = static_cast<std::size_t>(index.value());
  return at < sealed_.size() ? sealed_[at].page() : writable_[head_ + at - sealed_.size()].page();
}

}  // namespace tokenspeed::control
