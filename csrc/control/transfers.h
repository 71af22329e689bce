// SPDX-License-Identifier: Apache-2.0
// Transfers in flight: what they read is pinned, what they write nobody else has, until their acknowledgement. Late,
// duplicate and unknown acknowledgements find nothing here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "page.h"
#include "token_hash.h"
#include "types.h"

namespace tokenspeed::control {

// kStore: device → host, of cached pages. kLoad: host → device, for an admission. kReceive, kSend: from and to the peer
// of a remote prefill.
enum class TransferKind : std::uint8_t { kStore, kLoad, kReceive, kSend };

template <class Kind>
struct StoreItem {
  Group group;
  SealedDevicePage<Kind> source;
  WritablePage<HostPage<Kind>> target;
  BlockHash hash;
};

// The block of the sequence's table that is written. No source: a peer writes it.
template <class Kind>
struct LoadItem {
  Group group;
  Blocks block;
  std::optional<SealedPage<HostPage<Kind>>> source;
};

template <class Kind>
using StoreItems = std::vector<StoreItem<Kind>>;
template <class Kind>
using LoadItems = std::vector<LoadItem<Kind>>;

// Batches of stores that one partition has in flight at most.
inline constexpr std::size_t kMaxStoresInFlight = 4;

struct Transfer {
  LeaseId id;
  TransferKind kind = TransferKind::kStore;
  PartitionId partition;
  bool ok = false;
  bool settled = false;
  // Of the sequence that waits for it; the lease keeps its seat.
  std::optional<Slot> slot;
  std::optional<Lease> lease;
  PerKind<StoreItems> stores;
  PerKind<LoadItems> loads;
};

class TransferLedger {
 public:
  explicit TransferLedger(std::size_t most_in_flight);

  [[nodiscard]] bool has_room() const { return !free_.empty(); }
  [[nodiscard]] std::size_t num_in_flight() const { return records_.size() - free_.size(); }
  // An empty record under a fresh id.
  [[nodiscard]] Transfer& begin(TransferKind kind, PartitionId partition);
  // Null where no such transfer is in flight. From here on a receipt can be had, if it went well.
  [[nodiscard]] Transfer* settle(LeaseId id, bool ok);
  [[nodiscard]] TransferReceipt receipt(const Transfer& transfer) const;
  // The record must be empty again.
  void end(Transfer& transfer);
  void forfeit(const Teardown& teardown) noexcept;

  // For checks from outside; a record that is not in flight is empty.
  [[nodiscard]] const std::vector<Transfer>& records() const { return records_; }

 private:
  [[nodiscard]] std::size_t slot_of(LeaseId id) const;

  std::vector<Transfer> records_;
  std::vector<std::size_t> free_;
  std::int64_t num_begun_ = 0;
};

}  // namespace tokenspeed::control
