// SPDX-License-Identifier: Apache-2.0
// Owns the pages of one cache group in one tier. A page is free, writable (one handle), or sealed (counted shares). A
// sealed page without shares that is in the prefix index is only cached: it counts as available and goes in the order
// of last use. Cached pages that another tier has a copy of (saved) may go at once; the others are kept apart, since
// they must be copied first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "page.h"
#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control {

template <class Tier, class Kind>
class BlockPool {
 public:
  using P = Page<Tier, Kind>;
  using Writable = WritablePage<P>;
  using Sealed = SealedPage<P>;

  // No blocks at all makes a pool that is always empty.
  explicit BlockPool(Blocks num_blocks);

  // A page can be taken now: a free one, or a cached one that may go at once.
  [[nodiscard]] bool has_ready() const { return num_ready() > Blocks(0); }
  [[nodiscard]] bool has_free() const { return !free_.empty(); }

  [[nodiscard]] Writable take_free();
  [[nodiscard]] Sealed seal(Writable&& writable, const StepReceipt& receipt);
  [[nodiscard]] Sealed seal(Writable&& writable, const TransferReceipt& receipt);
  [[nodiscard]] Sealed share(const Sealed& sealed);
  // A share of a page that the prefix index names; a_hit: a prompt matched it.
  [[nodiscard]] Sealed share_indexed(P page, bool a_hit);
  void mark_indexed(const Sealed& sealed, const BlockHash& hash, bool saved);
  void set_saved(P page, bool saved);
  void release(Sealed&& sealed);
  // As release; but a page that fewer than two prompts matched becomes the next to be evicted: what comes after it in
  // the same sequence replaces it.
  void release_superseded(Sealed&& sealed);
  void release(Writable&& writable);
  // Frees the page used longest ago of those cached and saved (or not saved); the caller forgets the hash.
  [[nodiscard]] BlockHash evict_oldest(bool saved);
  // The cached page without a copy that was used longest ago.
  [[nodiscard]] std::optional<P> oldest_unsaved() const;
  [[nodiscard]] std::optional<P> oldest_saved() const;
  // The index forgets the page. One that nobody shares is freed.
  void forget(P page);

  [[nodiscard]] bool is_shared(P page) const { return meta(page).num_shares > 0; }
  [[nodiscard]] bool is_saved(P page) const { return meta(page).saved; }
  [[nodiscard]] std::int32_t num_shares(P page) const { return meta(page).num_shares; }
  [[nodiscard]] bool is_free(P page) const { return meta(page).state == State::kFree; }
  [[nodiscard]] bool is_writable(P page) const { return meta(page).state == State::kWritable; }
  // The hash under which the prefix index names the page, if it does.
  [[nodiscard]] std::optional<BlockHash> indexed_as(P page) const {
    return meta(page).indexed ? std::optional(meta(page).hash) : std::nullopt;
  }

  // The same of a page that it does name.
  [[nodiscard]] const BlockHash& hash_of(P page) const;

  [[nodiscard]] Blocks total() const { return Blocks(static_cast<std::int64_t>(pages_.size()) - 1); }
  [[nodiscard]] Blocks num_free() const { return Blocks(static_cast<std::int64_t>(free_.size())); }
  [[nodiscard]] Blocks num_cached() const { return lists_[0].size + lists_[1].size; }
  [[nodiscard]] Blocks num_unsaved() const { return lists_[0].size; }
  [[nodiscard]] Blocks num_writable() const { return num_writable_; }
  // Distinct sealed pages that somebody holds a share of.
  [[nodiscard]] Blocks num_shared() const { return num_shared_; }
  [[nodiscard]] Blocks num_ready() const { return num_free() + lists_[1].size; }
  [[nodiscard]] Blocks available() const { return num_free() + num_cached(); }
  [[nodiscard]] Blocks num_used() const { return num_writable_ + num_shared_; }

 private:
  enum class State : std::uint8_t { kFree, kWritable, kSealed };
  static constexpr std::int32_t kNone = 0;

  struct Meta {
    State state = State::kFree;
    bool indexed = false;
    bool saved = false;
    std::uint8_t num_hits = 0;
    std::int32_t num_shares = 0;
    std::int32_t older = kNone;
    std::int32_t newer = kNone;
    BlockHash hash;
  };

  // Cached pages, oldest to newest.
  struct List {
    std::int32_t oldest = kNone;
    std::int32_t newest = kNone;
    Blocks size;
  };

  [[nodiscard]] Meta& meta(P page);
  [[nodiscard]] const Meta& meta(P page) const;
  [[nodiscard]] List& list_of(const Meta& entry) { return lists_[entry.saved ? 1 : 0]; }
  [[nodiscard]] Sealed seal_now(Writable&& writable);
  [[nodiscard]] bool drop_share(Sealed&& sealed, P page);
  void link_newest(P page);
  void link_oldest(P page);
  void unlink(P page);
  void free(P page);

  std::vector<Meta> pages_;
  std::vector<P> free_;
  std::array<List, 2> lists_;  // cached and not saved, cached and saved
  Blocks num_writable_;
  Blocks num_shared_;
};

}  // namespace tokenspeed::control
