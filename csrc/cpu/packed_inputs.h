// SPDX-License-Identifier: Apache-2.0
// Rows of activations as bytes, 32 inputs to a scale. Knows no weight.
#pragma once

#include "packed_simd.h"

namespace tokenspeed::cpu {
namespace {

// What 32 activations are multiplied by, and their sums: together, and of the first and the second 16.
struct Scale {
  float scale, sum, halves[2];
};

// Rows of activations as bytes: panel_blocks blocks of each row, row after row, then those that follow of each; so that
// what meets one panel lies together.
struct Rows8 {
  std::int8_t* codes;
  Scale* scales;
  std::int64_t num_rows, panel_blocks;

  // From `row` and a panel's block on, up to the end of the panel.
  [[nodiscard]] Rows8 at(std::int64_t row, std::int64_t panel, std::int64_t block) const {
    const std::int64_t place = (panel * num_rows + row) * panel_blocks + block;
    return {codes + place * kBlockInputs, scales + place, num_rows, panel_blocks};
  }
};

TOKENSPEED_INLINE Vec8 load8(const float* source) { return load_vector<Vec8>(source); }

TOKENSPEED_INLINE Vec8 load8(const Bf16* source) {
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  return as<Vec8>(__builtin_convertvector(load_vector<Halves>(source), Words) << 16);
}

// In every lane the largest of all.
TOKENSPEED_INLINE Ints largest_of(Ints value) {
  Ints other = __builtin_shufflevector(value, value, 4, 5, 6, 7, 0, 1, 2, 3);
  value = value > other ? value : other;
  other = __builtin_shufflevector(value, value, 2, 3, 0, 1, 6, 7, 4, 5);
  value = value > other ? value : other;
  other = __builtin_shufflevector(value, value, 1, 0, 3, 2, 5, 4, 7, 6);
  return value > other ? value : other;
}

// In lanes 0 and 4 the sums of the first and the second 16 codes.
TOKENSPEED_INLINE Ints sums_of(SignedBytes codes) {
  Ints sums = pair_products(pair_products(Bytes{} + 1, codes), Shorts{} + 1);
  sums += __builtin_shufflevector(sums, sums, 2, 3, 0, 1, 6, 7, 4, 5);
  return sums + __builtin_shufflevector(sums, sums, 1, 0, 3, 2, 5, 4, 7, 6);
}

// 32 inputs to the nearest of 255 numbers. An input that is not finite makes the scale NaN, and so the results.
template <typename T>
TOKENSPEED_INLINE void quantize_block(const T* source, std::int8_t* codes, Scale& out) {
  typedef std::int8_t Eight __attribute__((vector_size(8)));
  Vec8 values[4];
  Ints most = {};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    values[i] = load8(source + 8 * i);
    // Of numbers without a sign the bits are in the same order, and those of what is not finite come last.
    const Ints size = as<Ints>(values[i]) & 0x7FFFFFFF;
    most = most > size ? most : size;
  }
  const Ints bits = largest_of(most);
  const float largest = as<Vec8>(bits)[0];
  const bool is_finite = bits[0] < 0x7F800000;
  const float inverse = largest > 0.0F && is_finite ? 127.0F / largest : 0.0F;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Eight bytes = __builtin_convertvector(nearest(values[i] * inverse), Eight);
    __builtin_memcpy(codes + 8 * i, &bytes, sizeof(bytes));
  }
  const float scale = is_finite ? largest / 127.0F : __builtin_nanf("");
  const Ints sums = sums_of(load_vector<SignedBytes>(codes));
  const auto first = static_cast<float>(sums[0]);
  const auto second = static_cast<float>(sums[4]);
  out = {scale, scale * (first + second), {scale * first, scale * second}};
}

template <typename T>
void quantize_row(const T* source, std::int64_t num_blocks, const Rows8& rows, std::int64_t row) {
  for (std::int64_t first = 0, panel = 0; first < num_blocks; first += rows.panel_blocks, ++panel) {
    const Rows8 target = rows.at(row, panel, 0);
    const std::int64_t left = num_blocks - first;
    const std::int64_t size = left < rows.panel_blocks ? left : rows.panel_blocks;
    for (std::int64_t block = 0; block < size; ++block, source += kBlockInputs) {
      quantize_block(source, target.codes + block * kBlockInputs, target.scales[block]);
    }
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
