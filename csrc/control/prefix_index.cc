// SPDX-License-Identifier: Apache-2.0
#include "prefix_index.h"

#include <bit>

#include "check.h"

namespace tokenspeed::control {

template <class P>
PrefixIndex<P>::PrefixIndex(Blocks num_blocks)
    : entries_(std::bit_ceil(2 * static_cast<std::size_t>(num_blocks.value()) + 2)), mask_(entries_.size() - 1) {}

template <class P>
std::size_t PrefixIndex<P>::probe(const BlockHash& hash) const {
  std::size_t slot = home(hash);
  while (!entries_[slot].page.is_null() && entries_[slot].hash != hash) {
    slot = (slot + 1) & mask_;
  }
  return slot;
}

template <class P>
std::optional<P> PrefixIndex<P>::find(const BlockHash& hash) const {
  const Entry& entry = entries_[probe(hash)];
  return entry.page.is_null() ? std::nullopt : std::optional(entry.page);
}

template <class P>
bool PrefixIndex<P>::insert(const BlockHash& hash, const SealedPage<P>& sealed, const StepReceipt&) {
  return insert_now(hash, sealed.page());
}

template <class P>
bool PrefixIndex<P>::insert(const BlockHash& hash, const SealedPage<P>& sealed, const TransferReceipt&) {
  return insert_now(hash, sealed.page());
}

template <class P>
bool PrefixIndex<P>::insert_now(const BlockHash& hash, P page) {
  Entry& entry = entries_[probe(hash)];
  if (!entry.page.is_null()) {
    return false;
  }
  TS_CHECK(2 * (size_ + 1) <= entries_.size(), "size", size_, "page", page);
  entry = Entry{.hash = hash, .page = page};
  ++size_;
  return true;
}

template <class P>
void PrefixIndex<P>::erase(const BlockHash& hash) {
  std::size_t hole = probe(hash);
  TS_CHECK(!entries_[hole].page.is_null(), "hash", hash.high, hash.low);
  // Shift back the entries that the hole would cut off from their home.
  for (std::size_t next = (hole + 1) & mask_; !entries_[next].page.is_null(); next = (next + 1) & mask_) {
    const std::size_t distance_home = (next - home(entries_[next].hash)) & mask_;
    const std::size_t distance_hole = (next - hole) & mask_;
    if (distance_home >= distance_hole) {
      entries_[hole] = entries_[next];
      hole = next;
    }
  }
  entries_[hole] = Entry{};
  --size_;
}

template class PrefixIndex<DevicePage<kind::FullAttention>>;
template class PrefixIndex<DevicePage<kind::SlidingWindow>>;
template class PrefixIndex<DevicePage<kind::RecurrentState>>;
template class PrefixIndex<HostPage<kind::FullAttention>>;
template class PrefixIndex<HostPage<kind::SlidingWindow>>;
template class PrefixIndex<HostPage<kind::RecurrentState>>;

}  // namespace tokenspeed::control
