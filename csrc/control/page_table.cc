// SPDX-License-Identifier: Apache-2.0
#include "page_table.h"

#include <algorithm>
#include <utility>

#include "check.h"

namespace tokenspeed::control {

namespace {
constexpr Blocks kOne{1};
}

template <class Kind>
void PageTable<Kind>::reserve(Blocks blocks) {
  entries_.reserve(static_cast<std::size_t>(blocks.value()));
}

template <class Kind>
void PageTable<Kind>::append(SealedDevicePage<Kind>&& sealed) {
  entries_.emplace_back(std::move(sealed));
  advance_sealed();
}

template <class Kind>
void PageTable<Kind>::append(WritableDevicePage<Kind>&& writable) {
  entries_.emplace_back(std::move(writable));
}

template <class Kind>
void PageTable<Kind>::skip_to(Blocks block) {
  TS_CHECK(block >= size(), "block", block, "size", size());
  if (entries_.size() == head_) {
    base_ = block;
    sealed_until_ = std::max(sealed_until_, block);
    return;
  }
  while (size() < block) {
    entries_.emplace_back();
  }
  advance_sealed();
}

template <class Kind>
template <class Receipt>
const SealedDevicePage<Kind>& PageTable<Kind>::seal(Blocks block, Pool& pool, const Receipt& receipt) {
  Entry* entry = find(block);
  TS_CHECK(entry != nullptr && is_writable(block), "block", block, "first", base_, "size", size());
  auto sealed = pool.seal(std::get<WritableDevicePage<Kind>>(std::move(*entry)), receipt);
  entry->template emplace<SealedDevicePage<Kind>>(std::move(sealed));
  advance_sealed();
  return std::get<SealedDevicePage<Kind>>(*entry);
}

template <class Kind>
std::optional<ExpiredPage<Kind>> PageTable<Kind>::expire_first() {
  TS_CHECK(base_ < sealed_until_ && head_ < entries_.size(), "first", base_, "sealed", sealed_until_, "size", size());
  Entry& entry = entries_[head_];
  std::optional<ExpiredPage<Kind>> page;
  if (auto* sealed = std::get_if<SealedDevicePage<Kind>>(&entry)) {
    page = ExpiredPage<Kind>(std::move(*sealed));
  }
  entry.template emplace<std::monostate>();
  base_ += kOne;
  ++head_;
  drop_head();
  return page;
}

template <class Kind>
void PageTable<Kind>::give_back(Pool& pool, const Retirement& retirement) {
  TS_CHECK(head_ <= entries_.size(), "seat", retirement.seat(), "head", head_);
  for (std::size_t left = entries_.size(); left > head_; --left) {
    Entry& entry = entries_[left - 1];
    if (auto* writable = std::get_if<WritableDevicePage<Kind>>(&entry)) {
      pool.release(std::move(*writable));
    } else if (auto* sealed = std::get_if<SealedDevicePage<Kind>>(&entry)) {
      pool.release(std::move(*sealed));
    }
  }
  entries_.clear();
  head_ = 0;
}

template <class Kind>
std::vector<SealedDevicePage<Kind>> PageTable<Kind>::keep_sealed(Blocks blocks, Pool& pool,
                                                                 const Retirement& retirement) {
  std::vector<SealedDevicePage<Kind>> kept;
  for (Blocks block = base_; block < blocks && block < size(); block += kOne) {
    Entry* entry = find(block);
    if (auto* sealed = std::get_if<SealedDevicePage<Kind>>(entry)) {
      kept.push_back(std::move(*sealed));
      entry->template emplace<std::monostate>();
    }
  }
  give_back(pool, retirement);
  return kept;
}

template <class Kind>
void PageTable<Kind>::forfeit(const Teardown& teardown) noexcept {
  for (Entry& entry : entries_) {
    if (auto* writable = std::get_if<WritableDevicePage<Kind>>(&entry)) {
      writable->forfeit(teardown);
    } else if (auto* sealed = std::get_if<SealedDevicePage<Kind>>(&entry)) {
      sealed->forfeit(teardown);
    }
  }
}

template <class Kind>
DevicePage<Kind> PageTable<Kind>::page(Blocks block) const {
  TS_CHECK(block >= Blocks(0) && block < size(), "block", block, "size", size());
  const Entry* entry = find(block);
  if (entry == nullptr) {
    return DevicePage<Kind>();
  }
  if (const auto* sealed = std::get_if<SealedDevicePage<Kind>>(entry)) {
    return sealed->page();
  }
  const auto* writable = std::get_if<WritableDevicePage<Kind>>(entry);
  return writable == nullptr ? DevicePage<Kind>() : writable->page();
}

template <class Kind>
bool PageTable<Kind>::is_sealed(Blocks block) const {
  const Entry* entry = find(block);
  return entry != nullptr && std::holds_alternative<SealedDevicePage<Kind>>(*entry);
}

template <class Kind>
bool PageTable<Kind>::is_writable(Blocks block) const {
  const Entry* entry = find(block);
  return entry != nullptr && std::holds_alternative<WritableDevicePage<Kind>>(*entry);
}

template <class Kind>
typename PageTable<Kind>::Entry* PageTable<Kind>::find(Blocks block) {
  return const_cast<Entry*>(std::as_const(*this).find(block));
}

template <class Kind>
const typename PageTable<Kind>::Entry* PageTable<Kind>::find(Blocks block) const {
  if (block < base_ || block >= size()) {
    return nullptr;
  }
  return &entries_[head_ + static_cast<std::size_t>((block - base_).value())];
}

template <class Kind>
void PageTable<Kind>::advance_sealed() {
  while (sealed_until_ < size() && !is_writable(sealed_until_)) {
    sealed_until_ += kOne;
  }
}

// In bulk, so that expiring costs the same at any length.
template <class Kind>
void PageTable<Kind>::drop_head() {
  if (2 * head_ > entries_.size()) {
    entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(head_));
    head_ = 0;
  }
}

template class PageTable<kind::FullAttention>;
template class PageTable<kind::SlidingWindow>;
template class PageTable<kind::RecurrentState>;
#define TS_SEAL(Kind, Receipt) \
  template const SealedDevicePage<Kind>& PageTable<Kind>::seal(Blocks, BlockPool<tier::Device, Kind>&, const Receipt&)
TS_SEAL(kind::FullAttention, StepReceipt);
TS_SEAL(kind::FullAttention, TransferReceipt);
TS_SEAL(kind::SlidingWindow, StepReceipt);
TS_SEAL(kind::SlidingWindow, TransferReceipt);
TS_SEAL(kind::RecurrentState, StepReceipt);
TS_SEAL(kind::RecurrentState, TransferReceipt);
#undef TS_SEAL

}  // namespace tokenspeed::control
