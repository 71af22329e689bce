// SPDX-License-Identifier: Apache-2.0
#include "packed_layout.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "thread_pool.h"

namespace tokenspeed::cpu {
namespace {

using Byte = std::uint8_t;
using Codes = Byte[kTileRows][kSuperInputs];  // of one block, in the order of the inputs
using Rows = const Byte* const (&)[kTileRows];

constexpr std::int64_t kNumVectors = 8;  // of a tile's 32 inputs

// The file's bytes that the tile's rows have at `offset`, row after row: what is not packed further.
Byte* copy_field(Rows rows, std::size_t offset, std::size_t size, Byte* out) {
  for (const Byte* row : rows) {
    std::memcpy(out, row + offset, size);
    out += size;
  }
  return out;
}

// Calls put(lane, code) with each code of one vector.
template <typename Put>
void each_lane(const Codes& codes, std::int64_t first, Put put) {
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    for (std::int64_t i = 0; i < 4; ++i) {
      put(4 * row + i, static_cast<unsigned>(codes[row][first + i]));
    }
  }
}

// Some bits of 32 inputs, so many vectors to a byte, the nearest lowest. step: inputs between those vectors.
Byte* put_bits(const Codes& codes, std::int64_t first, unsigned from, unsigned width, std::int64_t step, Byte* out) {
  const std::int64_t num_parts = 8 / width;
  const std::int64_t num_bytes = 32 * kNumVectors / num_parts;
  const unsigned mask = (1U << width) - 1U;
  std::memset(out, 0, static_cast<std::size_t>(num_bytes));
  for (std::int64_t bytes = 0; bytes < num_bytes / 32; ++bytes) {
    for (std::int64_t part = 0; part < num_parts; ++part) {
      const std::int64_t vector = step == 4 ? num_parts * bytes + part : bytes + step / 4 * part;
      each_lane(codes, first + 4 * vector, [&](std::int64_t lane, unsigned code) {
        out[32 * bytes + lane] =
            static_cast<Byte>(out[32 * bytes + lane] | (((code >> from) & mask) << (width * part)));
      });
    }
  }
  return out + num_bytes;
}

Byte* put_low4(const Codes& codes, std::int64_t first, Byte* out) { return put_bits(codes, first, 0, 4, 16, out); }

Byte* put_bit(const Codes& codes, std::int64_t first, unsigned bit, Byte* out) {
  return put_bits(codes, first, bit, 1, 4, out);
}

Byte* put_two_bits(const Codes& codes, std::int64_t first, unsigned bit, Byte* out) {
  return put_bits(codes, first, bit, 2, 4, out);
}

Byte* put_bytes(const Codes& codes, std::int64_t first, Byte* out) {
  for (std::int64_t vector = 0; vector < kNumVectors; ++vector) {
    each_lane(codes, first + 4 * vector,
              [&](std::int64_t lane, unsigned code) { out[32 * vector + lane] = static_cast<Byte>(code); });
  }
  return out + 32 * kNumVectors;
}

// Numbers of six bits, 16 of each row: number 4 v + i of row r is byte 4 r + i of vector v.
using Sixes = Byte[kTileRows][16];

Byte* put_sixes(const Sixes& sixes, Byte* out) {
  for (std::int64_t lane = 0; lane < 32; ++lane) {
    const Byte* own = sixes[lane / 4] + lane % 4;
    for (std::int64_t vector = 0; vector < 3; ++vector) {
      const auto top = static_cast<unsigned>(own[12] >> (2 * vector)) & 3U;
      out[32 * vector + lane] = static_cast<Byte>(own[4 * vector] | (top << 6));
    }
  }
  return out + 96;
}

// Bytes of which the lower halves are inputs 0 ... n - 1 and the upper ones the n that follow.
void read_halves(const Byte* source, std::int64_t count, Byte* codes) {
  for (std::int64_t i = 0; i < count; ++i) {
    codes[i] = source[i] & 15U;
    codes[count + i] = source[i] >> 4;
  }
}

void add_bits(const Byte* bits, std::int64_t shift, Byte* codes) {
  for (std::int64_t i = 0; i < kBlockInputs; ++i) {
    codes[i] = static_cast<Byte>(codes[i] | (((bits[i / 8] >> (i % 8)) & 1U) << shift));
  }
}

// Formats of 32 inputs: `fields` float16 numbers, then perhaps high bits, then codes of four bits.
template <std::size_t kFields, bool kHigh>
void pack_small(Rows rows, Byte* out) {
  Codes codes;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    const Byte* rest = rows[row] + 2 * kFields;
    read_halves(rest + (kHigh ? 4 : 0), 16, codes[row]);
    if (kHigh) {
      add_bits(rest, 4, codes[row]);
    }
  }
  for (std::size_t field = 0; field < kFields; ++field) {
    out = copy_field(rows, 2 * field, 2, out);
  }
  if (kHigh) {
    out = put_bit(codes, 0, 4, out);
  }
  put_low4(codes, 0, out);
}

void pack_q8_0(Rows rows, Byte* out) {
  Codes codes;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    std::memcpy(codes[row], rows[row] + 2, kBlockInputs);
  }
  put_bytes(codes, 0, copy_field(rows, 0, 2, out));
}

// Where a block goes of a format in planes. blurs: of the tile's rows.
struct Planes {
  Byte *first, *second, *blurs;
};

// Of runs of `length` codes whose lower `bits` bits stay behind.
void find_blurs(const Codes& codes, std::int64_t num_inputs, std::int64_t length, unsigned bits, Byte* blurs) {
  const auto step = std::int64_t{1} << bits;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    for (std::int64_t first = 0; first < num_inputs; first += length) {
      std::int64_t squares = 0;  // of twice the differences
      for (std::int64_t i = first; i < first + length; ++i) {
        const std::int64_t twice = 2 * (codes[row][i] % step) - (step - 1);
        squares += twice * twice;
      }
      const double blur = std::sqrt(static_cast<double>(squares)) / static_cast<double>(2 * step);
      blurs[row] = std::max(blurs[row], static_cast<Byte>(std::ceil(blur * kBlurScale)));
    }
  }
}

void pack_q8_0_planes(Rows rows, const Planes& out) {
  Codes codes;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    for (std::int64_t i = 0; i < kBlockInputs; ++i) {
      codes[row][i] = rows[row][2 + i] ^ 128U;
    }
  }
  put_bits(codes, 0, 4, 4, 16, copy_field(rows, 0, 2, out.first));
  put_low4(codes, 0, out.second);
  find_blurs(codes, kBlockInputs, kBlockInputs, 4, out.blurs);
}

// Two bits of 128 inputs in 32 bytes, four to a byte; twice.
void read_quarters(const Byte* source, Byte* codes) {
  for (std::int64_t i = 0; i < kSuperInputs; ++i) {
    codes[i] = (source[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32))) & 3U;
  }
}

Byte* put_pairs(Rows rows, std::size_t offset, Byte* out) {
  for (std::size_t block = 0; block < 8; ++block) {
    out = copy_field(rows, offset + 2 * block, 2, out);
  }
  return out;
}

void pack_q2_k(Rows rows, Byte* out) {
  Codes codes;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    read_quarters(rows[row] + 16, codes[row]);
  }
  out = copy_field(rows, 80, 2, out);
  out = copy_field(rows, 82, 2, out);
  out = put_pairs(rows, 0, out);
  for (std::int64_t first = 0; first < kSuperInputs; first += kBlockInputs) {
    out = put_two_bits(codes, first, 0, out);
  }
}

void pack_q3_k(Rows rows, Byte* out) {
  Codes codes;
  Sixes scales;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    const Byte* high = rows[row];
    const Byte* packed = rows[row] + 96;
    read_quarters(rows[row] + 32, codes[row]);
    for (std::int64_t i = 0; i < kSuperInputs; ++i) {
      codes[row][i] = static_cast<Byte>(codes[row][i] | (((high[i % 32] >> (i / 32)) & 1U) << 2));
    }
    for (std::int64_t i = 0; i < 16; ++i) {
      const unsigned low = i < 8 ? packed[i] & 15U : static_cast<unsigned>(packed[i - 8]) >> 4;
      scales[row][i] = static_cast<Byte>(low | (((packed[8 + i % 4] >> (2 * (i / 4))) & 3U) << 4));
    }
  }
  out = put_sixes(scales, copy_field(rows, 108, 2, out));
  for (std::int64_t first = 0; first < kSuperInputs; first += kBlockInputs) {
    out = put_bit(codes, first, 2, out);
    out = put_two_bits(codes, first, 0, out);
  }
}

// Eight scales, then eight minima.
void read_scales_and_minima(const Byte* packed, Byte* sixes) {
  for (std::int64_t i = 0; i < 4; ++i) {
    sixes[i] = packed[i] & 63U;
    sixes[8 + i] = packed[4 + i] & 63U;
    sixes[4 + i] = static_cast<Byte>((packed[8 + i] & 15U) | ((packed[i] >> 6) << 4));
    sixes[12 + i] = static_cast<Byte>((packed[8 + i] >> 4) | ((packed[4 + i] >> 6) << 4));
  }
}

template <bool kHigh>
void pack_q45_k(Rows rows, Byte* out) {
  Codes codes;
  Sixes sixes;
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    read_scales_and_minima(rows[row] + 4, sixes[row]);
    const Byte* high = rows[row] + 16;
    for (std::int64_t pair = 0; pair < 4; ++pair) {
      read_halves(high + (kHigh ? 32 : 0) + 32 * pair, 32, codes[row] + 64 * pair);
    }
    for (std::int64_t i = 0; kHigh && i < kSuperInputs; ++i) {
      codes[row][i] = static_cast<Byte>(codes[row][i] | (((high[i % 32] >> (i / 32)) & 1U) << 4));
    }
  }
  out = copy_field(rows, 0, 2, out);
  out = copy_field(rows, 2, 2, out);
  out = put_sixes(sixes, out);
  for (std::int64_t first = 0; first < kSuperInputs; first += kBlockInputs) {
    if (kHigh) {
      out = put_bit(codes, first, 4, out);
    }
    out = put_low4(codes, first, out);
  }
}

void read_q6_k(Rows rows, Codes& codes) {
  for (std::int64_t row = 0; row < kTileRows; ++row) {
    for (std::int64_t run = 0; run < 8; ++run) {  // of 32 inputs
      const std::int64_t half = run / 4, part = run % 4;
      const Byte* low = rows[row] + 64 * half + 32 * (part % 2);
      const Byte* high = rows[row] + 128 + 32 * half;
      for (std::int64_t i = 0; i < 32; ++i) {
        const unsigned low_bits = part < 2 ? low[i] & 15U : static_cast<unsigned>(low[i]) >> 4;
        const auto high_bits = static_cast<unsigned>(high[i] >> (2 * part)) & 3U;
        codes[row][32 * run + i] = static_cast<Byte>(low_bits | (high_bits << 4));
      }
    }
  }
}

void pack_q6_k(Rows rows, Byte* out) {
  Codes codes;
  read_q6_k(rows, codes);
  out = copy_field(rows, 208, 2, out);
  out = put_pairs(rows, 192, out);
  for (std::int64_t first = 0; first < kSuperInputs; first += kBlockInputs) {
    out = put_two_bits(codes, first, 4, out);
    out = put_low4(codes, first, out);
  }
}

void pack_q6_k_planes(Rows rows, const Planes& out) {
  Codes codes;
  read_q6_k(rows, codes);
  Byte* first = put_pairs(rows, 192, copy_field(rows, 208, 2, out.first));
  Byte* second = out.second;
  for (std::int64_t input = 0; input < kSuperInputs; input += kBlockInputs) {
    first = put_bits(codes, input, 2, 4, 16, first);
    second = put_two_bits(codes, input, 0, second);
  }
  find_blurs(codes, kSuperInputs, 16, 2, out.blurs);
}

// second_bytes: of a block of eight rows, in the plane of lower bits.
struct Format {
  PackedShape shape;
  void (*pack_block)(Rows rows, Byte* out);
  void (*pack_planes)(Rows rows, const Planes& out) = nullptr;
  std::int64_t second_bytes = 0;
};

// In the order of PackedFormat.
constexpr std::array<Format, kNumPackedFormats> kFormats{{
    {{32, 18}, pack_small<1, false>},
    {{32, 20}, pack_small<2, false>},
    {{32, 22}, pack_small<1, true>},
    {{32, 24}, pack_small<2, true>},
    {{32, 34}, pack_q8_0},
    {{32, 18}, pack_small<1, false>},
    {{256, 84}, pack_q2_k},
    {{256, 110}, pack_q3_k},
    {{256, 144}, pack_q45_k<false>},
    {{256, 176}, pack_q45_k<true>},
    {{256, 210}, pack_q6_k},
    {{32, 34}, nullptr, pack_q8_0_planes, 128},
    {{256, 210}, nullptr, pack_q6_k_planes, 512},
}};

const Format& format_of(PackedFormat format) { return kFormats[static_cast<std::size_t>(format)]; }

struct PackJob {
  const PackArgs& args;

  void operator()(std::int64_t tile) const {
    static constexpr Byte kZeros[kSuperInputs] = {};
    const Format& format = format_of(args.format);
    const std::int64_t num_blocks = args.num_inputs / format.shape.inputs;
    const std::int64_t num_tiles = tiles_of(args.num_outputs);
    const std::int64_t first_bytes = kTileRows * format.shape.bytes - format.second_bytes;
    Byte* first = args.out + tile * num_blocks * first_bytes;
    Byte* second =
        args.out + num_tiles * num_blocks * first_bytes + second_place(tile, num_blocks) * format.second_bytes;
    Byte* blurs =
        args.out + packed_size(args.format, args.num_outputs, args.num_inputs) - (num_tiles - tile) * kTileRows;
    if (format.pack_planes != nullptr) {
      std::memset(blurs, kBlurScale, kTileRows);
    }
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      const Byte* rows[kTileRows];
      for (std::int64_t i = 0; i < kTileRows; ++i) {
        const std::int64_t row = tile * kTileRows + i;
        rows[i] = row < args.num_outputs ? args.blocks + row * args.row_bytes + block * format.shape.bytes : kZeros;
      }
      if (format.pack_planes != nullptr) {
        format.pack_planes(rows, {first, second, blurs});
      } else {
        format.pack_block(rows, first);
      }
      first += first_bytes;
      second += kSecondTiles * format.second_bytes;
    }
  }
};

}  // namespace

PackedShape packed_shape(PackedFormat format) { return format_of(format).shape; }

std::size_t packed_size(PackedFormat format, std::int64_t num_outputs, std::int64_t num_inputs) {
  const Format& own = format_of(format);
  const std::int64_t num_tiles = tiles_of(num_outputs);
  const std::int64_t num_blocks = num_inputs / own.shape.inputs;
  std::int64_t size = num_tiles * kTileRows * num_blocks * own.shape.bytes;
  if (own.pack_planes != nullptr) {
    const std::int64_t more_tiles = (kSecondTiles - num_tiles % kSecondTiles) % kSecondTiles;
    size += more_tiles * num_blocks * own.second_bytes + num_tiles * kTileRows;
  }
  return static_cast<std::size_t>(size);
}

void pack(const PackArgs& args) {
  const PackJob job{args};
  parallel_for(
      tiles_of(args.num_outputs),
      [](void* context, std::int64_t tile) { (*static_cast<const PackJob*>(context))(tile); },
      const_cast<PackJob*>(&job));  // NOLINT: the task does not write
}

}  // namespace tokenspeed::cpu
