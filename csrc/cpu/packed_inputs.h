// SPDX-License-Identifier: Apache-2.0
// Rows of activations as bytes, 32 inputs to a scale. Knows no weight.
//
// A model has a few channels whose activations are many times the others', so that a few blocks have the largest steps
// by far, and much of a row's rounding error. The largest input of such a block is kept apart, as float32, and the
// others are rounded as if it were zero. Which are is decided by the row alone.
#pragma once

#include "packed_simd.h"

namespace tokenspeed::cpu {
namespace {

// A block's largest input is kept apart where the square of its scale is more than this of those of all the row's, and
// where steps become smaller than three quarters by it. Beyond kApartMost the others are nothing beside it.
constexpr double kApartShare = 1.0 / 12.0;
constexpr float kApartLeast = 127.0F / 0.75F;
constexpr float kApartMost = 1 << 24;

// What 32 activations are multiplied by, and their sums: together, and of the first and the second 16. apart: the place
// of the input that is kept apart, from 1 on, or 0; rest: what that is, in steps.
struct Scale {
  float scale, sum, halves[2], rest;
  std::uint32_t apart;
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

// 32 inputs of a row, and the bits of the largest without its sign, in every lane.
struct Inputs {
  Vec8 values[4];
  Ints largest;
};

TOKENSPEED_INLINE Ints without_sign(Vec8 value) { return as<Ints>(value) & 0x7FFFFFFF; }

TOKENSPEED_INLINE void find_largest(Inputs& inputs) {
  Ints most = {};
#pragma GCC unroll 4
  for (const Vec8 value : inputs.values) {
    // Of numbers without a sign the bits are in the same order, and those of what is not finite come last.
    const Ints size = without_sign(value);
    most = most > size ? most : size;
  }
  inputs.largest = largest_of(most);
}

template <typename T>
TOKENSPEED_INLINE Inputs read_inputs(const T* source) {
  Inputs inputs;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    inputs.values[i] = load8(source + 8 * i);
  }
  find_largest(inputs);
  return inputs;
}

// To the nearest of 255 numbers. An input that is not finite makes the scale NaN, and so the results.
TOKENSPEED_INLINE Scale quantize_block(const Inputs& inputs, std::int8_t* codes) {
  typedef std::int8_t Eight __attribute__((vector_size(8)));
  const float largest = as<Vec8>(inputs.largest)[0];
  const bool is_finite = inputs.largest[0] < 0x7F800000;
  const float inverse = largest > 0.0F && is_finite ? 127.0F / largest : 0.0F;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Eight bytes = __builtin_convertvector(nearest(inputs.values[i] * inverse), Eight);
    __builtin_memcpy(codes + 8 * i, &bytes, sizeof(bytes));
  }
  const float scale = is_finite ? largest / 127.0F : __builtin_nanf("");
  const Ints sums = sums_of(load_vector<SignedBytes>(codes));
  const auto first = static_cast<float>(sums[0]);
  const auto second = static_cast<float>(sums[4]);
  return {scale, scale * (first + second), {scale * first, scale * second}, 0.0F, 0};
}

// The block again without its largest input, the last of several, where that is worth it.
TOKENSPEED_INLINE void keep_apart(Inputs inputs, std::int8_t* codes, Scale& out) {
  const Ints first_places = {1, 2, 3, 4, 5, 6, 7, 8};
  Ints places = {};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Ints is_largest = without_sign(inputs.values[i]) == inputs.largest;
    places = is_largest ? first_places + 8 * i : places;
  }
  const Ints place = largest_of(places);
  Vec8 apart = {};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Ints is_apart = first_places + 8 * i == place;
    apart = is_apart ? inputs.values[i] : apart;
    inputs.values[i] = is_apart ? Vec8{} : inputs.values[i];
  }
  find_largest(inputs);
  const float value = apart[(place[0] - 1) % kFold];
  const float rest = value * 127.0F / as<Vec8>(inputs.largest)[0];
  const float size = rest < 0.0F ? -rest : rest;
  if (!(size > kApartLeast && size < kApartMost)) {
    return;
  }
  out = quantize_block(inputs, codes);
  out.rest = rest;
  out.apart = static_cast<std::uint32_t>(place[0]);
  out.sum += value;
  out.halves[place[0] > kBlockInputs / 2 ? 1 : 0] += value;
}

TOKENSPEED_INLINE double square(float value) { return static_cast<double>(value) * static_cast<double>(value); }

// Calls use(block, codes, scale) with each block of a row.
template <typename Use>
TOKENSPEED_INLINE void each_block(const Rows8& rows, std::int64_t row, std::int64_t num_blocks, Use use) {
  for (std::int64_t block = 0, panel = 0; block < num_blocks; ++panel) {
    const Rows8 target = rows.at(row, panel, 0);
    for (std::int64_t i = 0; i < rows.panel_blocks && block < num_blocks; ++i, ++block) {
      use(block, target.codes + i * kBlockInputs, target.scales[i]);
    }
  }
}

// In one place, so that the compiler joins products and sums alike for every caller.
template <typename T>
__attribute__((noinline)) void quantize_row(const T* source, std::int64_t num_blocks, const Rows8& rows,
                                            std::int64_t row) {
  double all = 0.0;  // in which squares of float32 are exact
  each_block(rows, row, num_blocks, [&](std::int64_t block, std::int8_t* codes, Scale& scale) {
    scale = quantize_block(read_inputs(source + block * kBlockInputs), codes);
    all += square(scale.scale);
  });
  each_block(rows, row, num_blocks, [&](std::int64_t block, std::int8_t* codes, Scale& scale) {
    if (square(scale.scale) > kApartShare * all) {
      keep_apart(read_inputs(source + block * kBlockInputs), codes, scale);
    }
  });
}

}  // namespace
}  // namespace tokenspeed::cpu
