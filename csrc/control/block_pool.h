// SPDX-License-Identifier: Apache-2.0
// Owns the pages of one cache group. A page is free, writable (one handle), or sealed (counted shares). A sealed page
// without shares that is in the prefix index is only cached: it counts as free and goes in the order of last use.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "page.h"
#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control {

class BlockPool {
 public:
  explicit BlockPool(Blocks num_blocks);

  [[nodiscard]] bool has_free() const { return !free_.empty(); }
  [[nodiscard]] bool has_cached() const { return oldest_ != kNone; }

  [[nodiscard]] WritableDevicePage take_free();
  [[nodiscard]] SealedDevicePage seal(WritableDevicePage&& writable, const StepReceipt& receipt);
  [[nodiscard]] SealedDevicePage share(const SealedDevicePage& sealed);
  // A share of a page that the prefix index names.
  [[nodiscard]] SealedDevicePage share_indexed(DevicePage page);
  void mark_indexed(const SealedDevicePage& sealed, const BlockHash& hash);
  void release(SealedDevicePage&& sealed);
  void release(WritableDevicePage&& writable);
  // Frees the page that was used longest ago of those only cached; the caller forgets the hash.
  [[nodiscard]] BlockHash evict_oldest();

  [[nodiscard]] bool is_shared(DevicePage page) const { return meta(page).num_shares > 0; }
  [[nodiscard]] std::int32_t num_shares(DevicePage page) const { return meta(page).num_shares; }
  [[nodiscard]] bool is_free(DevicePage page) const { return meta(page).state == State::kFree; }
  [[nodiscard]] bool is_writable(DevicePage page) const { return meta(page).state == State::kWritable; }
  // The hash under which the prefix index names the page, if it does.
  [[nodiscard]] std::optional<BlockHash> indexed_as(DevicePage page) const {
    return meta(page).indexed ? std::optional(meta(page).hash) : std::nullopt;
  }

  [[nodiscard]] Blocks total() const { return Blocks(static_cast<std::int64_t>(pages_.size()) - 1); }
  [[nodiscard]] Blocks num_free() const { return Blocks(static_cast<std::int64_t>(free_.size())); }
  [[nodiscard]] Blocks num_cached() const { return num_cached_; }
  [[nodiscard]] Blocks num_writable() const { return num_writable_; }
  // Distinct sealed pages that somebody holds a share of.
  [[nodiscard]] Blocks num_shared() const { return num_shared_; }
  [[nodiscard]] Blocks available() const { return num_free() + num_cached_; }
  [[nodiscard]] Blocks num_used() const { return num_writable_ + num_shared_; }

 private:
  enum class State : std::uint8_t { kFree, kWritable, kSealed };
  static constexpr std::int32_t kNone = 0;

  struct Meta {
    State state = State::kFree;
    bool indexed = false;
    std::int32_t num_shares = 0;
    std::int32_t older = kNone;
    std::int32_t newer = kNone;
    BlockHash hash;
  };

  [[nodiscard]] Meta& meta(DevicePage page);
  [[nodiscard]] const Meta& meta(DevicePage page) const;
  void link_newest(DevicePage page);
  void unlink(DevicePage page);

  std::vector<Meta> pages_;
  std::vector<DevicePage> free_;
  std::int32_t oldest_ = kNone;
  std::int32_t newest_ = kNone;
  Blocks num_cached_;
  Blocks num_writable_;
  Blocks num_shared_;
};

}  // namespace tokenspeed::control
