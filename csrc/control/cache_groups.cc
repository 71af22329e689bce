// SPDX-License-Identifier: Apache-2.0
#include "cache_groups.h"

#include <algorithm>

#include "check.h"

namespace tokenspeed::control {

namespace {

constexpr Blocks kOne{1};
// Steps whose tokens a bounded group's pages may belong to besides the window itself: two in flight, and two whose
// pages have expired and wait for a step to retire.
constexpr std::int64_t kSteps = 4;

Tokens reach_of(const GroupSpec& spec) {
  if (spec.kind == GroupKind::kFull) {
    return Tokens(std::numeric_limits<std::int32_t>::max());
  }
  if (spec.kind == GroupKind::kRecurrent) {
    return Tokens(1);
  }
  TS_CHECK(spec.window >= Tokens(2), "window", spec.window);
  return spec.window - Tokens(1);
}

}  // namespace

template <class Kind>
CacheGroup<Kind>::CacheGroup(Group id, const GroupSpec& spec, const CacheOptions& options)
    : id_(id),
      block_size_(spec.block_size),
      reach_(reach_of(spec)),
      options_(options),
      device_(spec.num_blocks),
      index_(spec.num_blocks),
      host_(spec.num_host_blocks),
      host_index_(spec.num_host_blocks) {
  TS_CHECK(spec.num_blocks >= kOne, "group", id, "num_blocks", spec.num_blocks);
  if constexpr (!kKeepsAll && !kIsState) {
    const Blocks a_step = blocks_covering(options.step_tokens) + kOne;
    const Blocks margin(kSteps * a_step.value());
    // A pool too small for one sequence beside the margin sets whole sequences aside instead.
    margin_ = margin + kept(0) <= spec.num_blocks ? margin : Blocks(0);
  }
  if (has_host() && options_.host_store == HostStore::kOnSeal) {
    to_store_.reserve(static_cast<std::size_t>(std::min(spec.num_blocks.value(), std::int64_t{4096})));
  }
}

template <class Kind>
Blocks CacheGroup<Kind>::blocks_covering(Tokens tokens) const {
  return Blocks((tokens.value() + block_size_.value() - 1) / block_size_.value());
}

template <class Kind>
Blocks CacheGroup<Kind>::first_needed(Tokens context) const {
  if (kKeepsAll || context <= reach_) {
    return Blocks(0);
  }
  return full_blocks(context - reach_);
}

template <class Kind>
Blocks CacheGroup<Kind>::charge_of(Tokens limit, std::int32_t draft_width) const {
  if constexpr (kKeepsAll) {
    return Blocks(0);
  }
  const Blocks whole = blocks_covering(limit - Tokens(1));
  if (!kIsState && margin_ == Blocks(0)) {
    return whole;
  }
  return std::min(whole, kept(draft_width));
}

// Pages stay until the last common boundary, from which the next turn resumes, needs them no more.
template <class Kind>
Blocks CacheGroup<Kind>::kept(std::int32_t draft_width) const {
  const Blocks drafts = kIsState ? Blocks(0) : blocks_covering(Tokens(2 * (1 + std::int64_t{draft_width})));
  return blocks_covering(reach_ + options_.unit) + Blocks(1 + kSteps) + drafts;
}

template <class Kind>
Blocks CacheGroup<Kind>::most_blocks(Tokens limit, std::int32_t draft_width) const {
  const Blocks whole = blocks_covering(limit);
  if (holds_whole_sequences()) {
    return whole;
  }
  // Holes between two pages are listed, too, and what has left a table goes in bulk.
  const Blocks listed = charge_of(limit, draft_width) + blocks_covering(options_.step_tokens + options_.unit);
  return std::min(whole, Blocks(2 * listed.value()));
}

template <class Kind>
bool CacheGroup<Kind>::has_block(const BlockHashes& hashes, Blocks block, bool use_host) const {
  const BlockHash& hash = hash_of(hashes, block);
  return index_.find(hash).has_value() || (use_host && host_index_.find(hash).has_value());
}

template <class Kind>
Tokens CacheGroup<Kind>::resumable(const BlockHashes& hashes, Tokens boundary, Tokens unit, bool use_host) const {
  const auto round_down = [unit](Tokens tokens) { return Tokens(tokens.value() / unit.value() * unit.value()); };
  if constexpr (kKeepsAll) {
    Blocks count;
    while (tokens_in(count) < boundary && has_block(hashes, count, use_host)) {
      count += kOne;
    }
    return round_down(std::min(tokens_in(count), boundary));
  }
  // The blocks that the first token after the candidate reads must all be there.
  Tokens candidate = round_down(boundary);
  Blocks block = full_blocks(candidate);
  while (candidate > Tokens(0) && block > first_needed(candidate)) {
    block -= kOne;
    if (!has_block(hashes, block, use_host)) {
      candidate = round_down(tokens_in(block));
      block = full_blocks(candidate);
    }
  }
  return candidate;
}

template <class Kind>
Demand CacheGroup<Kind>::demand(const BlockHashes& hashes, Tokens boundary, Tokens len) const {
  Demand demand;
  const Blocks matched = full_blocks(boundary);
  for (Blocks block = first_needed(boundary); block < matched; block += kOne) {
    const std::optional<DevicePage<Kind>> page = index_.find(hash_of(hashes, block));
    if (!page) {
      demand.fresh += kOne;
    } else if (!device_.is_shared(*page)) {
      demand.only_cached += kOne;
    }
  }
  if constexpr (kKeepsAll) {
    demand.fresh += blocks_covering(len) - matched;
  }
  return demand;
}

template <class Kind>
void CacheGroup<Kind>::open(Table& table, const BlockHashes& hashes, Tokens boundary, bool from_peer,
                            std::vector<LoadItem<Kind>>& loads) {
  const Blocks matched = full_blocks(boundary);
  table.skip_to(first_needed(boundary));
  // All shares first, of the host's pages too: taking pages evicts, and must not evict what was matched.
  std::vector<std::optional<SealedDevicePage<Kind>>> shares;
  const std::size_t first_load = loads.size();
  for (Blocks block = table.first(); block < matched; block += kOne) {
    const BlockHash& hash = hash_of(hashes, block);
    const std::optional<DevicePage<Kind>> page = index_.find(hash);
    shares.emplace_back();
    if (page) {
      shares.back().emplace(device_.share_indexed(*page, true));
      continue;
    }
    loads.push_back(LoadItem<Kind>{.group = id_, .block = block, .source = std::nullopt});
    if (!from_peer) {
      const std::optional<HostPage<Kind>> source = host_index_.find(hash);
      TS_CHECK(source.has_value(), "group", id_, "block", block, "of", matched);
      loads.back().source.emplace(host_.share_indexed(*source, true));
    }
  }
  for (std::optional<SealedDevicePage<Kind>>& share : shares) {
    if (share) {
      table.append(std::move(*share));
    } else {
      table.append(take());
    }
  }
  TS_CHECK(loads.size() - first_load <= shares.size(), "group", id_, "loads", loads.size() - first_load);
}

template <class Kind>
void CacheGroup<Kind>::charge(Table& table, Blocks blocks) {
  TS_CHECK(table.charged() == Blocks(0) && blocks <= charge_room(), "group", id_, "charge", blocks, "of",
           charge_room());
  table.set_charged(blocks);
  charged_ += blocks;
}

template <class Kind>
Blocks CacheGroup<Kind>::missing(const Table& table, Tokens end) const {
  const Blocks wanted = blocks_covering(end);
  if (wanted <= table.size()) {
    return Blocks(0);
  }
  return kIsState ? kOne : wanted - table.size();
}

template <class Kind>
Blocks CacheGroup<Kind>::next_block(const Table& table, Tokens end) const {
  return kIsState ? blocks_covering(end) - kOne : table.size();
}

template <class Kind>
DevicePage<Kind> CacheGroup<Kind>::grow(Table& table, Tokens end) {
  const Blocks block = next_block(table, end);
  table.skip_to(block);
  table.append(take());
  return table.page(block);
}

template <class Kind>
Tokens CacheGroup<Kind>::expires_at(const Table& table) const {
  if constexpr (kKeepsAll) {
    return Tokens(std::numeric_limits<std::int64_t>::max());
  }
  const std::int64_t unit = options_.unit.value();
  return Tokens((tokens_in(table.first() + kOne) + reach_ + Tokens(unit - 1)).value() / unit * unit);
}

template <class Kind>
template <class Receipt>
void CacheGroup<Kind>::seal(Table& table, Tokens computed, const BlockHashes& hashes,
                            std::span<const std::int32_t> token_ids, const Receipt& receipt) {
  while (table.sealed_until() < table.size() && tokens_in(table.sealed_until() + kOne) <= computed) {
    const Blocks block = table.sealed_until();
    // A state is what its block's last token left only while no later one has been computed.
    TS_CHECK(!kIsState || tokens_in(block + kOne) == computed, "group", id_, "block", block, "computed", computed);
    publish(table.seal(block, device_, receipt), block, hashes, token_ids, receipt);
  }
}

template <class Kind>
template <class Receipt>
void CacheGroup<Kind>::publish(const SealedDevicePage<Kind>& sealed, Blocks block, const BlockHashes& hashes,
                               std::span<const std::int32_t> token_ids, const Receipt& receipt) {
  const BlockHash& hash = hash_of(hashes, block);
  if (!options_.prefix_caching || !index_.insert(hash, sealed, receipt)) {
    return;
  }
  const bool saved = !has_host() || host_index_.find(hash).has_value();
  device_.mark_indexed(sealed, hash, saved);
  // Where copying cannot keep up, the page is copied when its memory is wanted.
  if (!saved && options_.host_store == HostStore::kOnSeal && to_store_.size() < to_store_.capacity()) {
    to_store_.push_back(sealed.page());
  }
  const auto start = static_cast<std::size_t>(tokens_in(block).value());
  options_.log->stored(TierCode::kDevice, number(), hash, hashes.before(tokens_in(block)),
                       token_ids.subspan(start, static_cast<std::size_t>(block_size_.value())));
}

template <class Kind>
void CacheGroup<Kind>::give_back(Table&& table, const Retirement& retirement) {
  Table last(std::move(table));
  charged_ -= last.charged();
  last.give_back(device_, retirement);
}

template <class Kind>
std::vector<SealedDevicePage<Kind>> CacheGroup<Kind>::keep(Table&& table, Tokens len, const Retirement& retirement) {
  Table last(std::move(table));
  charged_ -= last.charged();
  return last.keep_sealed(full_blocks(len), device_, retirement);
}

template <class Kind>
void CacheGroup<Kind>::release(std::vector<SealedDevicePage<Kind>>&& pages) {
  for (std::size_t left = pages.size(); left > 0; --left) {
    device_.release(std::move(pages[left - 1]));
  }
  pages.clear();
}

template <class Kind>
void CacheGroup<Kind>::release_expired(SealedDevicePage<Kind>&& page) {
  device_.release_superseded(std::move(page));
}

template <class Kind>
void CacheGroup<Kind>::evict(bool saved) {
  const BlockHash hash = device_.evict_oldest(saved);
  index_.erase(hash);
  options_.log->removed(TierCode::kDevice, number(), hash);
}

template <class Kind>
WritableDevicePage<Kind> CacheGroup<Kind>::take() {
  TS_CHECK(device_.has_ready(), "group", id_, "used", device_.num_used(), "unsaved", device_.num_unsaved());
  if (!device_.has_free()) {
    evict(true);
  }
  return device_.take_free();
}

template <class Kind>
Tokens CacheGroup<Kind>::private_tokens(const Table& table) const {
  Blocks count;
  for (Blocks block = table.first(); block < table.size(); block += kOne) {
    const DevicePage<Kind> page = table.page(block);
    const bool stays = page.is_null() || (table.is_sealed(block) &&
                                          (device_.num_shares(page) > 1 || (has_host() && device_.is_saved(page))));
    count += stays ? Blocks(0) : kOne;
  }
  return tokens_in(count);
}

template <class Kind>
bool CacheGroup<Kind>::wants_store() const {
  return !to_store_.empty();
}

// A host page to write: a free one, or that of the block used longest ago. None while loads read them all, and none
// where the block's device page could go at once and would then not be able to, unless `replaces`.
template <class Kind>
std::optional<WritablePage<HostPage<Kind>>> CacheGroup<Kind>::take_host(bool replaces) {
  if (!host_.has_ready()) {
    return std::nullopt;
  }
  if (!host_.has_free()) {
    const std::optional<HostPage<Kind>> oldest = host_.oldest_saved();
    TS_CHECK(oldest.has_value(), "group", id_, "host pages ready", host_.num_ready());
    const BlockHash hash = host_.hash_of(*oldest);
    const std::optional<DevicePage<Kind>> copy = index_.find(hash);
    if (copy && !replaces && !device_.is_shared(*copy)) {
      return std::nullopt;
    }
    (void)host_.evict_oldest(true);
    host_index_.erase(hash);
    options_.log->removed(TierCode::kHost, number(), hash);
    if (copy) {
      device_.set_saved(*copy, false);
    }
  }
  return host_.take_free();
}

// False where no host page can be had.
template <class Kind>
bool CacheGroup<Kind>::begin_store(DevicePage<Kind> page, std::optional<WritablePage<HostPage<Kind>>>&& target,
                                   std::vector<StoreItem<Kind>>& stores) {
  if (!target) {
    return false;
  }
  stores.push_back(StoreItem<Kind>{.group = id_,
                                   .source = device_.share_indexed(page, false),
                                   .target = std::move(*target),
                                   .hash = device_.hash_of(page)});
  num_storing_ += kOne;
  return true;
}

template <class Kind>
void CacheGroup<Kind>::begin_sealed_stores(Blocks most, std::vector<StoreItem<Kind>>& stores) {
  while (most > Blocks(0) && !to_store_.empty()) {
    const DevicePage<Kind> page = to_store_.back();
    to_store_.pop_back();
    // It may have been evicted and used again since; then either it is no indexed page, or one that lacks a copy too.
    if (device_.is_free(page) || !device_.indexed_as(page) || device_.is_saved(page)) {
      continue;
    }
    if (!begin_store(page, take_host(true), stores)) {
      return;
    }
    most -= kOne;
  }
}

template <class Kind>
void CacheGroup<Kind>::make_ready(Blocks wanted, Blocks most_stores, bool may_drop,
                                  std::vector<StoreItem<Kind>>& stores) {
  while (num_ready() + num_storing_ < wanted && most_stores > Blocks(0)) {
    const std::optional<DevicePage<Kind>> page = device_.oldest_unsaved();
    if (!page) {
      return;
    }
    std::optional<WritablePage<HostPage<Kind>>> target = take_host(false);
    if (!target && !may_drop) {
      return;
    }
    if (!target) {
      evict(false);  // the host tier is full
    } else {
      (void)begin_store(*page, std::move(target), stores);
      most_stores -= kOne;
    }
  }
}

template <class Kind>
void CacheGroup<Kind>::end_store(StoreItem<Kind>&& item, const TransferReceipt* receipt) {
  StoreItem<Kind> last(std::move(item));
  const DevicePage<Kind> page = last.source.page();
  num_storing_ -= kOne;
  if (receipt == nullptr) {
    host_.release(std::move(last.target));
  } else {
    auto copy = host_.seal(std::move(last.target), *receipt);
    if (host_index_.insert(last.hash, copy, *receipt)) {
      host_.mark_indexed(copy, last.hash, true);
      options_.log->stored(TierCode::kHost, number(), last.hash, BlockHash{}, {});
    }
    host_.release(std::move(copy));
  }
  // One that could not be copied may go like one that was: trying again for ever would block whoever waits for it.
  device_.set_saved(page, true);
  device_.release(std::move(last.source));
}

template <class Kind>
void CacheGroup<Kind>::end_load(Table& table, LoadItem<Kind>&& item, const BlockHashes& hashes,
                                std::span<const std::int32_t> token_ids, const TransferReceipt& receipt) {
  LoadItem<Kind> last(std::move(item));
  publish(table.seal(last.block, device_, receipt), last.block, hashes, token_ids, receipt);
  if (last.source) {
    host_.release(std::move(*last.source));
  }
}

template <class Kind>
void CacheGroup<Kind>::drop_load(LoadItem<Kind>&& item) {
  LoadItem<Kind> last(std::move(item));
  if (last.source) {
    host_.release(std::move(*last.source));
  }
}

template <class Kind>
void CacheGroup<Kind>::fail_load(LoadItem<Kind>&& item) {
  LoadItem<Kind> last(std::move(item));
  if (!last.source) {
    return;
  }
  const HostPage<Kind> page = last.source->page();
  if (const std::optional<BlockHash> hash = host_.indexed_as(page)) {
    host_index_.erase(*hash);
    options_.log->removed(TierCode::kHost, number(), *hash);
    host_.forget(page);
    if (const std::optional<DevicePage<Kind>> copy = index_.find(*hash)) {
      device_.set_saved(*copy, false);
    }
  }
  host_.release(std::move(*last.source));
}

template class CacheGroup<kind::FullAttention>;
template class CacheGroup<kind::SlidingWindow>;
template class CacheGroup<kind::RecurrentState>;
#define TS_SEAL(Kind)                                                                                               \
  template void CacheGroup<Kind>::seal(PageTable<Kind>&, Tokens, const BlockHashes&, std::span<const std::int32_t>, \
                                       const StepReceipt&)
TS_SEAL(kind::FullAttention);
TS_SEAL(kind::SlidingWindow);
TS_SEAL(kind::RecurrentState);
#undef TS_SEAL

}  // namespace tokenspeed::control
