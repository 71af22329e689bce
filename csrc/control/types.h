// SPDX-License-Identifier: Apache-2.0
// Strong ids and units: tiers, groups, seats and counts that the compiler will not mix.
#pragma once

#include <compare>
#include <cstdint>
#include <ostream>
#include <type_traits>

namespace tokenspeed::control {

template <class Tag, class Int>
class StrongId {
 public:
  using Value = Int;

  constexpr StrongId() = default;
  constexpr explicit StrongId(Int value) : value_(value) {}

  [[nodiscard]] constexpr Int value() const { return value_; }
  constexpr auto operator<=>(const StrongId&) const = default;

  friend std::ostream& operator<<(std::ostream& out, const StrongId& id) { return out << id.value_; }

 private:
  Int value_ = 0;
};

// A count with a unit. Adding tokens to blocks does not compile.
template <class Tag>
class Quantity {
 public:
  constexpr Quantity() = default;
  constexpr explicit Quantity(std::int64_t value) : value_(value) {}

  [[nodiscard]] constexpr std::int64_t value() const { return value_; }
  constexpr auto operator<=>(const Quantity&) const = default;

  constexpr Quantity& operator+=(Quantity other) {
    value_ += other.value_;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity other) {
    value_ -= other.value_;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) { return a += b; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) { return a -= b; }
  friend std::ostream& operator<<(std::ostream& out, Quantity quantity) { return out << quantity.value_; }

 private:
  std::int64_t value_ = 0;
};

using Tokens = Quantity<struct TokensTag>;
using Blocks = Quantity<struct BlocksTag>;

// Seat: a row of the device's per-sequence state (last token, length, page table).
using Seat = StrongId<struct SeatTag, std::int32_t>;
// Group: a cache group, that is layers which share one page table.
using Group = StrongId<struct GroupTag, std::int32_t>;
// Slot: where the scheduler keeps a sequence. Never leaves the control plane.
using Slot = StrongId<struct SlotTag, std::int32_t>;
// A rank of data-parallel attention: it has seats, pools and indices of its own, and a sequence lives in one.
using PartitionId = StrongId<struct PartitionTag, std::int32_t>;
using StepId = StrongId<struct StepTag, std::int64_t>;
using LeaseId = StrongId<struct LeaseTag, std::int64_t>;

namespace tier {
struct Device {};
struct Host {};
}  // namespace tier

namespace kind {
struct FullAttention {};
struct SlidingWindow {};
struct RecurrentState {};
}  // namespace kind

// A page of one tier and one kind of group. Page 0 is the null page: never allocated, padded rows point at it.
template <class Tier, class Kind>
class Page {
 public:
  constexpr Page() = default;
  constexpr explicit Page(std::int32_t value) : value_(value) {}

  [[nodiscard]] constexpr std::int32_t value() const { return value_; }
  [[nodiscard]] constexpr bool is_null() const { return value_ == 0; }
  constexpr auto operator<=>(const Page&) const = default;

  friend std::ostream& operator<<(std::ostream& out, Page page) { return out << page.value_; }

 private:
  std::int32_t value_ = 0;
};

template <class Kind>
using DevicePage = Page<tier::Device, Kind>;
template <class Kind>
using HostPage = Page<tier::Host, Kind>;

// One T for each kind of group. What handles all kinds goes through each(); what mixes two of them does not compile.
template <template <class> class T>
struct PerKind {
  T<kind::FullAttention> full;
  T<kind::SlidingWindow> window;
  T<kind::RecurrentState> recurrent;

  template <class F>
  void each(F&& visit) {
    visit(full);
    visit(window);
    visit(recurrent);
  }
  template <class F>
  void each(F&& visit) const {
    visit(full);
    visit(window);
    visit(recurrent);
  }
  template <class Kind>
  [[nodiscard]] T<Kind>& of() {
    if constexpr (std::is_same_v<Kind, kind::FullAttention>) {
      return full;
    } else if constexpr (std::is_same_v<Kind, kind::SlidingWindow>) {
      return window;
    } else {
      return recurrent;
    }
  }
};

// An index is reused, an (index, generation) pair never.
struct RequestKey {
  std::int32_t index = 0;
  std::int32_t generation = 0;

  bool operator==(const RequestKey&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const RequestKey& key) {
    return out << key.index << '#' << key.generation;
  }
};

}  // namespace tokenspeed::control
