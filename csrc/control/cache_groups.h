// SPDX-License-Identifier: Apache-2.0
// How a kind of layer caches: how many tokens a block covers, which blocks a sequence still needs, where a prompt may
// resume, and who evicts what. Full attention keeps every block; a sliding window those that its next token can see; a
// recurrent layer one state, of which a full block is the snapshot at that block's end.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "kv_log.h"
#include "page_table.h"
#include "prefix_index.h"
#include "transfers.h"
#include "types.h"

namespace tokenspeed::control {

enum class GroupKind : std::int32_t { kFull = 0, kWindow = 1, kRecurrent = 2 };
enum class HostStore : std::int32_t { kOnSeal = 0, kOnPressure = 1 };

// window: tokens that a window layer looks back on, the current one included.
struct GroupSpec {
  GroupKind kind = GroupKind::kFull;
  Tokens block_size;
  Blocks num_blocks;
  Blocks num_host_blocks;
  Tokens window;
};

// What all groups of a partition have in common. unit: prompts resume at its multiples. step_tokens: most tokens that
// one step computes.
struct CacheOptions {
  bool prefix_caching = true;
  HostStore host_store = HostStore::kOnSeal;
  Tokens base_size;
  Tokens unit;
  Tokens step_tokens;
  std::int64_t first_group = 0;  // number of the partition's first group, over all partitions
  KvLog* log = nullptr;
};

// A sequence's chained hashes, one a base block.
struct BlockHashes {
  std::span<const BlockHash> base;
  Tokens base_size;
  BlockHash root;

  [[nodiscard]] Tokens tokens() const { return Tokens(static_cast<std::int64_t>(base.size()) * base_size.value()); }
  // Of all tokens before `end`, which lies on a base block's end.
  [[nodiscard]] const BlockHash& before(Tokens end) const {
    const auto count = static_cast<std::size_t>(end.value() / base_size.value());
    return count == 0 ? root : base[count - 1];
  }
};

// Pages that a prompt takes from what is available now.
struct Demand {
  Blocks fresh;
  // Matched pages that nobody uses now: sharing them takes from what is available, too.
  Blocks only_cached;
};

template <class Kind>
class CacheGroup {
 public:
  static constexpr bool kKeepsAll = std::is_same_v<Kind, kind::FullAttention>;
  static constexpr bool kIsState = std::is_same_v<Kind, kind::RecurrentState>;
  using Table = PageTable<Kind>;
  using DevicePool = BlockPool<tier::Device, Kind>;
  using HostPool = BlockPool<tier::Host, Kind>;

  CacheGroup(Group id, const GroupSpec& spec, const CacheOptions& options);

  [[nodiscard]] Group id() const { return id_; }
  [[nodiscard]] std::int64_t number() const { return options_.first_group + id_.value(); }
  [[nodiscard]] Tokens block_size() const { return block_size_; }
  [[nodiscard]] Tokens capacity() const { return tokens_in(device_.total()); }
  [[nodiscard]] Tokens tokens_in(Blocks blocks) const { return Tokens(blocks.value() * block_size_.value()); }
  [[nodiscard]] Blocks blocks_covering(Tokens tokens) const;
  [[nodiscard]] Blocks full_blocks(Tokens tokens) const { return Blocks(tokens.value() / block_size_.value()); }
  // The first block that a token at `context` still reads.
  [[nodiscard]] Blocks first_needed(Tokens context) const;

  // Bounded groups set pages aside for each running sequence, so that none can be stuck half-way: the most that one of
  // `limit` tokens holds at a time. Nothing for full attention, where the whole prompt's pages are taken at once.
  [[nodiscard]] Blocks charge_of(Tokens limit, std::int32_t draft_width) const;
  // Blocks that one sequence's table may list at a time.
  [[nodiscard]] Blocks most_blocks(Tokens limit, std::int32_t draft_width) const;
  [[nodiscard]] bool holds_whole_sequences() const { return kKeepsAll || (!kIsState && margin_ == Blocks(0)); }
  [[nodiscard]] Blocks charge_room() const { return device_.total() - margin_ - charged_; }
  [[nodiscard]] Blocks chargeable() const { return device_.total() - margin_; }

  // The largest multiple of `unit` up to `boundary` at which a sequence with these hashes can go on without computing
  // what lies before.
  [[nodiscard]] Tokens resumable(const BlockHashes& hashes, Tokens boundary, Tokens unit, bool use_host) const;
  // For a prompt of `len` tokens that resumes at the boundary.
  [[nodiscard]] Demand demand(const BlockHashes& hashes, Tokens boundary, Tokens len) const;
  // Fills an empty table up to the boundary: shares what the device has; for the rest takes pages to write, which go
  // into `loads` with their source in the host tier, or with none where `from_peer`.
  void open(Table& table, const BlockHashes& hashes, Tokens boundary, bool from_peer,
            std::vector<LoadItem<Kind>>& loads);
  void charge(Table& table, Blocks blocks);

  // Pages that the table lacks for a step that ends at `end`.
  [[nodiscard]] Blocks missing(const Table& table, Tokens end) const;
  // The block in which the next page of such a step goes.
  [[nodiscard]] Blocks next_block(const Table& table, Tokens end) const;
  // One page more, at next_block; has_ready() must hold.
  DevicePage<Kind> grow(Table& table, Tokens end);
  // Tokens that the table's pages cover.
  [[nodiscard]] Tokens covered(const Table& table) const { return tokens_in(table.size()); }
  // The number of computed tokens at which the table's first block expires.
  [[nodiscard]] Tokens expires_at(const Table& table) const;
  // Publishes what is computed and full.
  template <class Receipt>
  void seal(Table& table, Tokens computed, const BlockHashes& hashes, std::span<const std::int32_t> token_ids,
            const Receipt& receipt);
  void give_back(Table&& table, const Retirement& retirement);
  // Of a sequence that is held after `len` tokens: the pages that its next turn needs.
  [[nodiscard]] std::vector<SealedDevicePage<Kind>> keep(Table&& table, Tokens len, const Retirement& retirement);
  void release(std::vector<SealedDevicePage<Kind>>&& pages);
  // A page that a step leaves behind, once that step has retired.
  void release_expired(SealedDevicePage<Kind>&& page);

  // Room. ready: can be taken at once; unsaved: cached pages that must be copied to the host first.
  [[nodiscard]] bool has_ready() const { return device_.has_ready(); }
  [[nodiscard]] Blocks num_ready() const { return device_.num_ready(); }
  [[nodiscard]] Blocks available() const { return device_.available(); }
  [[nodiscard]] Blocks num_storing() const { return num_storing_; }

  // The host tier.
  [[nodiscard]] bool has_host() const { return host_.total() > Blocks(0); }
  [[nodiscard]] bool wants_store() const;
  // Begins to copy pages that were sealed since the last time.
  void begin_sealed_stores(Blocks most, std::vector<StoreItem<Kind>>& stores);
  // Works towards `wanted` pages that can go at once: begins to copy the oldest cached pages that lack a copy, or drops
  // them where the host tier is full and they may be dropped.
  void make_ready(Blocks wanted, Blocks most_stores, bool may_drop, std::vector<StoreItem<Kind>>& stores);
  void end_store(StoreItem<Kind>&& item, const TransferReceipt* receipt);
  // The transfer has written the block; or it has, and nobody wants it; or it has failed and what it read is forgotten.
  void end_load(Table& table, LoadItem<Kind>&& item, const BlockHashes& hashes, std::span<const std::int32_t> token_ids,
                const TransferReceipt& receipt);
  void drop_load(LoadItem<Kind>&& item);
  void fail_load(LoadItem<Kind>&& item);

  [[nodiscard]] const DevicePool& device() const { return device_; }
  [[nodiscard]] const HostPool& host() const { return host_; }
  [[nodiscard]] const PrefixIndex<DevicePage<Kind>>& index() const { return index_; }
  [[nodiscard]] const PrefixIndex<HostPage<Kind>>& host_index() const { return host_index_; }
  // Tokens that a sequence would have to compute again if it lost this table now.
  [[nodiscard]] Tokens private_tokens(const Table& table) const;

 private:
  [[nodiscard]] const BlockHash& hash_of(const BlockHashes& hashes, Blocks block) const {
    return hashes.before(tokens_in(block + Blocks(1)));
  }
  [[nodiscard]] bool has_block(const BlockHashes& hashes, Blocks block, bool use_host) const;
  [[nodiscard]] Blocks kept(std::int32_t draft_width) const;
  [[nodiscard]] WritableDevicePage<Kind> take();
  [[nodiscard]] std::optional<WritablePage<HostPage<Kind>>> take_host(bool replaces);
  void evict(bool saved);
  [[nodiscard]] bool begin_store(DevicePage<Kind> page, std::optional<WritablePage<HostPage<Kind>>>&& target,
                                 std::vector<StoreItem<Kind>>& stores);
  template <class Receipt>
  void publish(const SealedDevicePage<Kind>& sealed, Blocks block, const BlockHashes& hashes,
               std::span<const std::int32_t> token_ids, const Receipt& receipt);

  Group id_;
  Tokens block_size_;
  Tokens reach_;  // tokens before the current one that it reads
  CacheOptions options_;
  DevicePool device_;
  PrefixIndex<DevicePage<Kind>> index_;
  HostPool host_;
  PrefixIndex<HostPage<Kind>> host_index_;
  Blocks margin_;
  Blocks charged_;
  Blocks num_storing_;
  std::vector<DevicePage<Kind>> to_store_;  // sealed, and waiting to be copied on sealing
};

}  // namespace tokenspeed::control
