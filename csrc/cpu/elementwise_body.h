// SPDX-License-Identifier: Apache-2.0
// Normalisation, rotation, gating and the scatter of K and V: a row at a time, each row independent of the others.
#pragma once

#include "hadamard.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kSerialSize = 16384;  // elements below which waking a thread costs more than it saves
constexpr float kLeastHead = 1e-30F;  // whose codes are zeros where all is smaller: its scale may be no normal number

// Calls body(row) for each row, on several threads where there is enough to do.
template <typename Body>
TOKENSPEED_INLINE void for_rows(std::int64_t num_rows, std::int64_t row_size, Body body) {
  if (num_rows * row_size < kSerialSize) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      body(row);
    }
    return;
  }
  const std::int64_t rows_each = (kSerialSize / 2 + row_size - 1) / row_size;
  auto chunk = [&](std::int64_t item) {
    const std::int64_t last = (item + 1) * rows_each < num_rows ? (item + 1) * rows_each : num_rows;
    for (std::int64_t row = item * rows_each; row < last; ++row) {
      body(row);
    }
  };
  parallel((num_rows + rows_each - 1) / rows_each, chunk);
}

template <typename T>
TOKENSPEED_INLINE void rms_norm_row(const RmsNormArgs& args, const T* x, T* residual, T* out) {
  Vec squares = Vec{};
  const T* y = residual == nullptr ? x : residual;
  for_vectors(args.size, [&](std::int64_t i, int count) {
    if (residual != nullptr) {
      store_upto(residual + i, load_upto(x + i, count) + load_upto(residual + i, count), count);
    }
    const Vec value = load_upto(y + i, count);
    squares += value * value;
  });
  const float mean = sum(squares) / static_cast<float>(args.size);
  const float scale = 1.0F / __builtin_sqrtf(mean + args.eps);
  const T* weight = static_cast<const T*>(args.weight);
  for_vectors(args.size, [&](std::int64_t i, int count) {
    const Vec factor = load_upto(weight + i, count) + args.weight_offset;
    store_upto(out + i, load_upto(y + i, count) * scale * factor, count);
  });
}

template <typename T>
void rms_norm_of(const RmsNormArgs& args) {
  for_rows(args.num_outer * args.num_inner, args.size, [&](std::int64_t row) {
    const std::int64_t outer = row / args.num_inner;
    const std::int64_t inner = row % args.num_inner;
    const T* x = static_cast<const T*>(args.x) + outer * args.outer_stride + inner * args.inner_stride;
    T* residual = args.residual == nullptr ? nullptr : static_cast<T*>(args.residual) + outer * args.residual_stride;
    rms_norm_row(args, x, residual, static_cast<T*>(args.out) + row * args.size);
  });
}

void rms_norm(const RmsNormArgs& args) {
  args.dtype == DType::kFloat32 ? rms_norm_of<float>(args) : rms_norm_of<Bf16>(args);
}

// Turns `count` pairs that lie side by side.
template <typename T>
TOKENSPEED_INLINE void turn_neighbours(T* x, Vec cosine, Vec sine, int count) {
  T firsts[kLanes] = {};
  T seconds[kLanes] = {};
  for (int pair = 0; pair < count; ++pair) {
    firsts[pair] = x[2 * pair];
    seconds[pair] = x[2 * pair + 1];
  }
  const Vec first = load(firsts);
  const Vec second = load(seconds);
  store(firsts, first * cosine - second * sine);
  store(seconds, second * cosine + first * sine);
  for (int pair = 0; pair < count; ++pair) {
    x[2 * pair] = firsts[pair];
    x[2 * pair + 1] = seconds[pair];
  }
}

template <typename T>
void rotary_of(const RotaryArgs& args) {
  const std::int64_t half = args.rotary_dim / 2;
  for_rows(args.num_tokens, args.num_heads * args.rotary_dim, [&](std::int64_t token) {
    const float* cosines = args.table + args.positions[token] * args.table_stride;
    const float* sines = cosines + half;
    for (std::int64_t head = 0; head < args.num_heads; ++head) {
      T* x = static_cast<T*>(args.x) + token * args.token_stride + head * args.head_stride;
      for_vectors(half, [&](std::int64_t i, int count) {
        const Vec cosine = load_upto(cosines + i, count);
        const Vec sine = load_upto(sines + i, count);
        if (args.is_interleaved) {
          turn_neighbours(x + 2 * i, cosine, sine, count);
          return;
        }
        const Vec first = load_upto(x + i, count);
        const Vec second = load_upto(x + half + i, count);
        store_upto(x + i, first * cosine - second * sine, count);
        store_upto(x + half + i, second * cosine + first * sine, count);
      });
    }
  });
}

void rotary(const RotaryArgs& args) { args.dtype == DType::kFloat32 ? rotary_of<float>(args) : rotary_of<Bf16>(args); }

TOKENSPEED_INLINE Vec silu(Vec z) { return z / (exp(-z) + 1.0F); }

// 0.5 z (1 + tanh(u)) is z / (1 + exp(-2 u)).
TOKENSPEED_INLINE Vec gelu_tanh(Vec z) {
  const Vec twice = (z + z * z * z * 0.044715F) * 1.5957691216057308F;
  return z / (exp(-twice) + 1.0F);
}

// x: gate, and then as much of up. In one place, so that the compiler joins products and sums alike for every caller.
template <typename T>
__attribute__((noinline)) void gated_row(Activation activation, const T* x, std::int64_t size, T* out) {
  for_vectors(size, [&](std::int64_t i, int count) {
    const Vec z = load_upto(x + i, count);
    const Vec activated = activation == Activation::kSilu ? silu(z) : gelu_tanh(z);
    store_upto(out + i, activated * load_upto(x + size + i, count), count);
  });
}

template <typename T>
void gated_of(const GatedArgs& args) {
  for_rows(args.num_rows, args.size, [&](std::int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
    gated_row(args.activation, x, args.size, static_cast<T*>(args.out) + row * args.size);
  });
}

void gated(const GatedArgs& args) { args.dtype == DType::kFloat32 ? gated_of<float>(args) : gated_of<Bf16>(args); }

// To the nearest whole number, of two to the even one, of numbers below 2^22. The sign is taken off as a bit: otherwise
// the compiler may join the product before this and the sum here, and so round once where it should twice.
TOKENSPEED_INLINE VecInt nearest_whole(Vec value) {
  const VecInt negative = as<VecInt>(value) >> 31;
  const Vec size = as<Vec>(as<VecInt>(value) & 0x7FFFFFFF);
  return ((as<VecInt>(size + 12582912.0F) - 0x4B400000) ^ negative) - negative;
}

// The largest number of whole vectors without its sign; NaN or infinite where one of them is.
TOKENSPEED_INLINE float largest_in(const float* source, std::int64_t width) {
  VecInt most = {};
  for (std::int64_t i = 0; i < width; i += kLanes) {
    // Of numbers without a sign the bits are in the same order, and those of what is not finite come last.
    const VecInt bits = as<VecInt>(load(source + i)) & 0x7FFFFFFF;
    most = most > bits ? most : bits;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) {
    largest = most[i] > largest ? most[i] : largest;
  }
  float result;
  __builtin_memcpy(&result, &largest, sizeof(result));
  return result;
}

// A head, transformed, as codes with their scale behind them. That scale is of the head itself: one of the transformed
// head would have to be divided by `run` twice over. What is not finite makes it NaN, and so whatever attends the
// token.
template <typename T>
TOKENSPEED_INLINE void write_codes(const T* source, std::int64_t head_dim, std::int8_t* target) {
  const std::int64_t width = (head_dim + kLanes - 1) / kLanes * kLanes;
  const std::int64_t run = hadamard_run(head_dim);
  float* head = scratch(0, static_cast<std::size_t>(width));
  widen(source, head, head_dim, width);
  hadamard(head, width, run);
  const float largest = largest_in(head, width);
  const bool is_finite = largest < __builtin_inff();
  const float scale = is_finite ? largest / 127.0F / static_cast<float>(run) : __builtin_nanf("");
  __builtin_memcpy(target + head_dim, &scale, sizeof(scale));
  if (!is_finite || largest < kLeastHead) {
    __builtin_memset(target, 0, static_cast<std::size_t>(head_dim));
    return;
  }
  const float inverse = 127.0F / largest;
  for_vectors(head_dim, [&](std::int64_t i, int count) {
    const VecInt codes = nearest_whole(load(head + i) * inverse);
    const VecByte bytes = __builtin_convertvector(codes, VecByte);
    __builtin_memcpy(target + i, &bytes, static_cast<std::size_t>(count));
  });
}

template <typename T, typename N>
void kv_write_of(const KvWriteArgs& args) {
  for (std::int64_t token = 0; token < args.num_tokens; ++token) {
    const std::int64_t slot = args.slots[token];
    const std::int64_t place = slot / args.block_size * args.page_stride + slot % args.block_size * args.slot_stride;
    for (std::int64_t head = 0; head < args.num_heads; ++head) {
      N* target = static_cast<N*>(args.pages) + place + head * args.page_head_stride;
      const T* source = static_cast<const T*>(args.source) + token * args.token_stride + head * args.head_stride;
      if constexpr (sizeof(N) == 1) {
        write_codes(source, args.head_dim, target);
      } else if constexpr (sizeof(T) == sizeof(N)) {
        __builtin_memcpy(target, source, static_cast<std::size_t>(args.head_dim) * sizeof(T));
      } else {
        for_vectors(args.head_dim,
                    [&](std::int64_t i, int count) { store_upto(target + i, load_upto(source + i, count), count); });
      }
    }
  }
}

void kv_write(const KvWriteArgs& args) {
  const bool is_wide = args.dtype == DType::kFloat32;
  switch (args.page_dtype) {
    case DType::kFloat32:
      return kv_write_of<float, float>(args);
    case DType::kBFloat16:
      return is_wide ? kv_write_of<float, Bf16>(args) : kv_write_of<Bf16, Bf16>(args);
    case DType::kInt8:
      return is_wide ? kv_write_of<float, std::int8_t>(args) : kv_write_of<Bf16, std::int8_t>(args);
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
