// SPDX-License-Identifier: Apache-2.0
#include "prefix_index.h"

#include <bit>

#include "check.h"

namespace tokenspeed::control {

PrefixIndex::PrefixIndex(Blocks num_blocks)
    : entries_(std::bit_ceil(2 * static_cast<std::size_t>(num_blocks.value()) + 2)), mask_(entries_.size() - 1) {}

std::size_t PrefixIndex::probe(const BlockHash& hash) const {
  std::size_t slot = home(hash);
  while (!entries_[slot].page.is_null() && entries_[slot].hash != hash) {
    slot = (slot + 1) & mask_;
  }
  return slot;
}

std::optional<DevicePage> PrefixIndex::find(const BlockHash& hash) const {
  const Entry& entry = entries_[probe(hash)];
  if (entry.page.is_null()) {
    return std::nullopt;
  }
  return entry.page;
}

bool PrefixIndex::insert(const BlockHash& hash, const SealedDevicePage& sealed, const StepReceipt& receipt) {
  Entry& entry = entries_[probe(hash)];
  if (!entry.page.is_null()) {
    return false;
  }
  TS_CHECK(2 * (size_ + 1) <= entries_.size(), "size", size_, "step", receipt.step_id());
  entry = Entry{.hash = hash, .page = sealed.page()};
  ++size_;
  return true;
}

void PrefixIndex::erase(const BlockHash& hash) {
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

}  // namespace tokenspeed::control
