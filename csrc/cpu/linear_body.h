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

// accumulator[row][output] += x[row] . weight[output] over `size` inputs, for kRows x kOutputs outputs.
template <int kRows, int kOutputs, typename W>
TOKENSPEED_INLINE void dot_tile(const float* x, std::int64_t x_stride, const W* weight, std::int64_t weight_stride,
                                std::int64_t size, float* accumulator, std::int64_t accumulator_stride) {
  Vec sums[kRows][kOutputs] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Vec weights[kOutputs];
#pragma GCC unroll 8
    for (int n = 0; n < kOutputs; ++n) {
      weights[n] = load(weight + n * weight_stride + i);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec inputs = load(x + m * x_stride + i);
#pragma GCC unroll 8
      for (int n = 0; n < kOutputs; ++n) {
        sums[m][n] += inputs * weights[n];
      }
    }
  }
  if (i < size) {
    for (int m = 0; m < kRows; ++m) {
      const Vec inputs = load_some(x + m * x_stride + i, size - i);
      for (int n = 0; n < kOutputs; ++n) {
        sums[m][n] += inputs * load_some(weight + n * weight_stride + i, size - i);
      }
    }
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

  template <int kRows, int kOutputs>
  void tiles(std::int64_t row, std::int64_t first_output, std::int64_t num_outputs, std::int64_t input,
             float* accumulator) const {
    const std::int64_t size = args.num_inputs - input < kInputBlock ? args.num_inputs - input : kInputBlock;
    const float* inputs = x + row * x_stride + input;
    const T* weight = static_cast<const T*>(args.weight) + first_output * args.weight_stride + input;
    std::int64_t n = 0;
    for (; n + kOutputs <= num_outputs; n += kOutputs) {
      dot_tile<kRows, kOutputs>(inputs, x_stride, weight + n * args.weight_stride, args.weight_stride, size,
                                accumulator + n, output_block);
    }
    for (; n < num_outputs; ++n) {
      dot_tile<kRows, 1>(inputs, x_stride, weight + n * args.weight_stride, args.weight_stride, size, accumulator + n,
                         output_block);
    }
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
      std::int64_t row = 0;
      for (; row + 4 <= num_rows; row += 4) {
        tiles<4, 3>(first_row + row, first_output, num_outputs, input, sums + row * output_block);
      }
      float* rest = sums + row * output_block;
      switch (num_rows - row) {
        case 3: tiles<3, 3>(first_row + row, first_output, num_outputs, input, rest); break;
        case 2: tiles<2, 4>(first_row + row, first_output, num_outputs, input, rest); break;
        case 1: tiles<1, 8>(first_row + row, first_output, num_outputs, input, rest); break;
        default: break;
      }
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

// Inputs as floats: themselves, or a copy in the caller's scratch.
TOKENSPEED_INLINE const float* widened(const LinearArgs& args) {
  if (args.dtype == DType::kFloat32) {
    return static_cast<const float*>(args.x);
  }
  float* copy = scratch(1, static_cast<std::size_t>(args.num_rows * args.num_inputs));
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const Bf16* source = static_cast<const Bf16*>(args.x) + row * args.x_stride;
    float* target = copy + row * args.num_inputs;
    for_vectors(args.num_inputs,
                [&](std::int64_t i, int count) { store_upto(target + i, load_upto(source + i, count), count); });
  }
  return copy;
}

template <typename T>
void linear_of(const LinearArgs& args) {
  const std::int64_t x_stride = args.dtype == DType::kFloat32 ? args.x_stride : args.num_inputs;
  // One row reads each weight once: blocks only have to be large enough to be worth claiming.
  const std::int64_t output_block = args.num_rows > 4 ? kOutputBlock : (args.num_outputs < 2048 ? 32 : 128);
  LinearJob<T> job{args, widened(args), x_stride, (args.num_outputs + output_block - 1) / output_block, output_block};
  const std::int64_t num_row_blocks = (args.num_rows + kRowBlock - 1) / kRowBlock;
  parallel(num_row_blocks * job.num_output_blocks, job);
}

void linear(const LinearArgs& args) {
  args.dtype == DType::kFloat32 ? linear_of<float>(args) : linear_of<Bf16>(args);
}

}  // namespace
}  // namespace tokenspeed::cpu
