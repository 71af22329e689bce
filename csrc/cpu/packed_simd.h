// SPDX-License-Identifier: Apache-2.0
// Vectors of 32 bytes and of the numbers in them, for weights of few bits: eight rows of four inputs each. In the
// compiler's own vector types where no instruction is worth a name of its own. Internal linkage: see kernel_set.h.
#pragma once

#include "packed_layout.h"
#include "simd.h"

namespace tokenspeed::cpu {
namespace {

using Byte = std::uint8_t;
typedef std::uint8_t Bytes __attribute__((vector_size(32)));
typedef std::int8_t SignedBytes __attribute__((vector_size(32)));
typedef std::int16_t Shorts __attribute__((vector_size(32)));
typedef std::int32_t Ints __attribute__((vector_size(32)));
typedef std::uint32_t Words __attribute__((vector_size(32)));

template <typename V>
TOKENSPEED_INLINE V load_vector(const void* source) {
  V result;
  __builtin_memcpy(&result, source, sizeof(result));
  return result;
}

// Four inputs for every row.
TOKENSPEED_INLINE SignedBytes four_of(const std::int8_t* source) {
  std::int32_t four;
  __builtin_memcpy(&four, source, sizeof(four));
  return as<SignedBytes>(Ints{} + four);
}

TOKENSPEED_INLINE Vec8 splat8(float value) { return value - Vec8{}; }

// To the nearest whole number, of two to the even one.
TOKENSPEED_INLINE Ints nearest(Vec8 value) {
#if defined(__AVX2__)
  return as<Ints>(_mm256_cvtps_epi32(as<__m256>(value)));
#else
  // Adding 1.5 * 2^23 rounds, and leaves the number in the lowest bits.
  return as<Ints>(value + 12582912.0F) - 0x4B400000;
#endif
}

// Lane i of the result: a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1], of bytes without a sign and bytes with one. Whoever
// calls keeps the sum within 16 bits.
TOKENSPEED_INLINE Shorts pair_products(Bytes a, SignedBytes b) {
#if defined(__AVX2__)
  return as<Shorts>(_mm256_maddubs_epi16(as<__m256i>(a), as<__m256i>(b)));
#else
  const Shorts even = (as<Shorts>(a) & 0xFF) * (as<Shorts>(as<Words>(b) << 8 & 0xFF00FF00U) >> 8);
  const Shorts odd = (as<Shorts>(a) >> 8 & 0xFF) * (as<Shorts>(b) >> 8);
  return even + odd;
#endif
}

TOKENSPEED_INLINE Ints even_shorts(Shorts value) { return as<Ints>(as<Words>(value) << 16) >> 16; }

// Likewise of 16-bit numbers.
TOKENSPEED_INLINE Ints pair_products(Shorts a, Shorts b) {
#if defined(__AVX2__)
  return as<Ints>(_mm256_madd_epi16(as<__m256i>(a), as<__m256i>(b)));
#else
  return even_shorts(a) * even_shorts(b) + (as<Ints>(a) >> 16) * (as<Ints>(b) >> 16);
#endif
}

TOKENSPEED_INLINE Bytes magnitude(SignedBytes value) {
  const auto sign = as<Bytes>(value >> 7);
  return (as<Bytes>(value) ^ sign) - sign;  // without a sign, where 128 is a number too
}

// value where sign_of is positive, -value where it is negative, whatever where it is zero.
TOKENSPEED_INLINE SignedBytes with_sign(SignedBytes value, SignedBytes sign_of) {
#if defined(__AVX2__)
  return as<SignedBytes>(_mm256_sign_epi8(as<__m256i>(value), as<__m256i>(sign_of)));
#else
  const SignedBytes sign = sign_of >> 7;
  return (value ^ sign) - sign;
#endif
}

// Sums of products of bytes. kDeep: a sum takes all of a group in 32 bits, and is scaled at its end; else it takes as
// many as 16 bits hold.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool kDeep = true;
using Sum = Ints;

TOKENSPEED_INLINE Sum accumulate(Sum sum, Bytes a, SignedBytes b) {
  return as<Ints>(_mm256_dpbusd_epi32(as<__m256i>(sum), as<__m256i>(a), as<__m256i>(b)));
}

TOKENSPEED_INLINE Ints scaled(Sum sum, Shorts scales) { return sum * even_shorts(scales); }
#else
constexpr bool kDeep = false;
using Sum = Shorts;

TOKENSPEED_INLINE Sum accumulate(Sum sum, Bytes a, SignedBytes b) {
  sum += pair_products(a, b);
#if defined(__AVX2__)
  // Sums are to stay in their registers: left alone, GCC makes all products first and adds them up in another order,
  // for which there are not enough.
  __asm__("" : "+x"(sum));
#endif
  return sum;
}

TOKENSPEED_INLINE Ints scaled(Sum sum, Shorts scales) { return pair_products(sum, scales); }
#endif

// Eight float16 numbers.
TOKENSPEED_INLINE Vec8 load_halves(const Byte* source) {
#if defined(__F16C__)
  __m128i halves;
  __builtin_memcpy(&halves, source, sizeof(halves));
  return as<Vec8>(_mm256_cvtph_ps(halves));
#else
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
  Halves halves;
  __builtin_memcpy(&halves, source, sizeof(halves));
  const Words bits = __builtin_convertvector(halves, Words);
  const Words sign = (bits & 0x8000U) << 16;
  const Words rest = (bits & 0x7FFFU) << 13;
  // The exponent is biased by 15 there and by 127 here; multiplying settles numbers without a leading one as well.
  const Vec8 value = as<Vec8>(rest) * 0x1p112F;
  const Words special = as<Words>(rest >= 0x0F800000U) & 0x7F800000U;
  return as<Vec8>(as<Words>(value) | special | sign);
#endif
}

// The number v of a row's 16 in 96 bytes of sixes (see packed_layout.h), four to a row's word.
TOKENSPEED_INLINE Words load_sixes(const Byte* source, int vector) {
  if (vector < 3) {
    return load_vector<Words>(source + 32 * vector) & 0x3F3F3F3FU;
  }
  const Words a = load_vector<Words>(source);
  const Words b = load_vector<Words>(source + 32);
  const Words c = load_vector<Words>(source + 64);
  return (a >> 6 & 0x03030303U) | (b >> 4 & 0x0C0C0C0CU) | (c >> 2 & 0x30303030U);
}

// Byte `place` of each row's word.
TOKENSPEED_INLINE Ints byte_of(Words words, int place) { return as<Ints>(words >> (8 * place) & 0xFFU); }

// Numbers below 2^15, one a row, twice each.
TOKENSPEED_INLINE Shorts twice(Ints value) { return as<Shorts>((value & 0xFFFF) | value << 16); }

// Codes from bits: vectors 0 ... 7 of the 32 inputs of a tile.
TOKENSPEED_INLINE Bytes low4(const Byte* source, int vector) {
  const Words bytes = load_vector<Words>(source + 32 * (vector % 4));
  return as<Bytes>((vector < 4 ? bytes : bytes >> 4) & 0x0F0F0F0FU);
}

// One bit at `to`.
TOKENSPEED_INLINE Bytes one_bit(const Byte* source, int vector, int to) {
  const Words bytes = load_vector<Words>(source);
  return as<Bytes>((vector < to ? bytes << (to - vector) : bytes >> (vector - to)) & (0x01010101U << to));
}

// Two bits at `to`.
TOKENSPEED_INLINE Bytes two_bits(const Byte* source, int vector, int to) {
  const Words bytes = load_vector<Words>(source + 32 * (vector / 4));
  const int from = 2 * (vector % 4);
  return as<Bytes>((from < to ? bytes << (to - from) : bytes >> (from - to)) & (0x03030303U << to));
}

}  // namespace
}  // namespace tokenspeed::cpu
