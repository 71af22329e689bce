// SPDX-License-Identifier: Apache-2.0
#include "block_pool.h"

#include <cstddef>
#include <utility>

#include "check.h"

namespace tokenspeed::control {

namespace {
constexpr Blocks kOne{1};
}

BlockPool::BlockPool(Blocks num_blocks) {
  TS_CHECK(num_blocks >= kOne, "num_blocks", num_blocks);
  const auto count = static_cast<std::size_t>(num_blocks.value());
  pages_.resize(count + 1);
  free_.reserve(count);
  // Taken from the back: low pages first, which keeps traces easy to read.
  for (auto page = static_cast<std::int32_t>(count); page >= 1; --page) {
    free_.emplace_back(page);
  }
}

BlockPool::Meta& BlockPool::meta(DevicePage page) {
  TS_CHECK(!page.is_null() && std::cmp_less(page.value(), pages_.size()), "page", page);
  return pages_[static_cast<std::size_t>(page.value())];
}

const BlockPool::Meta& BlockPool::meta(DevicePage page) const {
  TS_CHECK(!page.is_null() && std::cmp_less(page.value(), pages_.size()), "page", page);
  return pages_[static_cast<std::size_t>(page.value())];
}

WritableDevicePage BlockPool::take_free() {
  TS_CHECK(has_free(), "used", num_used(), "cached", num_cached_, "total", total());
  const DevicePage page = free_.back();
  free_.pop_back();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kFree && !entry.indexed && entry.num_shares == 0, "page", page);
  entry.state = State::kWritable;
  num_writable_ += kOne;
  return WritableDevicePage(page);
}

SealedDevicePage BlockPool::seal(WritableDevicePage&& writable, const StepReceipt& receipt) {
  const DevicePage page = WritableDevicePage(std::move(writable)).consume();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kWritable, "page", page, "step", receipt.step_id());
  entry.state = State::kSealed;
  entry.num_shares = 1;
  num_writable_ -= kOne;
  num_shared_ += kOne;
  return SealedDevicePage(page);
}

SealedDevicePage BlockPool::share(const SealedDevicePage& sealed) {
  Meta& entry = meta(sealed.page());
  TS_CHECK(entry.state == State::kSealed && entry.num_shares > 0, "page", sealed.page());
  ++entry.num_shares;
  return SealedDevicePage(sealed.page());
}

SealedDevicePage BlockPool::share_indexed(DevicePage page) {
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.indexed, "page", page);
  if (entry.num_shares == 0) {
    unlink(page);
    num_cached_ -= kOne;
    num_shared_ += kOne;
  }
  ++entry.num_shares;
  return SealedDevicePage(page);
}

void BlockPool::mark_indexed(const SealedDevicePage& sealed, const BlockHash& hash) {
  Meta& entry = meta(sealed.page());
  TS_CHECK(entry.state == State::kSealed && !entry.indexed, "page", sealed.page());
  entry.indexed = true;
  entry.hash = hash;
}

void BlockPool::release(SealedDevicePage&& sealed) {
  const DevicePage page = SealedDevicePage(std::move(sealed)).consume();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.num_shares > 0, "page", page, "shares", entry.num_shares);
  --entry.num_shares;
  if (entry.num_shares > 0) {
    return;
  }
  num_shared_ -= kOne;
  if (entry.indexed) {
    link_newest(page);
    num_cached_ += kOne;
  } else {
    entry.state = State::kFree;
    free_.push_back(page);
  }
}

void BlockPool::release(WritableDevicePage&& writable) {
  const DevicePage page = WritableDevicePage(std::move(writable)).consume();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kWritable, "page", page);
  entry.state = State::kFree;
  num_writable_ -= kOne;
  free_.push_back(page);
}

BlockHash BlockPool::evict_oldest() {
  TS_CHECK(has_cached(), "free", num_free(), "used", num_used());
  const DevicePage page(oldest_);
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.indexed && entry.num_shares == 0, "page", page);
  unlink(page);
  num_cached_ -= kOne;
  entry.state = State::kFree;
  entry.indexed = false;
  free_.push_back(page);
  return entry.hash;
}

void BlockPool::link_newest(DevicePage page) {
  Meta& entry = meta(page);
  entry.older = newest_;
  entry.newer = kNone;
  if (newest_ == kNone) {
    oldest_ = page.value();
  } else {
    meta(DevicePage(newest_)).newer = page.value();
  }
  newest_ = page.value();
}

void BlockPool::unlink(DevicePage page) {
  Meta& entry = meta(page);
  if (entry.older == kNone) {
    oldest_ = entry.newer;
  } else {
    meta(DevicePage(entry.older)).newer = entry.newer;
  }
  if (entry.newer == kNone) {
    newest_ = entry.older;
  } else {
    meta(DevicePage(entry.newer)).older = entry.older;
  }
  entry.older = kNone;
  entry.newer = kNone;
}

}  // namespace tokenspeed::control
