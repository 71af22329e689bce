// SPDX-License-Identifier: Apache-2.0
// Random numbers that are the same with every compiler and library (std distributions are not).
#pragma once

#include <cstdint>

namespace tokenspeed::control::sim {

// Spreads every input bit over the output; the finaliser of a counter-based generator.
[[nodiscard]] constexpr std::uint64_t scramble(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27U)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31U);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(scramble(seed)) {}

  [[nodiscard]] std::uint64_t next() { return scramble(state_++); }

  // From low to high, both included.
  [[nodiscard]] std::int64_t between(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(high - low + 1));
  }

  [[nodiscard]] bool chance(std::int64_t percent) { return between(1, 100) <= percent; }

 private:
  std::uint64_t state_;
};

}  // namespace tokenspeed::control::sim
