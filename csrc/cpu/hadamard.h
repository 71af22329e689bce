// SPDX-License-Identifier: Apache-2.0
// The Walsh-Hadamard transform of a head. It spreads a channel that is many times the others over all of them, and
// products of two heads are the same after it but for a factor (as in arXiv:2404.00456). Sums and differences alone, in
// an order that is the same for every instruction set.
#pragma once

#include "simd.h"

namespace tokenspeed::cpu {
namespace {

// Numbers that are transformed together: as many as the largest power of two that divides a head.
TOKENSPEED_INLINE std::int64_t hadamard_run(std::int64_t head_dim) { return head_dim & -head_dim; }

// Of lanes i and i + kDistance the sum and the difference.
template <int kDistance>
TOKENSPEED_INLINE Vec add_across(Vec x) {
  constexpr int d = kDistance;
#if TOKENSPEED_LANES == 16
  const Vec other = __builtin_shufflevector(x, x, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d, 8 ^ d, 9 ^ d,
                                            10 ^ d, 11 ^ d, 12 ^ d, 13 ^ d, 14 ^ d, 15 ^ d);
  constexpr VecInt kPlaces = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  const Vec other = __builtin_shufflevector(x, x, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d);
  constexpr VecInt kPlaces = {0, 1, 2, 3, 4, 5, 6, 7};
#endif
  const VecInt negated = ((kPlaces & d) != 0) & INT32_MIN;
  return other + as<Vec>(as<VecInt>(x) ^ negated);
}

// In place, of each run of a head; `width` is head_dim rounded up to vectors. Twice gives `run` times the head.
TOKENSPEED_INLINE void hadamard(float* x, std::int64_t width, std::int64_t run) {
  for (std::int64_t distance = run / 2; distance >= kLanes; distance /= 2) {
    for (std::int64_t first = 0; first < width; first += 2 * distance) {
      for (std::int64_t i = first; i < first + distance; i += kLanes) {
        const Vec a = load(x + i);
        const Vec b = load(x + i + distance);
        store(x + i, a + b);
        store(x + i + distance, a - b);
      }
    }
  }
  if (run == 1) {
    return;
  }
  for (std::int64_t i = 0; i < width; i += kLanes) {
    Vec value = load(x + i);
    if constexpr (kLanes > 8) {
      value = run > 8 ? add_across<8>(value) : value;
    }
    value = run > 4 ? add_across<4>(value) : value;
    value = run > 2 ? add_across<2>(value) : value;
    store(x + i, add_across<1>(value));
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
