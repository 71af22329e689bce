// SPDX-License-Identifier: Apache-2.0
// Vectors of TOKENSPEED_LANES floats in the compiler's own vector types, so that one source serves every instruction
// set. Internal linkage throughout: see kernel_set.h.
#pragma once

#include <cstdint>

#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "kernels.h"
#include "thread_pool.h"

#define TOKENSPEED_INLINE static inline __attribute__((always_inline))

namespace tokenspeed::cpu {
namespace {

constexpr int kLanes = TOKENSPEED_LANES;
constexpr int kFold = 8;  // sums are folded to this many lanes before they are transposed
constexpr float kInfinity = __builtin_inff();

using Bf16 = std::uint16_t;
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t VecInt __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t VecBits __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t VecHalf __attribute__((vector_size(kLanes * 2)));
typedef std::int16_t VecShort __attribute__((vector_size(kLanes * 2)));
typedef std::int8_t VecByte __attribute__((vector_size(kLanes)));
typedef float Vec8 __attribute__((vector_size(kFold * 4)));

template <typename To, typename From>
TOKENSPEED_INLINE To as(From value) {
  return reinterpret_cast<To>(value);
}

// a * b + c, rounded once where the instruction set can. Said aloud for sums: whether the compiler joins a product and
// a sum by itself depends on where the line stands, and with it a result's bits.
template <typename V>
TOKENSPEED_INLINE V multiply_add(V a, V b, V c) {
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) {
    return as<V>(_mm256_fmadd_ps(as<__m256>(a), as<__m256>(b), as<__m256>(c)));
  }
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    return as<V>(_mm512_fmadd_ps(as<__m512>(a), as<__m512>(b), as<__m512>(c)));
  }
#endif
#elif defined(__ARM_FEATURE_FMA)
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(float)); ++i) {
    c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return c;
#else
  return a * b + c;
#endif
}

TOKENSPEED_INLINE Vec splat(float value) { return value - Vec{}; }

TOKENSPEED_INLINE Vec load(const float* source) {
  Vec result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}

// The compiler widens a vector in two halves that it puts together again, unless it is told how. Its own header warns
// of the form without a mask.
TOKENSPEED_INLINE VecBits widened(const Bf16* source) {
  VecHalf half;
  __builtin_memcpy(&half, source, sizeof(half));
#if TOKENSPEED_LANES == 16 && defined(__AVX512F__)
  return as<VecBits>(_mm512_maskz_cvtepu16_epi32(0xFFFF, as<__m256i>(half)));
#elif TOKENSPEED_LANES == 8 && defined(__AVX2__)
  return as<VecBits>(_mm256_cvtepu16_epi32(as<__m128i>(half)));
#else
  return __builtin_convertvector(half, VecBits);
#endif
}

TOKENSPEED_INLINE Vec load(const Bf16* source) { return as<Vec>(widened(source) << 16); }

TOKENSPEED_INLINE Vec load(const std::int8_t* source) {
#if TOKENSPEED_LANES == 16 && defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  const VecInt wide = as<VecInt>(_mm512_maskz_cvtepi8_epi32(0xFFFF, bytes));
#elif TOKENSPEED_LANES == 8 && defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  const VecInt wide = as<VecInt>(_mm256_cvtepi8_epi32(bytes));
#else
  VecByte bytes;
  __builtin_memcpy(&bytes, source, sizeof(bytes));
  // In two steps: the compiler takes numbers one by one where they become four times as wide.
  const VecInt wide = __builtin_convertvector(__builtin_convertvector(bytes, VecShort), VecInt);
#endif
  return __builtin_convertvector(wide, Vec);
}

TOKENSPEED_INLINE void store(float* target, Vec value) { __builtin_memcpy(target, &value, sizeof(value)); }

// Rounds to nearest even; NaN stays NaN.
TOKENSPEED_INLINE void store(Bf16* target, Vec value) {
  const VecBits bits = reinterpret_cast<VecBits>(value);
  const VecBits rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  const VecBits is_nan = reinterpret_cast<VecBits>((bits & 0x7FFFFFFFU) > 0x7F800000U);
  const VecHalf half = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7FC0U), VecHalf);
  __builtin_memcpy(target, &half, sizeof(half));
}

// The highest of eight numbers.
TOKENSPEED_INLINE float highest_of(Vec8 most) {
  Vec8 other = __builtin_shufflevector(most, most, 4, 5, 6, 7, 0, 1, 2, 3);
  most = most > other ? most : other;
  other = __builtin_shufflevector(most, most, 2, 3, 0, 1, 6, 7, 4, 5);
  most = most > other ? most : other;
  return most[0] > most[1] ? most[0] : most[1];
}

TOKENSPEED_INLINE float to_float(float value) { return value; }

TOKENSPEED_INLINE float to_float(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

TOKENSPEED_INLINE Bf16 to_bf16(float value) {
  Bf16 lanes[kLanes];
  store(lanes, splat(value));
  return lanes[0];
}

// The first `count` lanes from memory, zeros in the others.
template <typename T>
TOKENSPEED_INLINE Vec load_some(const T* source, std::int64_t count) {
  T buffer[kLanes] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    buffer[i] = source[i];
  }
  return load(buffer);
}

template <typename T>
TOKENSPEED_INLINE void store_some(T* target, Vec value, std::int64_t count) {
  T buffer[kLanes];
  store(buffer, value);
  for (std::int64_t i = 0; i < count; ++i) {
    target[i] = buffer[i];
  }
}

// Calls body(offset, count) for each vector of [0, size); count is kLanes except in the last call.
template <typename Body>
TOKENSPEED_INLINE void for_vectors(std::int64_t size, Body body) {
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    body(i, kLanes);
  }
  if (i < size) {
    body(i, static_cast<int>(size - i));
  }
}

template <typename T>
TOKENSPEED_INLINE Vec load_upto(const T* source, int count) {
  return count == kLanes ? load(source) : load_some(source, count);
}

template <typename T>
TOKENSPEED_INLINE void store_upto(T* target, Vec value, int count) {
  if (count == kLanes) {
    store(target, value);
  } else {
    store_some(target, value, count);
  }
}

// As floats, with zeros up to `width`, whole vectors.
template <typename T>
TOKENSPEED_INLINE void widen(const T* source, float* target, std::int64_t size, std::int64_t width) {
  for_vectors(size, [&](std::int64_t i, int count) { store(target + i, load_upto(source + i, count)); });
  for (std::int64_t i = (size + kLanes - 1) / kLanes * kLanes; i < width; i += kLanes) {
    store(target + i, Vec{});
  }
}

TOKENSPEED_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
TOKENSPEED_INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// e ** x to about one unit in the last place; 0 below -87.3, finite above 88. The polynomial is Cephes' expf.
TOKENSPEED_INLINE Vec exp(Vec x) {
  const Vec clamped = maximum(minimum(x, splat(88.0F)), splat(-87.3F));
  const Vec shift = splat(12582912.0F);
  const Vec n = (clamped * 1.44269504088896341F + shift) - shift;
  const Vec r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  Vec p = splat(1.9875691500e-4F);
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  const VecInt exponent = (__builtin_convertvector(n, VecInt) + 127) << 23;
  const Vec scaled = p * reinterpret_cast<Vec>(exponent);
  return x < splat(-87.3F) ? Vec{} : scaled;
}

TOKENSPEED_INLINE float exp(float x) { return exp(splat(x))[0]; }

TOKENSPEED_INLINE Vec8 fold(Vec value) {
#if TOKENSPEED_LANES == 16
  return __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return value;
#endif
}

// Lane i of the result is the sum of the lanes of sums[i]; every sum is added up in the same order.
TOKENSPEED_INLINE Vec8 sum_each(const Vec (&sums)[8]) {
  Vec8 quads[4];
  for (int i = 0; i < 4; ++i) {
    // Pairs (0,4) (1,5) (2,6) (3,7), so that the last step leaves the sums in order.
    const Vec8 a = fold(sums[i]);
    const Vec8 b = fold(sums[i + 4]);
    quads[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  Vec8 pairs[2];
  for (int i = 0; i < 2; ++i) {
    const Vec8 a = quads[2 * i];
    const Vec8 b = quads[2 * i + 1];
    pairs[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(pairs[0], pairs[1], 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(pairs[0], pairs[1], 1, 3, 9, 11, 5, 7, 13, 15);
}

// The same order of additions as sum_each.
TOKENSPEED_INLINE float sum(Vec value) {
  const Vec8 v = fold(value);
  const float s0 = v[0] + v[4];
  const float s1 = v[1] + v[5];
  const float s2 = v[2] + v[6];
  const float s3 = v[3] + v[7];
  return (s0 + s2) + (s1 + s3);
}

// parallel_for over a callable object.
template <typename Body>
TOKENSPEED_INLINE void parallel(std::int64_t count, Body& body) {
  parallel_for(count, [](void* context, std::int64_t item) { (*static_cast<Body*>(context))(item); }, &body);
}

}  // namespace
}  // namespace tokenspeed::cpu
