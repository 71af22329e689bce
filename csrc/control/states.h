// SPDX-License-Identifier: Apache-2.0
// The states of a sequence. Each owns what it may use as private members; a state that owns a seat or pages can only be
// made from a Grant, only admission mints a Grant, and only a transition makes a state.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>

#include "event.h"
#include "partition.h"
#include "types.h"

namespace tokenspeed::control {

class AdmissionKey {
  friend class Admission;
  AdmissionKey() = default;
};

// A seat, and the pages that its tables name.
class [[nodiscard]] Grant {
 public:
  Grant(AdmissionKey, Partition& home, SeatHold&& seat, Tables&& tables)
      : home_(&home), seat_(std::move(seat)), tables_(std::move(tables)) {}
  Grant(Grant&&) noexcept = default;
  Grant& operator=(Grant&&) = delete;
  Grant(const Grant&) = delete;
  Grant& operator=(const Grant&) = delete;
  ~Grant() = default;

  [[nodiscard]] Seat seat() const { return seat_.seat(); }
  [[nodiscard]] Partition& home() const { return *home_; }
  [[nodiscard]] Tables& tables() { return tables_; }
  [[nodiscard]] const Tables& tables() const { return tables_; }

  // The ways out, once no step and no transfer in flight uses the seat.
  void give_back(const Retirement& retirement) { home_->take_back(std::move(seat_), std::move(tables_), retirement); }
  [[nodiscard]] HeldPages hold(Tokens len, const Retirement& retirement) {
    return home_->hold(std::move(seat_), std::move(tables_), len, retirement);
  }
  void forfeit(const Teardown& teardown) noexcept;

 private:
  Partition* home_;
  SeatHold seat_;
  Tables tables_;
};

class StateKey {
  friend struct Transitions;
  StateKey() = default;
};

// What follows when nothing in flight uses the seat any more.
enum class Fate : std::uint8_t { kPreempted, kDone, kHeld, kSending };

struct Queued {
  static constexpr const char* kName = "Queued";
};
struct Preempted {
  static constexpr const char* kName = "Preempted";
};
struct Done {
  static constexpr const char* kName = "Done";
  FinishCode reason = FinishCode::kNone;
};

// A state that owns a seat and pages.
class Seated {
 public:
  Seated(StateKey, Grant&& grant) : grant_(std::move(grant)) {}

 protected:
  friend struct Transitions;
  friend class Sequence;
  Grant grant_;
};

// Its pages are being filled from the host tier or by a peer.
class AwaitingTransfer : public Seated {
 public:
  static constexpr const char* kName = "AwaitingTransfer";
  using Seated::Seated;
};
// The prompt (and, after a preemption, what was generated) is being computed.
class Prefilling : public Seated {
 public:
  static constexpr const char* kName = "Prefilling";
  using Seated::Seated;
};
// All known tokens are computed or planned; each step adds some.
class Decoding : public Seated {
 public:
  static constexpr const char* kName = "Decoding";
  using Seated::Seated;
};
// It has ended, and a peer reads its pages.
class SendingKv : public Seated {
 public:
  static constexpr const char* kName = "SendingKv";
  SendingKv(StateKey key, Grant&& grant, FinishCode reason, bool holds)
      : Seated(key, std::move(grant)), reason_(reason), holds_(holds) {}

 private:
  friend struct Transitions;
  friend class Sequence;
  FinishCode reason_;
  bool holds_;
};
// It has ended or gives way, and waits until nothing in flight uses its seat.
class Draining : public Seated {
 public:
  static constexpr const char* kName = "Draining";
  Draining(StateKey key, Grant&& grant, Fate fate, FinishCode reason, bool holds)
      : Seated(key, std::move(grant)), fate_(fate), reason_(reason), holds_(holds) {}

 private:
  friend struct Transitions;
  friend class Sequence;
  Fate fate_;
  FinishCode reason_;
  bool holds_;  // after sending
};
// It has ended well and keeps its pages for the session's next turn.
class Held {
 public:
  static constexpr const char* kName = "Held";
  Held(StateKey, HeldPages&& pages, FinishCode reason) : pages_(std::move(pages)), reason_(reason) {}

 private:
  friend struct Transitions;
  friend class Sequence;
  HeldPages pages_;
  FinishCode reason_;
};

using State = std::variant<Queued, AwaitingTransfer, Prefilling, Decoding, Held, Preempted, SendingKv, Draining, Done>;

}  // namespace tokenspeed::control
