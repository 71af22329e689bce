// SPDX-License-Identifier: Apache-2.0
#include "transfers.h"

#include <limits>

#include "check.h"

namespace tokenspeed::control {

TransferLedger::TransferLedger(std::size_t most_in_flight) : records_(most_in_flight) {
  TS_CHECK(most_in_flight >= 1, "most_in_flight", most_in_flight);
  free_.reserve(most_in_flight);
  for (std::size_t slot = most_in_flight; slot > 0; --slot) {
    free_.push_back(slot - 1);
  }
}

std::size_t TransferLedger::slot_of(LeaseId id) const { return static_cast<std::size_t>(id.value()) % records_.size(); }

Transfer& TransferLedger::begin(TransferKind kind, PartitionId partition) {
  TS_CHECK(has_room(), "transfers in flight", num_in_flight());
  const std::size_t slot = free_.back();
  free_.pop_back();
  const auto count = static_cast<std::int64_t>(records_.size());
  // Ids travel as int32. One comes back after billions of transfers, when nothing can be late any more.
  const std::int64_t most_rounds = std::numeric_limits<std::int32_t>::max() / count - 1;
  const std::int64_t round = 1 + num_begun_ % most_rounds;
  ++num_begun_;
  Transfer& transfer = records_[slot];
  transfer.id = LeaseId(round * count + static_cast<std::int64_t>(slot));
  transfer.kind = kind;
  transfer.partition = partition;
  transfer.ok = false;
  transfer.settled = false;
  transfer.slot.reset();
  return transfer;
}

Transfer* TransferLedger::settle(LeaseId id, bool ok) {
  if (id.value() <= 0) {
    return nullptr;
  }
  Transfer& transfer = records_[slot_of(id)];
  if (transfer.id != id || transfer.settled) {
    return nullptr;
  }
  transfer.settled = true;
  transfer.ok = ok;
  return &transfer;
}

TransferReceipt TransferLedger::receipt(const Transfer& transfer) const {
  TS_CHECK(transfer.settled && transfer.ok, "transfer", transfer.id, "settled", transfer.settled);
  return TransferReceipt(transfer.id);
}

void TransferLedger::end(Transfer& transfer) {
  TS_CHECK(!transfer.lease.has_value(), "transfer", transfer.id, "still leases a seat");
  transfer.stores.each([&](const auto& items) { TS_CHECK(items.empty(), "transfer", transfer.id, items.size()); });
  transfer.loads.each([&](const auto& items) { TS_CHECK(items.empty(), "transfer", transfer.id, items.size()); });
  free_.push_back(slot_of(transfer.id));
  transfer.id = LeaseId(0);
}

void TransferLedger::forfeit(const Teardown& teardown) noexcept {
  for (Transfer& transfer : records_) {
    if (transfer.lease) {
      transfer.lease->forfeit(teardown);
    }
    transfer.stores.each([&](auto& items) {
      for (auto& item : items) {
        item.source.forfeit(teardown);
        item.target.forfeit(teardown);
      }
    });
    transfer.loads.each([&](auto& items) {
      for (auto& item : items) {
        if (item.source) {
          item.source->forfeit(teardown);
        }
      }
    });
  }
}

}  // namespace tokenspeed::control
