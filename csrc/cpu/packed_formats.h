// SPDX-License-Identifier: Apache-2.0
// What the blocks of each packed format hold, for eight rows at once: see packed_layout.h for the bytes.
//
// Of each format: kInputs and kBytes of a block; kGroups scales for 32 inputs; kSpan vectors of codes whose products
// with activations 16 bits take (255 / (2 kMax) rounded down to a power of two); kSigned where codes have a sign;
// kMinimum where a weight is more than a multiple of its code. kSecondBytes: of a block in the plane of lower bits,
// where a format has such; then Upper is the format of the first plane alone, which has the middle of what the lower
// bits may say, and kStep what a step of its codes is in steps of the whole ones. expand gives the 32 inputs numbered
// `part` of a block.
#pragma once

#include "packed_simd.h"

namespace tokenspeed::cpu {
namespace {

constexpr int kVectors = 8;  // of codes, four inputs each
constexpr std::int64_t kFetchLine = 64;

// Weight = codes * scales * factor + minimum. scales: twice each.
template <int kGroupsOf>
struct Block {
  Bytes codes[kVectors];
  Shorts scales[kGroupsOf];
  Vec8 factor;
  Vec8 minimum[kGroupsOf];
};

template <int kGroupsOf, int kSpanOf, bool kMinimumOf = true, bool kSignedOf = false>
struct Traits {
  static constexpr int kGroups = kGroupsOf;
  static constexpr int kSpan = kSpanOf;
  static constexpr bool kMinimum = kMinimumOf;
  static constexpr bool kSigned = kSignedOf;
  static constexpr std::int64_t kSecondBytes = 0;
  using Of = Block<kGroupsOf>;
};

TOKENSPEED_INLINE void read_low4(const Byte* source, Bytes (&codes)[kVectors]) {
#pragma GCC unroll 8
  for (int vector = 0; vector < kVectors; ++vector) {
    codes[vector] = low4(source, vector);
  }
}

TOKENSPEED_INLINE void add_bit(const Byte* source, int to, Bytes (&codes)[kVectors]) {
#pragma GCC unroll 8
  for (int vector = 0; vector < kVectors; ++vector) {
    codes[vector] |= one_bit(source, vector, to);
  }
}

TOKENSPEED_INLINE void add_two_bits(const Byte* source, int to, Bytes (&codes)[kVectors]) {
#pragma GCC unroll 8
  for (int vector = 0; vector < kVectors; ++vector) {
    codes[vector] |= two_bits(source, vector, to);
  }
}

// Formats of 32 inputs and four or five bits. kOffset: code of a weight of zero, where the file has no minimum.
template <bool kHigh, int kOffset>
struct Small : Traits<1, kHigh ? 4 : 8> {
  static constexpr int kScaleBytes = kOffset == 0 ? 32 : 16;
  static constexpr int kInputs = 32;
  static constexpr int kBytes = kScaleBytes + (kHigh ? 32 : 0) + 128;

  TOKENSPEED_INLINE void expand(const Byte* source, int /*part*/, Block<1>& out) {
    out.factor = load_halves(source);
    out.minimum[0] = kOffset == 0 ? load_halves(source + 16) : out.factor * static_cast<float>(-kOffset);
    out.scales[0] = Shorts{} + 1;
    const Byte* codes = source + kScaleBytes;
    read_low4(codes + (kHigh ? 32 : 0), out.codes);
    if constexpr (kHigh) {
      add_bit(codes, 4, out.codes);
    }
  }
};

struct Q8_0 : Traits<1, 1, false, true> {
  static constexpr int kInputs = 32, kBytes = 272;

  TOKENSPEED_INLINE void expand(const Byte* source, int /*part*/, Block<1>& out) {
    out.factor = load_halves(source);
    out.minimum[0] = Vec8{};
    out.scales[0] = Shorts{} + 1;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      out.codes[vector] = load_vector<Bytes>(source + 16 + 32 * vector);
    }
  }
};

// Q8_0 in planes. Codes are 128 more than the file's.
struct Q8_0Upper : Traits<1, 8> {
  static constexpr int kInputs = 32, kBytes = 144;

  TOKENSPEED_INLINE void expand(const Byte* source, int /*part*/, Block<1>& out) {
    out.factor = load_halves(source) * 16.0F;
    out.minimum[0] = out.factor * (-8.0F + 7.5F / 16.0F);
    out.scales[0] = Shorts{} + 1;
    read_low4(source + 16, out.codes);
  }
};

struct Q8_0Planes : Traits<1, 1, false, true> {
  using Upper = Q8_0Upper;
  static constexpr int kInputs = 32, kBytes = 144;
  static constexpr std::int64_t kSecondBytes = 128;
  static constexpr float kStep = 16.0F;

  TOKENSPEED_INLINE void expand(const Byte* first, const Byte* second, int /*part*/, Block<1>& out) {
    out.factor = load_halves(first);
    out.minimum[0] = Vec8{};
    out.scales[0] = Shorts{} + 1;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      const Words upper = as<Words>(low4(first + 16, vector)) << 4;
      out.codes[vector] = as<Bytes>(upper | as<Words>(low4(second, vector))) ^ Byte { 128 };
    }
  }
};

// Codes name one of sixteen numbers.
struct Iq4Nl : Traits<1, 1, false, true> {
  static constexpr int kInputs = 32, kBytes = 144;

  TOKENSPEED_INLINE Bytes look_up(Bytes codes) {
    alignas(16) static constexpr std::int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                             1,    13,   25,  38,  53,  69,  89,  113};
#if defined(__AVX2__)
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kNumbers)));
    return as<Bytes>(_mm256_shuffle_epi8(numbers, as<__m256i>(codes)));
#else
    for (int i = 0; i < 32; ++i) {
      codes[i] = static_cast<Byte>(kNumbers[codes[i]]);
    }
    return codes;
#endif
  }

  TOKENSPEED_INLINE void expand(const Byte* source, int /*part*/, Block<1>& out) {
    out.factor = load_halves(source);
    out.minimum[0] = Vec8{};
    out.scales[0] = Shorts{} + 1;
    read_low4(source + 16, out.codes);
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      out.codes[vector] = look_up(out.codes[vector]);
    }
  }
};

// 256 inputs: a scale and a minimum of six bits for each 32.
template <bool kHigh>
struct Q45K : Traits<1, kHigh ? 4 : 8> {
  static constexpr int kPartBytes = (kHigh ? 32 : 0) + 128;
  static constexpr int kInputs = 256, kBytes = 16 + 16 + 96 + 8 * kPartBytes;

  TOKENSPEED_INLINE void expand(const Byte* source, int part, Block<1>& out) {
    out.factor = load_halves(source);
    const Ints minimum = byte_of(load_sixes(source + 32, 2 + part / 4), part % 4);
    out.minimum[0] = -(load_halves(source + 16) * __builtin_convertvector(minimum, Vec8));
    out.scales[0] = twice(byte_of(load_sixes(source + 32, part / 4), part % 4));
    const Byte* codes = source + 128 + part * kPartBytes;
    read_low4(codes + (kHigh ? 32 : 0), out.codes);
    if constexpr (kHigh) {
      add_bit(codes, 4, out.codes);
    }
  }
};

// The scales of both groups of 16 inputs, and what they are worth where a weight is scale * (code - offset).
TOKENSPEED_INLINE void set_groups(Ints first, Ints second, float offset, Block<2>& out) {
  out.scales[0] = twice(first);
  out.scales[1] = twice(second);
  const Vec8 least = out.factor * -offset;
  out.minimum[0] = least * __builtin_convertvector(first, Vec8);
  out.minimum[1] = least * __builtin_convertvector(second, Vec8);
}

// Scales of eight bits for both groups of a part. codes: those of weights of zero.
TOKENSPEED_INLINE void set_pairs(const Byte* source, float offset, Block<2>& out) {
  typedef std::int8_t Pairs __attribute__((vector_size(16)));
  Pairs pairs;
  __builtin_memcpy(&pairs, source, sizeof(pairs));
  const Shorts scales = __builtin_convertvector(pairs, Shorts);
  set_groups(even_shorts(scales), as<Ints>(scales) >> 16, offset, out);
}

// 256 inputs: a scale of eight bits for each 16.
struct Q6K : Traits<2, 2> {
  static constexpr int kPartBytes = 64 + 128;
  static constexpr int kInputs = 256, kBytes = 16 + 128 + 8 * kPartBytes;

  TOKENSPEED_INLINE void expand(const Byte* source, int part, Block<2>& out) {
    out.factor = load_halves(source);
    set_pairs(source + 16 + 16 * part, 32.0F, out);
    const Byte* codes = source + 144 + part * kPartBytes;
    read_low4(codes + 64, out.codes);
    add_two_bits(codes, 4, out.codes);
  }
};

// Q6_K in planes.
struct Q6KUpper : Traits<2, 8> {
  static constexpr int kInputs = 256, kBytes = 16 + 128 + 8 * 128;

  TOKENSPEED_INLINE void expand(const Byte* source, int part, Block<2>& out) {
    out.factor = load_halves(source) * 4.0F;
    set_pairs(source + 16 + 16 * part, 8.0F - 1.5F / 4.0F, out);
    read_low4(source + 144 + 128 * part, out.codes);
  }
};

struct Q6KPlanes : Traits<2, 2> {
  using Upper = Q6KUpper;
  static constexpr int kInputs = 256, kBytes = Q6KUpper::kBytes;
  static constexpr std::int64_t kSecondBytes = 8 * 64;
  static constexpr float kStep = 4.0F;

  TOKENSPEED_INLINE void expand(const Byte* first, const Byte* second, int part, Block<2>& out) {
    out.factor = load_halves(first);
    set_pairs(first + 16 + 16 * part, 32.0F, out);
    const Byte* upper = first + 144 + 128 * part;
    const Byte* lower = second + 64 * part;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      out.codes[vector] = as<Bytes>(as<Words>(low4(upper, vector)) << 2) | two_bits(lower, vector, 0);
    }
  }
};

// 256 inputs: a scale of six bits, 32 less than it says, for each 16.
struct Q3K : Traits<2, 8> {
  static constexpr int kPartBytes = 32 + 64;
  static constexpr int kInputs = 256, kBytes = 16 + 96 + 8 * kPartBytes;

  TOKENSPEED_INLINE void expand(const Byte* source, int part, Block<2>& out) {
    const Words sixes = load_sixes(source + 16, part / 2);
    out.factor = load_halves(source);
    const int place = 2 * (part % 2);
    set_groups(byte_of(sixes, place) - 32, byte_of(sixes, place + 1) - 32, 4.0F, out);
    const Byte* codes = source + 112 + part * kPartBytes;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      out.codes[vector] = two_bits(codes + 32, vector, 0) | one_bit(codes, vector, 2);
    }
  }
};

// 256 inputs: a scale and a minimum of four bits for each 16.
struct Q2K : Traits<2, 8> {
  static constexpr int kInputs = 256, kBytes = 16 + 16 + 128 + 8 * 64;

  TOKENSPEED_INLINE void expand(const Byte* source, int part, Block<2>& out) {
    typedef Byte Pairs __attribute__((vector_size(16)));
    Pairs pairs;
    __builtin_memcpy(&pairs, source + 32 + 16 * part, sizeof(pairs));
    const Ints both = as<Ints>(__builtin_convertvector(pairs, Shorts));
    out.factor = load_halves(source);
    const Vec8 least = -load_halves(source + 16);
#pragma GCC unroll 2
    for (int group = 0; group < 2; ++group) {
      const Ints own = both >> (16 * group);
      out.scales[group] = twice(own & 15);
      out.minimum[group] = least * __builtin_convertvector(own >> 4 & 15, Vec8);
    }
    const Byte* codes = source + 160 + part * 64;
#pragma GCC unroll 8
    for (int vector = 0; vector < kVectors; ++vector) {
      out.codes[vector] = two_bits(codes, vector, 0);
    }
  }
};

// Calls use(format) with the type of a format.
template <typename Use>
TOKENSPEED_INLINE void with_format(PackedFormat format, Use use) {
  switch (format) {
    case PackedFormat::kQ4_0:
      return use(Small<false, 8>{});
    case PackedFormat::kQ4_1:
      return use(Small<false, 0>{});
    case PackedFormat::kQ5_0:
      return use(Small<true, 16>{});
    case PackedFormat::kQ5_1:
      return use(Small<true, 0>{});
    case PackedFormat::kQ8_0:
      return use(Q8_0{});
    case PackedFormat::kIq4Nl:
      return use(Iq4Nl{});
    case PackedFormat::kQ2K:
      return use(Q2K{});
    case PackedFormat::kQ3K:
      return use(Q3K{});
    case PackedFormat::kQ4K:
      return use(Q45K<false>{});
    case PackedFormat::kQ5K:
      return use(Q45K<true>{});
    case PackedFormat::kQ6K:
      return use(Q6K{});
    case PackedFormat::kQ8_0Planes:
      return use(Q8_0Planes{});
    case PackedFormat::kQ6KPlanes:
      return use(Q6KPlanes{});
  }
}

// Where the blocks of a tile lie.
template <typename F>
struct Blocks {
  const Byte *first, *second;
  std::int64_t num_blocks;

  Blocks(const Byte* data, std::int64_t num_outputs, std::int64_t num_inputs, std::int64_t tile)
      : first(data), second(data), num_blocks(num_inputs / F::kInputs) {
    first += tile * num_blocks * F::kBytes;
    second += tiles_of(num_outputs) * num_blocks * F::kBytes + second_place(tile, num_blocks) * F::kSecondBytes;
  }

  inline __attribute__((always_inline)) void expand(std::int64_t block, int part, typename F::Of& out) const {
    if constexpr (F::kSecondBytes > 0) {
      F::expand(first + block * F::kBytes, second + block * kSecondTiles * F::kSecondBytes, part, out);
    } else {
      F::expand(first + block * F::kBytes, part, out);
    }
  }

  // Ask for a block of a plane, or what lies so many bytes behind it; or as many tiles as lie together there.
  void fetch_first(std::int64_t block, std::int64_t ahead) const {
    for (std::int64_t line = 0; line < F::kBytes; line += kFetchLine) {
      __builtin_prefetch(first + block * F::kBytes + ahead + line);
    }
  }

  void fetch_second(std::int64_t block, std::int64_t ahead) const {
    const Byte* wanted = second + (block + ahead * num_blocks) * kSecondTiles * F::kSecondBytes;
    for (std::int64_t line = 0; line < F::kSecondBytes; line += kFetchLine) {
      __builtin_prefetch(wanted + line);
    }
  }
};

}  // namespace
}  // namespace tokenspeed::cpu
