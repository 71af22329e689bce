// SPDX-License-Identifier: Apache-2.0
// Matrix product with the weight as it lies in the checkpoint: every output is a dot product along contiguous inputs.
// Its additions happen in one order, whatever the number of rows: a block of kInputBlock inputs in kLanes partial sums,
// then the blocks one after another. So a row's result does not depend on the batch it came in.
#pragma once

#include "simd.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kInputBlock = 512;
constexpr std::int64_t kRowBlock = 96;
constexpr std::int64_t kOutputBlock = 24;

constexpr std::int64_t kUnpackRows = 16;  // rows from which a panel of bf16 is widened once for all
constexpr std::int64_t kCacheLine = 64;

// How weights become floats: kStep of them at a time, in kVecs vectors. bf16 pairs are split into the even and the odd
// elements, which takes one instruction each; the inputs are laid out to match (see widened).
template <typename W>
struct Unpack;

template <>
struct Unpack<float> {
  static constexpr int kVecs = 1;
  static constexpr int kStep = kLanes;
  TOKENSPEED_INLINE Vec part(const float* source, int /*vec*/) { return load(source); }
};

template <>
struct Unpack<Bf16> {
  static constexpr int kVecs = 2;
  static constexpr int kStep = 2 * kLanes;
  TOKENSPEED_INLINE Vec part(const Bf16* source, int vec) {
    VecBits bits;
    __builtin_memcpy(&bits, source, sizeof(bits));
    return reinterpret_cast<Vec>(vec == 0 ? bits << 16 : bits & 0xFFFF0000U);
  }
};

// `size` elements as floats in the order of Unpack, zeros up to a multiple of its step.
TOKENSPEED_INLINE void unpack_row(const Bf16* source, std::int64_t size, float* target) {
  constexpr std::int64_t kStep = Unpack<Bf16>::kStep;
  for (std::int64_t i = 0; i < size; i += kStep) {
    Bf16 padded[kStep] = {};
    const std::int64_t left = size - i < kStep ? size - i : kStep;
    const Bf16* pairs = source + i;
    if (left < kStep) {
      __builtin_memcpy(padded, pairs, static_cast<std::size_t>(left) * sizeof(Bf16));
      pairs = padded;
    }
    store(target + i, Unpack<Bf16>::part(pairs, 0));
    store(target + i + kLanes, Unpack<Bf16>::part(pairs, 1));
  }
}

template <int kRows, int kOutputs, typename W>
TOKENSPEED_INLINE void dot_step(const float* x, std::int64_t x_stride, const W* weight, std::int64_t weight_stride,
                                Vec (&sums)[kRows][kOutputs]) {
#pragma GCC unroll 2
  for (int vec = 0; vec < Unpack<W>::kVecs; ++vec) {
    Vec weights[kOutputs];
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; ++n) {
      weights[n] = Unpack<W>::part(weight + n * weight_stride, vec);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec inputs = load(x + m * x_stride + vec * kLanes);
#pragma GCC unroll 8
      for (int n = 0; n < kOutputs; ++n) {
        sums[m][n] = multiply_add(inputs, weights[n], sums[m][n]);
      }
    }
  }
}

// accumulator[row][output] += x[row] . weight[output] over `size` inputs, for kRows x kOutputs outputs.
// kFetch: ask for the next tile's weights meanwhile; rows are too short for the hardware to notice the pattern.
template <int kRows, int kOutputs, bool kFetch, typename W>
TOKENSPEED_INLINE void dot_tile(const float* x, std::int64_t x_stride, const W* weight, std::int64_t weight_stride,
                                std::int64_t size, float* accumulator, std::int64_t accumulator_stride) {
  constexpr std::int64_t kLine = kCacheLine / static_cast<std::int64_t>(sizeof(W));
  constexpr int kStep = Unpack<W>::kStep;
  Vec sums[kRows][kOutputs] = {};
  std::int64_t i = 0;
  for (; i + kStep <= size; i += kStep) {
    if (kFetch && i % kLine == 0) {
#pragma GCC unroll 8
      for (int n = 0; n < kOutputs; ++n) {
        __builtin_prefetch(weight + (n + kOutputs) * weight_stride + i);
      }
    }
    dot_step(x + i, x_stride, weight + i, weight_stride, sums);
  }
  if (i < size) {
    float inputs[kRows * kStep] = {};
    W weights[kOutputs * kStep] = {};
    for (int m = 0; m < kRows; ++m) {
      for (std::int64_t k = 0; k < (Unpack<W>::kVecs == 1 ? size - i : kStep); ++k) {
        inputs[m * kStep + k] = x[m * x_stride + i + k];
      }
    }
    for (int n = 0; n < kOutputs; ++n) {
      for (std::int64_t k = 0; k < size - i; ++k) {
        weights[n * kStep + k] = weight[n * weight_stride + i + k];
      }
    }
    dot_step(inputs, kStep, weights, kStep, sums);
  }
  if constexpr (kRows * kOutputs == 8) {
    const auto& flat = reinterpret_cast<const Vec(&)[8]>(sums);
    const Vec8 totals = sum_each(flat);
    for (int i8 = 0; i8 < 8; ++i8) {
      accumulator[(i8 / kOutputs) * accumulator_stride + i8 % kOutputs] += totals[i8];
    }
  } else {
    for (int m = 0; m < kRows; ++m) {
      for (int n = 0; n < kOutputs; ++n) {
        accumulator[m * accumulator_stride + n] += sum(sums[m][n]);
      }
    }
  }
}

template <typename T>
struct LinearJob {
  const LinearArgs& args;
  const float* x;
  std::int64_t x_stride;
  std::int64_t num_output_blocks, output_block;

  // Where the weights of an input block are, and how many inputs it has.
  template <typename W>
  struct Panel {
    const W* weight;
    std::int64_t stride, num_outputs, size;
  };

  template <int kRows, int kOutputs, bool kFetch, typename W>
  void tiles(const float* inputs, const Panel<W>& panel, float* sums) const {
    std::int64_t n = 0;
    for (; n + kOutputs <= panel.num_outputs; n += kOutputs) {
      dot_tile<kRows, kOutputs, kFetch>(inputs, x_stride, panel.weight + n * panel.stride, panel.stride, panel.size,
                                        sums + n, output_block);
    }
    for (; n < panel.num_outputs; ++n) {
      dot_tile<kRows, 1, false>(inputs, x_stride, panel.weight + n * panel.stride, panel.stride, panel.size, sums + n,
                                output_block);
    }
  }

  template <typename W>
  void multiply(const float* inputs, std::int64_t num_rows, const Panel<W>& panel, float* sums) const {
    std::int64_t row = 0;
    if (num_rows >= 4) {
      tiles<4, 3, true>(inputs, panel, sums);
      row = 4;
    }
    for (; row + 4 <= num_rows; row += 4) {
      tiles<4, 3, false>(inputs + row * x_stride, panel, sums + row * output_block);
    }
    const float* rest = inputs + row * x_stride;
    switch (num_rows - row) {
      case 3:
        tiles<3, 3, true>(rest, panel, sums + row * output_block);
        break;
      case 2:
        tiles<2, 4, true>(rest, panel, sums + row * output_block);
        break;
      case 1:
        tiles<1, 8, true>(rest, panel, sums + row * output_block);
        break;
      default:
        break;
    }
  }

  // The panel as floats in the order of Unpack, padded with zeros: pays where many rows use it.
  static Panel<float> unpacked(const Panel<Bf16>& panel) {
    constexpr std::int64_t kStep = Unpack<Bf16>::kStep;
    const std::int64_t width = (panel.size + kStep - 1) / kStep * kStep;
    float* target = scratch(2, static_cast<std::size_t>(panel.num_outputs * width));
    for (std::int64_t n = 0; n < panel.num_outputs; ++n) {
      unpack_row(panel.weight + n * panel.stride, panel.size, target + n * width);
    }
    return {target, width, panel.num_outputs, width};
  }

  template <typename Out>
  void finish(std::int64_t row, std::int64_t first_output, std::int64_t num_outputs, const float* sums) const {
    const T* bias = args.bias == nullptr ? nullptr : static_cast<const T*>(args.bias) + first_output;
    Out* out = static_cast<Out*>(args.out) + row * args.num_outputs + first_output;
    for_vectors(num_outputs, [&](std::int64_t i, int count) {
      Vec value = load_upto(sums + i, count);
      if (bias != nullptr) {
        value += load_upto(bias + i, count);
      }
      store_upto(out + i, value, count);
    });
  }

  void operator()(std::int64_t item) const {
    const std::int64_t first_row = item / num_output_blocks * kRowBlock;
    const std::int64_t first_output = item % num_output_blocks * output_block;
    const std::int64_t rows_left = args.num_rows - first_row;
    const std::int64_t num_rows = rows_left < kRowBlock ? rows_left : kRowBlock;
    const std::int64_t outputs_left = args.num_outputs - first_output;
    const std::int64_t num_outputs = outputs_left < output_block ? outputs_left : output_block;
    float* sums = scratch(0, static_cast<std::size_t>(num_rows * output_block));
    __builtin_memset(sums, 0, static_cast<std::size_t>(num_rows * output_block) * sizeof(float));
    for (std::int64_t input = 0; input < args.num_inputs; input += kInputBlock) {
      const std::int64_t inputs_left = args.num_inputs - input;
      const Panel<T> panel{static_cast<const T*>(args.weight) + first_output * args.weight_stride + input,
                           args.weight_stride, num_outputs, inputs_left < kInputBlock ? inputs_left : kInputBlock};
      const float* inputs = x + first_row * x_stride + input;
      if constexpr (sizeof(T) == sizeof(Bf16)) {
        if (num_rows >= kUnpackRows) {
          multiply(inputs, num_rows, unpacked(panel), sums);
          continue;
        }
      }
      multiply(inputs, num_rows, panel, sums);
    }
    for (std::int64_t row = 0; row < num_rows; ++row) {
      if (args.out_dtype == DType::kFloat32) {
        finish<float>(first_row + row, first_output, num_outputs, sums + row * output_block);
      } else {
        finish<Bf16>(first_row + row, first_output, num_outputs, sums + row * output_block);
      }
    }
  }
};

TOKENSPEED_INLINE std::int64_t padded_inputs(const LinearArgs& args) {
  constexpr std::int64_t kStep = Unpack<Bf16>::kStep;
  return (args.num_inputs + kStep - 1) / kStep * kStep;
}

// Inputs as floats: themselves, or a copy in the caller's scratch in the order of Unpack<Bf16>, padded with zeros.
TOKENSPEED_INLINE const float* widened(const LinearArgs& args) {
  if (args.dtype == DType::kFloat32) {
    return static_cast<const float*>(args.x);
  }
  const std::int64_t stride = padded_inputs(args);
  float* copy = scratch(1, static_cast<std::size_t>(args.num_rows * stride));
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    unpack_row(static_cast<const Bf16*>(args.x) + row * args.x_stride, args.num_inputs, copy + row * stride);
  }
  return copy;
}

// One row reads each weight once: blocks only have to be large enough to be worth claiming.
TOKENSPEED_INLINE std::int64_t output_block_of(const LinearArgs& args) {
  return args.num_rows > 4 ? kOutputBlock : (args.num_outputs < 2048 ? 32 : 128);
}

// x: the inputs as floats, x_stride apart.
template <typename T>
TOKENSPEED_INLINE LinearJob<T> linear_job(const LinearArgs& args, const float* x, std::int64_t x_stride) {
  const std::int64_t output_block = output_block_of(args);
  return {args, x, x_stride, (args.num_outputs + output_block - 1) / output_block, output_block};
}

TOKENSPEED_INLINE std::int64_t num_linear_items(const LinearArgs& args) {
  const std::int64_t output_block = output_block_of(args);
  return (args.num_rows + kRowBlock - 1) / kRowBlock * ((args.num_outputs + output_block - 1) / output_block);
}

template <typename T>
void linear_of(const LinearArgs& args) {
  auto job = linear_job<T>(args, widened(args), args.dtype == DType::kFloat32 ? args.x_stride : padded_inputs(args));
  parallel(num_linear_items(args), job);
}

void linear(const LinearArgs& args) { args.dtype == DType::kFloat32 ? linear_of<float>(args) : linear_of<Bf16>(args); }

}  // namespace
}  // namespace tokenspeed::cpu
