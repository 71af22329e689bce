// SPDX-License-Identifier: Apache-2.0
// Handles of pages and seats. They are move-only, minted by the pool, the ledger or admission, and must be given back:
// a live handle that is overwritten throws, one that is destroyed ends the process.
#pragma once

#include <exception>
#include <utility>

#include "check.h"
#include "types.h"

namespace tokenspeed::control {

template <class Tier, class Kind>
class BlockPool;
template <class Kind>
class PageTable;
class SeatPool;
class StepLedger;
class TransferLedger;
struct PoolTag;

// Lets handles go without giving them back, when the whole plane is destroyed.
class Teardown {
  friend class Scheduler;
  Teardown() = default;
};

// Proof that a step ended well. Only the ledger mints one, and nothing is sealed or published without it.
class StepReceipt {
 public:
  StepReceipt(const StepReceipt&) = delete;
  StepReceipt& operator=(const StepReceipt&) = delete;
  StepReceipt(StepReceipt&&) = delete;
  StepReceipt& operator=(StepReceipt&&) = delete;
  ~StepReceipt() = default;

  [[nodiscard]] StepId step_id() const { return step_id_; }

 private:
  friend class StepLedger;
  explicit StepReceipt(StepId step_id) : step_id_(step_id) {}

  StepId step_id_;
};

// Proof that a transfer ended well. Only the ledger of transfers mints one.
class TransferReceipt {
 public:
  TransferReceipt(const TransferReceipt&) = delete;
  TransferReceipt& operator=(const TransferReceipt&) = delete;
  TransferReceipt(TransferReceipt&&) = delete;
  TransferReceipt& operator=(TransferReceipt&&) = delete;
  ~TransferReceipt() = default;

  [[nodiscard]] LeaseId lease() const { return lease_; }

 private:
  friend class TransferLedger;
  explicit TransferReceipt(LeaseId lease) : lease_(lease) {}

  LeaseId lease_;
};

// Proof that no step and no transfer in flight uses a seat. Only the ledger of steps mints one, and what a seat's
// table names is given back only with it.
class Retirement {
 public:
  Retirement(const Retirement&) = delete;
  Retirement& operator=(const Retirement&) = delete;
  Retirement(Retirement&&) = delete;
  Retirement& operator=(Retirement&&) = delete;
  ~Retirement() = default;

  [[nodiscard]] Seat seat() const { return seat_; }

 private:
  friend class StepLedger;
  explicit Retirement(Seat seat) : seat_(seat) {}

  Seat seat_;
};

// The shared part of move-only handles: an id and whether this handle still answers for it.
template <class Id, class Minter>
class [[nodiscard]] Handle {
 public:
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

 protected:
  explicit Handle(Id id) : id_(id), live_(true) {}
  Handle(Handle&& other) noexcept : id_(other.id_), live_(std::exchange(other.live_, false)) {}
  // Throws on purpose: an overwritten handle would be a lost page. NOLINTNEXTLINE(bugprone-exception-escape)
  Handle& operator=(Handle&& other) {
    TS_CHECK(!live_, "moved over a live handle of", id_);
    id_ = other.id_;
    live_ = std::exchange(other.live_, false);
    return *this;
  }
  ~Handle() {
    // While a failed CHECK unwinds the stack the plane is lost anyway, and its exception must get out.
    if (live_ && std::uncaught_exceptions() == 0) {
      detail::fail_dropped("a handle of page, seat or lease", id_.value());
    }
  }

  [[nodiscard]] Id live_id() const {
    TS_CHECK(live_, "used a handle that was given away", id_);
    return id_;
  }

  Id consume() {
    TS_CHECK(live_, "gave back a handle twice", id_);
    live_ = false;
    return id_;
  }

  void abandon() noexcept { live_ = false; }

 private:
  Id id_;
  bool live_;
};

// The right to write one page. At most one exists for a page.
template <class P>
class [[nodiscard]] WritablePage : private Handle<P, PoolTag> {
 public:
  WritablePage(WritablePage&&) noexcept = default;
  WritablePage& operator=(WritablePage&&) = default;  // NOLINT(bugprone-exception-escape)
  WritablePage(const WritablePage&) = delete;
  WritablePage& operator=(const WritablePage&) = delete;
  ~WritablePage() = default;

  [[nodiscard]] P page() const { return this->live_id(); }
  void forfeit(const Teardown&) noexcept { this->abandon(); }

 private:
  template <class Tier, class Kind>
  friend class BlockPool;
  explicit WritablePage(P page) : Handle<P, PoolTag>(page) {}
};

// One share of a full page that will not be written again. Shared only by BlockPool::share.
template <class P>
class [[nodiscard]] SealedPage : private Handle<P, PoolTag> {
 public:
  SealedPage(SealedPage&&) noexcept = default;
  SealedPage& operator=(SealedPage&&) = default;  // NOLINT(bugprone-exception-escape)
  SealedPage(const SealedPage&) = delete;
  SealedPage& operator=(const SealedPage&) = delete;
  ~SealedPage() = default;

  [[nodiscard]] P page() const { return this->live_id(); }
  void forfeit(const Teardown&) noexcept { this->abandon(); }

 private:
  template <class Tier, class Kind>
  friend class BlockPool;
  explicit SealedPage(P page) : Handle<P, PoolTag>(page) {}
};

template <class Kind>
using WritableDevicePage = WritablePage<DevicePage<Kind>>;
template <class Kind>
using SealedDevicePage = SealedPage<DevicePage<Kind>>;

// A page that has left its sequence's table while steps in flight may still read it. It cannot be released: only the
// ledger, when it is told that the step has retired, makes a share of it again.
template <class Kind>
class [[nodiscard]] ExpiredPage {
 public:
  ExpiredPage(ExpiredPage&&) noexcept = default;
  ExpiredPage& operator=(ExpiredPage&&) = default;  // NOLINT(bugprone-exception-escape)
  ExpiredPage(const ExpiredPage&) = delete;
  ExpiredPage& operator=(const ExpiredPage&) = delete;
  ~ExpiredPage() = default;

  [[nodiscard]] DevicePage<Kind> page() const { return sealed_.page(); }
  void forfeit(const Teardown& teardown) noexcept { sealed_.forfeit(teardown); }

 private:
  friend class StepLedger;
  friend class PageTable<Kind>;
  explicit ExpiredPage(SealedDevicePage<Kind>&& sealed) : sealed_(std::move(sealed)) {}

  SealedDevicePage<Kind> sealed_;
};

// The right to a seat.
class [[nodiscard]] SeatHold : private Handle<Seat, SeatPool> {
 public:
  SeatHold(SeatHold&&) noexcept = default;
  SeatHold& operator=(SeatHold&&) = default;  // NOLINT(bugprone-exception-escape)
  SeatHold(const SeatHold&) = delete;
  SeatHold& operator=(const SeatHold&) = delete;
  ~SeatHold() = default;

  [[nodiscard]] Seat seat() const { return live_id(); }
  void forfeit(const Teardown&) noexcept { this->abandon(); }

 private:
  friend class SeatPool;
  explicit SeatHold(Seat seat) : Handle<Seat, SeatPool>(seat) {}
};

// A step in flight reads and writes through this seat's page table, or a transfer does. Only that step's result, or
// that transfer's acknowledgement, retires it.
class [[nodiscard]] Lease : private Handle<Seat, StepLedger> {
 public:
  Lease(Lease&&) noexcept = default;
  Lease& operator=(Lease&&) = default;  // NOLINT(bugprone-exception-escape)
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() = default;

  [[nodiscard]] Seat seat() const { return live_id(); }
  void forfeit(const Teardown&) noexcept { this->abandon(); }

 private:
  friend class StepLedger;
  explicit Lease(Seat seat) : Handle<Seat, StepLedger>(seat) {}
};

}  // namespace tokenspeed::control
