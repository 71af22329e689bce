// SPDX-License-Identifier: Apache-2.0
#include "block_pool.h"

#include <utility>

#include "check.h"

namespace tokenspeed::control {

namespace {
constexpr Blocks kOne{1};
// Prompts that matched a page, from which on it counts as a point where sequences part.
constexpr std::uint8_t kForked = 2;
}  // namespace

template <class Tier, class Kind>
BlockPool<Tier, Kind>::BlockPool(Blocks num_blocks) {
  TS_CHECK(num_blocks >= Blocks(0), "num_blocks", num_blocks);
  const auto count = static_cast<std::size_t>(num_blocks.value());
  pages_.resize(count + 1);
  free_.reserve(count);
  // Taken from the back: low pages first, which keeps traces easy to read.
  for (auto page = static_cast<std::int32_t>(count); page >= 1; --page) {
    free_.emplace_back(page);
  }
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Meta& BlockPool<Tier, Kind>::meta(P page) {
  TS_CHECK(!page.is_null() && std::cmp_less(page.value(), pages_.size()), "page", page);
  return pages_[static_cast<std::size_t>(page.value())];
}

template <class Tier, class Kind>
const typename BlockPool<Tier, Kind>::Meta& BlockPool<Tier, Kind>::meta(P page) const {
  TS_CHECK(!page.is_null() && std::cmp_less(page.value(), pages_.size()), "page", page);
  return pages_[static_cast<std::size_t>(page.value())];
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Writable BlockPool<Tier, Kind>::take_free() {
  TS_CHECK(has_free(), "used", num_used(), "cached", num_cached(), "total", total());
  const P page = free_.back();
  free_.pop_back();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kFree && !entry.indexed && entry.num_shares == 0, "page", page);
  entry.state = State::kWritable;
  entry.num_hits = 0;
  num_writable_ += kOne;
  return Writable(page);
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Sealed BlockPool<Tier, Kind>::seal(Writable&& writable, const StepReceipt&) {
  return seal_now(std::move(writable));
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Sealed BlockPool<Tier, Kind>::seal(Writable&& writable, const TransferReceipt&) {
  return seal_now(std::move(writable));
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Sealed BlockPool<Tier, Kind>::seal_now(Writable&& writable) {
  const P page = Writable(std::move(writable)).consume();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kWritable, "page", page);
  entry.state = State::kSealed;
  entry.num_shares = 1;
  num_writable_ -= kOne;
  num_shared_ += kOne;
  return Sealed(page);
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Sealed BlockPool<Tier, Kind>::share(const Sealed& sealed) {
  Meta& entry = meta(sealed.page());
  TS_CHECK(entry.state == State::kSealed && entry.num_shares > 0, "page", sealed.page());
  ++entry.num_shares;
  return Sealed(sealed.page());
}

template <class Tier, class Kind>
typename BlockPool<Tier, Kind>::Sealed BlockPool<Tier, Kind>::share_indexed(P page, bool a_hit) {
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.indexed, "page", page);
  if (entry.num_shares == 0) {
    unlink(page);
    num_shared_ += kOne;
  }
  ++entry.num_shares;
  if (a_hit && entry.num_hits < kForked) {
    ++entry.num_hits;
  }
  return Sealed(page);
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::mark_indexed(const Sealed& sealed, const BlockHash& hash, bool saved) {
  Meta& entry = meta(sealed.page());
  TS_CHECK(entry.state == State::kSealed && !entry.indexed, "page", sealed.page());
  entry.indexed = true;
  entry.saved = saved;
  entry.hash = hash;
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::set_saved(P page, bool saved) {
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.indexed, "page", page);
  if (entry.saved == saved) {
    return;
  }
  if (entry.num_shares == 0) {
    unlink(page);
    entry.saved = saved;
    link_newest(page);
  } else {
    entry.saved = saved;
  }
}

// Whether it was the last share of a page that stays in the index; a page that is not there is freed.
template <class Tier, class Kind>
bool BlockPool<Tier, Kind>::drop_share(Sealed&& sealed, P page) {
  (void)Sealed(std::move(sealed)).consume();
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.num_shares > 0, "page", page, "shares", entry.num_shares);
  --entry.num_shares;
  if (entry.num_shares > 0) {
    return false;
  }
  num_shared_ -= kOne;
  if (!entry.indexed) {
    free(page);
  }
  return entry.indexed;
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::release(Sealed&& sealed) {
  const P page = sealed.page();
  if (drop_share(std::move(sealed), page)) {
    link_newest(page);
  }
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::release_superseded(Sealed&& sealed) {
  const P page = sealed.page();
  if (!drop_share(std::move(sealed), page)) {
    return;
  }
  if (meta(page).num_hits >= kForked) {
    link_newest(page);
  } else {
    link_oldest(page);
  }
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::release(Writable&& writable) {
  const P page = Writable(std::move(writable)).consume();
  TS_CHECK(meta(page).state == State::kWritable, "page", page);
  num_writable_ -= kOne;
  free(page);
}

template <class Tier, class Kind>
BlockHash BlockPool<Tier, Kind>::evict_oldest(bool saved) {
  const P page(lists_[saved ? 1 : 0].oldest);
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.indexed && entry.num_shares == 0, "page", page);
  unlink(page);
  free(page);
  return entry.hash;
}

template <class Tier, class Kind>
std::optional<typename BlockPool<Tier, Kind>::P> BlockPool<Tier, Kind>::oldest_unsaved() const {
  const std::int32_t oldest = lists_[0].oldest;
  return oldest == kNone ? std::nullopt : std::optional(P(oldest));
}

template <class Tier, class Kind>
const BlockHash& BlockPool<Tier, Kind>::hash_of(P page) const {
  const Meta& entry = meta(page);
  TS_CHECK(entry.indexed, "page", page);
  return entry.hash;
}

template <class Tier, class Kind>
std::optional<typename BlockPool<Tier, Kind>::P> BlockPool<Tier, Kind>::oldest_saved() const {
  const std::int32_t oldest = lists_[1].oldest;
  return oldest == kNone ? std::nullopt : std::optional(P(oldest));
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::forget(P page) {
  Meta& entry = meta(page);
  TS_CHECK(entry.state == State::kSealed && entry.indexed, "page", page);
  if (entry.num_shares == 0) {
    unlink(page);
    free(page);
  } else {
    entry.indexed = false;
  }
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::free(P page) {
  Meta& entry = meta(page);
  entry.state = State::kFree;
  entry.indexed = false;
  entry.saved = false;
  free_.push_back(page);
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::link_newest(P page) {
  Meta& entry = meta(page);
  List& list = list_of(entry);
  entry.older = list.newest;
  entry.newer = kNone;
  if (list.newest == kNone) {
    list.oldest = page.value();
  } else {
    meta(P(list.newest)).newer = page.value();
  }
  list.newest = page.value();
  list.size += kOne;
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::link_oldest(P page) {
  Meta& entry = meta(page);
  List& list = list_of(entry);
  entry.newer = list.oldest;
  entry.older = kNone;
  if (list.oldest == kNone) {
    list.newest = page.value();
  } else {
    meta(P(list.oldest)).older = page.value();
  }
  list.oldest = page.value();
  list.size += kOne;
}

template <class Tier, class Kind>
void BlockPool<Tier, Kind>::unlink(P page) {
  Meta& entry = meta(page);
  List& list = list_of(entry);
  if (entry.older == kNone) {
    list.oldest = entry.newer;
  } else {
    meta(P(entry.older)).newer = entry.newer;
  }
  if (entry.newer == kNone) {
    list.newest = entry.older;
  } else {
    meta(P(entry.newer)).older = entry.older;
  }
  entry.older = kNone;
  entry.newer = kNone;
  list.size -= kOne;
}

template class BlockPool<tier::Device, kind::FullAttention>;
template class BlockPool<tier::Device, kind::SlidingWindow>;
template class BlockPool<tier::Device, kind::RecurrentState>;
template class BlockPool<tier::Host, kind::FullAttention>;
template class BlockPool<tier::Host, kind::SlidingWindow>;
template class BlockPool<tier::Host, kind::RecurrentState>;

}  // namespace tokenspeed::control
