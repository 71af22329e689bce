// SPDX-License-Identifier: Apache-2.0
// Block hash → sealed page, for one cache group in one tier. Open addressing in memory that is allocated once; nothing
// iterates over it, so its order can never reach a plan.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "page.h"
#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control {

template <class P>
class PrefixIndex {
 public:
  // Holds at most one entry a block.
  explicit PrefixIndex(Blocks num_blocks);

  [[nodiscard]] std::optional<P> find(const BlockHash& hash) const;
  // False where the hash is there already: the first page wins.
  [[nodiscard]] bool insert(const BlockHash& hash, const SealedPage<P>& sealed, const StepReceipt& receipt);
  [[nodiscard]] bool insert(const BlockHash& hash, const SealedPage<P>& sealed, const TransferReceipt& receipt);
  void erase(const BlockHash& hash);
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  struct Entry {
    BlockHash hash;
    P page;
  };

  [[nodiscard]] std::size_t home(const BlockHash& hash) const { return hash.low & mask_; }
  // Where the hash is, or the empty entry where it would go.
  [[nodiscard]] std::size_t probe(const BlockHash& hash) const;
  [[nodiscard]] bool insert_now(const BlockHash& hash, P page);

  std::vector<Entry> entries_;
  std::size_t mask_;
  std::size_t size_ = 0;
};

}  // namespace tokenspeed::control
