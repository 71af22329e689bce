// SPDX-License-Identifier: Apache-2.0
// Matrix product of activations with a packed weight. Rows of activations become bytes, 32 inputs to a scale; products
// of bytes are added up in whole numbers, and what 32 inputs come to is added in float32, block after block. That order
// is the same whatever the number of rows, so a row's result does not depend on the batch it came in.
#pragma once

#include "packed_formats.h"

namespace tokenspeed::cpu {
namespace {

// Rows up to which a block is expanded where it is used, and rows that meet an expanded block at a time. Without
// vectors of 32 bytes the registers do not reach for more than one.
#if defined(__AVX2__)
constexpr int kFewRows = 4;
#else
constexpr int kFewRows = 1;
#endif
constexpr std::int64_t kPanelBlocks = 24;     // blocks of 32 inputs, at most, that are expanded for many rows at once
constexpr std::int64_t kPanelTiles = 2;       // tiles beside each other then
constexpr std::int64_t kPanelRows = 128;      // rows that they serve
constexpr std::int64_t kGroupTiles = 8;       // tiles, at most, that meet these rows' panel while it is in the cache
constexpr std::int64_t kItemBytes = 1 << 16;  // of weight that few rows read at a time
constexpr std::int64_t kPiecesMax = 8;
constexpr std::int64_t kFetchAhead = 4096;  // bytes: the hardware stops at the end of a page
constexpr std::int64_t kFetchLine = 64;

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

TOKENSPEED_INLINE void store8(float* target, Vec8 value) { __builtin_memcpy(target, &value, sizeof(value)); }

TOKENSPEED_INLINE void store8(Bf16* target, Vec8 value) {
#if TOKENSPEED_LANES == 8
  store(target, value);
#else
  float buffer[kLanes] = {};
  store8(buffer, value);
  store_some(target, load(buffer), kFold);
#endif
}

template <typename T>
TOKENSPEED_INLINE Vec8 load_first(const T* source, std::int64_t count) {
  if (count == kFold) {
    return load8(source);
  }
  T buffer[kFold] = {};
  __builtin_memcpy(buffer, source, static_cast<std::size_t>(count) * sizeof(T));
  return load8(buffer);
}

template <typename T>
TOKENSPEED_INLINE void store_first(T* target, Vec8 value, std::int64_t count) {
  if (count == kFold) {
    store8(target, value);
    return;
  }
  T buffer[kFold];
  store8(buffer, value);
  __builtin_memcpy(target, buffer, static_cast<std::size_t>(count) * sizeof(T));
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

// sums[row][tile] += rows x tiles over `num_blocks` blocks of the panel, a block of which has one for each tile.
template <typename F, int kRows, int kTiles>
TOKENSPEED_INLINE void multiply(const Rows8& rows, const typename F::Of* panel, std::int64_t num_blocks,
                                Vec8 (&sums)[kRows][kTiles]) {
  constexpr int kGroupVectors = kVectors / F::kGroups;
  constexpr int kRun = kDeep || F::kSpan > kGroupVectors ? kGroupVectors : F::kSpan;
  const std::int8_t* codes = rows.codes;
  const std::int64_t stride = rows.panel_blocks * kBlockInputs;
  for (std::int64_t block = 0; block < num_blocks; ++block, panel += kTiles, codes += kBlockInputs) {
    Ints totals[kRows][kTiles] = {};
#pragma GCC unroll 8
    for (int first = 0; first < kVectors; first += kRun) {
      Sum parts[kRows][kTiles] = {};
#pragma GCC unroll 8
      for (int vector = first; vector < first + kRun; ++vector) {
        Bytes weights[kTiles];
#pragma GCC unroll 8
        for (int tile = 0; tile < kTiles; ++tile) {
          weights[tile] = panel[tile].codes[vector];
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const SignedBytes inputs = four_of(codes + row * stride + 4 * vector);
#pragma GCC unroll 8
          for (int tile = 0; tile < kTiles; ++tile) {
            if constexpr (F::kSigned) {
              const auto own = as<SignedBytes>(weights[tile]);
              parts[row][tile] = accumulate(parts[row][tile], magnitude(own), with_sign(inputs, own));
            } else {
              parts[row][tile] = accumulate(parts[row][tile], weights[tile], inputs);
            }
          }
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
        for (int tile = 0; tile < kTiles; ++tile) {
          totals[row][tile] += scaled(parts[row][tile], panel[tile].scales[first / kGroupVectors]);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Scale& scale = rows.scales[row * rows.panel_blocks + block];
#pragma GCC unroll 8
      for (int tile = 0; tile < kTiles; ++tile) {
        const Vec8 total = __builtin_convertvector(totals[row][tile], Vec8);
        Vec8& sum = sums[row][tile];
        sum = multiply_add(total, panel[tile].factor * scale.scale, sum);
        if constexpr (F::kMinimum && F::kGroups == 1) {
          sum = multiply_add(panel[tile].minimum[0], splat8(scale.sum), sum);
        } else if constexpr (F::kMinimum) {
          sum = multiply_add(panel[tile].minimum[0], splat8(scale.halves[0]), sum);
          sum = multiply_add(panel[tile].minimum[1], splat8(scale.halves[1]), sum);
        }
      }
    }
  }
}

// One piece of a matrix: the outputs from first_output on. items: how it is shared out.
struct PieceJob {
  const PackedPiece* piece;
  std::int64_t first_output, first_item, num_tiles, tiles_an_item;
};

struct PackedJob {
  const PackedLinearArgs& args;
  Rows8 rows;
  PieceJob pieces[kPiecesMax];
  std::int64_t num_items, num_row_blocks;

  void operator()(std::int64_t item) const {
    std::int64_t index = 0;
    while (index + 1 < args.num_pieces && item >= pieces[index + 1].first_item) {
      index += 1;
    }
    const PieceJob& job = pieces[index];
    const std::int64_t place = item - job.first_item;
    const std::int64_t first_row = place % num_row_blocks * kPanelRows;
    const std::int64_t first_tile = place / num_row_blocks * job.tiles_an_item;
    const std::int64_t left = job.num_tiles - first_tile;
    const std::int64_t num_tiles = left < job.tiles_an_item ? left : job.tiles_an_item;
    with_format(static_cast<PackedFormat>(job.piece->format), [&](auto format) {
      using F = decltype(format);
      if (args.num_rows <= kFewRows) {
        few_rows<F>(job, first_tile, num_tiles);
      } else {
        const std::int64_t rows_left = args.num_rows - first_row;
        many_rows<F>(job, first_tile, num_tiles, first_row, rows_left < kPanelRows ? rows_left : kPanelRows);
      }
    });
  }

  template <typename F>
  const Byte* tile_at(const PieceJob& job, std::int64_t tile) const {
    return job.piece->data + tile * (args.num_inputs / F::kInputs) * F::kBytes;
  }

  template <typename F>
  void few_rows(const PieceJob& job, std::int64_t first_tile, std::int64_t num_tiles) const {
    if constexpr (kFewRows > 1) {
      switch (args.num_rows) {
        case 4:
          return few_rows<F, 4>(job, first_tile, num_tiles);
        case 3:
          return few_rows<F, 3>(job, first_tile, num_tiles);
        case 2:
          return few_rows<F, 2>(job, first_tile, num_tiles);
        default:
          break;
      }
    }
    few_rows<F, 1>(job, first_tile, num_tiles);
  }

  template <typename F, int kRows>
  void few_rows(const PieceJob& job, std::int64_t first_tile, std::int64_t num_tiles) const {
    constexpr std::int64_t kParts = F::kInputs / kBlockInputs;
    const std::int64_t num_blocks = args.num_inputs / F::kInputs;
    const Byte* source = tile_at<F>(job, first_tile);
    for (std::int64_t tile = first_tile; tile < first_tile + num_tiles; ++tile) {
      Vec8 sums[kRows][1] = {};
      for (std::int64_t block = 0; block < num_blocks; ++block, source += F::kBytes) {
        for (std::int64_t line = 0; line < F::kBytes; line += kFetchLine) {
          __builtin_prefetch(source + kFetchAhead + line);
        }
        for (int part = 0; part < kParts; ++part) {
          typename F::Of own;
          F::expand(source, part, own);
          multiply<F, kRows, 1>(rows.at(0, 0, block * kParts + part), &own, 1, sums);
        }
      }
      for (std::int64_t row = 0; row < kRows; ++row) {
        finish(job, row, tile, sums[row][0]);
      }
    }
  }

  // Some tiles, panel by panel of the rows' activations.
  template <typename F>
  void many_rows(const PieceJob& job, std::int64_t first_tile, std::int64_t num_tiles, std::int64_t first_row,
                 std::int64_t num_rows) const {
    const std::int64_t num_blocks = args.num_inputs / kBlockInputs;
    const std::int64_t pair_sums = num_rows * kPanelTiles * kTileRows;
    const auto num_sums = static_cast<std::size_t>(pair_sums * (num_tiles + 1) / kPanelTiles);
    float* sums = scratch(0, num_sums);
    __builtin_memset(sums, 0, num_sums * sizeof(float));
    for (std::int64_t panel = 0; panel * rows.panel_blocks < num_blocks; ++panel) {
      for (std::int64_t place = 0; place < num_tiles; place += kPanelTiles) {
        add_pair<F>(job, first_tile + place, panel, first_row, num_rows, sums + place / kPanelTiles * pair_sums);
      }
    }
  }

  // One panel of two tiles, of which the second may lie behind the last; then it is computed from the first and
  // dropped. Their results are complete with the last panel.
  template <typename F>
  void add_pair(const PieceJob& job, std::int64_t tile, std::int64_t panel_index, std::int64_t first_row,
                std::int64_t num_rows, float* sums) const {
    constexpr std::int64_t kParts = F::kInputs / kBlockInputs;
    using Panel = typename F::Of[kPanelTiles];
    const std::int64_t first = panel_index * rows.panel_blocks;
    const std::int64_t left = args.num_inputs / kBlockInputs - first;
    const std::int64_t size = left < rows.panel_blocks ? left : rows.panel_blocks;
    const bool is_last = size == left;
    const bool has_second = tile + 1 < job.num_tiles;
    const Byte* sources[kPanelTiles] = {tile_at<F>(job, tile), tile_at<F>(job, has_second ? tile + 1 : tile)};
    auto* panel = reinterpret_cast<Panel*>(scratch(2, kPanelBlocks * sizeof(Panel) / sizeof(float)));
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t block = (first + i) / kParts;
      const int part = static_cast<int>((first + i) % kParts);
      for (std::int64_t side = 0; side < kPanelTiles; ++side) {
        F::expand(sources[side] + block * F::kBytes, part, panel[i][side]);
      }
    }
    std::int64_t row = 0;
    for (; row + kFewRows <= num_rows; row += kFewRows) {
      for (std::int64_t i = 0; is_last && i < kFewRows; ++i) {
        fetch_output(first_row + row + i, job.first_output + tile * kTileRows);
      }
      add_panel<F, kFewRows>(first_row + row, panel_index, panel[0], size, sums + row * kPanelTiles * kTileRows);
    }
    for (; row < num_rows; ++row) {
      add_panel<F, 1>(first_row + row, panel_index, panel[0], size, sums + row * kPanelTiles * kTileRows);
    }
    for (row = 0; is_last && row < num_rows; ++row) {
      const float* own = sums + row * kPanelTiles * kTileRows;
      finish(job, first_row + row, tile, load_vector<Vec8>(own));
      if (has_second) {
        finish(job, first_row + row, tile + 1, load_vector<Vec8>(own + kTileRows));
      }
    }
  }

  template <typename F, int kRows>
  void add_panel(std::int64_t row, std::int64_t panel_index, const typename F::Of* panel, std::int64_t size,
                 float* target) const {
    Vec8 sums[kRows][kPanelTiles];
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kPanelTiles; ++i) {
      sums[i / kPanelTiles][i % kPanelTiles] = load8(target + i * kTileRows);
    }
    multiply<F, kRows, kPanelTiles>(rows.at(row, panel_index, 0), panel, size, sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows * kPanelTiles; ++i) {
      store8(target + i * kTileRows, sums[i / kPanelTiles][i % kPanelTiles]);
    }
  }

  // Asks for the line that a row's results go to: lines lie far from each other, and each would be waited for.
  void fetch_output(std::int64_t row, std::int64_t output) const {
    const std::int64_t item_size = args.out_dtype == DType::kFloat32 ? 4 : 2;
    __builtin_prefetch(static_cast<char*>(args.out) + (row * args.num_outputs + output) * item_size, 1);
  }

  void finish(const PieceJob& job, std::int64_t row, std::int64_t tile, Vec8 sums) const {
    const std::int64_t left = job.piece->num_outputs - tile * kTileRows;
    const std::int64_t count = left < kTileRows ? left : kTileRows;
    const std::int64_t place = job.first_output + tile * kTileRows;
    if (args.bias != nullptr) {
      sums += args.dtype == DType::kFloat32 ? load_first(static_cast<const float*>(args.bias) + place, count)
                                            : load_first(static_cast<const Bf16*>(args.bias) + place, count);
    }
    const std::int64_t at = row * args.num_outputs + place;
    if (args.out_dtype == DType::kFloat32) {
      store_first(static_cast<float*>(args.out) + at, sums, count);
    } else {
      store_first(static_cast<Bf16*>(args.out) + at, sums, count);
    }
  }
};

struct QuantizeJob {
  const PackedLinearArgs& args;
  Rows8 rows;

  void operator()(std::int64_t row) const {
    const std::int64_t num_blocks = args.num_inputs / kBlockInputs;
    if (args.dtype == DType::kFloat32) {
      quantize_row(static_cast<const float*>(args.x) + row * args.x_stride, num_blocks, rows, row);
    } else {
      quantize_row(static_cast<const Bf16*>(args.x) + row * args.x_stride, num_blocks, rows, row);
    }
  }
};

// The activations as bytes, in the caller's scratch.
TOKENSPEED_INLINE Rows8 quantized(const PackedLinearArgs& args) {
  const std::int64_t row_blocks = args.num_inputs / kBlockInputs;
  const bool is_few = args.num_rows <= kFewRows;
  const std::int64_t num_panels = is_few ? 1 : (row_blocks + kPanelBlocks - 1) / kPanelBlocks;
  const std::int64_t panel_blocks = (row_blocks + num_panels - 1) / num_panels;
  const std::int64_t num_blocks = num_panels * args.num_rows * panel_blocks;
  constexpr std::int64_t kWords = (kBlockInputs + sizeof(Scale)) / sizeof(float);
  float* memory = scratch(1, static_cast<std::size_t>(num_blocks * kWords));
  auto* scales = reinterpret_cast<Scale*>(memory + num_blocks * kBlockInputs / 4);
  QuantizeJob job{args, {reinterpret_cast<std::int8_t*>(memory), scales, args.num_rows, panel_blocks}};
  if (is_few) {
    for (std::int64_t row = 0; row < args.num_rows; ++row) {
      job(row);
    }
  } else {
    parallel(args.num_rows, job);
  }
  return job.rows;
}

void packed_linear(const PackedLinearArgs& args) {
  if (args.num_rows == 0) {
    return;
  }
  PackedJob job{args, quantized(args), {}, 0, 1};
  const bool is_few = args.num_rows <= kFewRows;
  job.num_row_blocks = is_few ? 1 : (args.num_rows + kPanelRows - 1) / kPanelRows;
  std::int64_t first_output = 0;
  for (std::int64_t index = 0; index < args.num_pieces; ++index) {
    const PackedPiece& piece = args.pieces[index];
    const PackedShape shape = packed_shape(static_cast<PackedFormat>(piece.format));
    const std::int64_t num_tiles = (piece.num_outputs + kTileRows - 1) / kTileRows;
    const std::int64_t tile_bytes = kTileRows * args.num_inputs / shape.inputs * shape.bytes;
    const std::int64_t even = num_tiles / (4 * num_threads()) + 1;
    const std::int64_t most = kItemBytes / tile_bytes + 1;
    const std::int64_t pairs = num_tiles * job.num_row_blocks / (kPanelTiles * 4 * num_threads()) + 1;
    const std::int64_t group = pairs * kPanelTiles < kGroupTiles ? pairs * kPanelTiles : kGroupTiles;
    const std::int64_t tiles_an_item = is_few ? (even < most ? even : most) : group;
    job.pieces[index] = {&piece, first_output, job.num_items, num_tiles, tiles_an_item};
    job.num_items += (num_tiles + tiles_an_item - 1) / tiles_an_item * job.num_row_blocks;
    first_output += piece.num_outputs;
  }
  parallel(job.num_items, job);
}

// Row `row` of a packed matrix as numbers.
template <typename F>
void unpack_one(const PackedRowsArgs& args, std::int64_t row, std::int64_t place) {
  constexpr std::int64_t kParts = F::kInputs / kBlockInputs;
  const Byte* tile = args.data + row / kTileRows * (args.num_inputs / F::kInputs) * F::kBytes;
  const std::int64_t lane = row % kTileRows;
  for (std::int64_t block = 0; block < args.num_inputs / kBlockInputs; ++block) {
    typename F::Of own;
    F::expand(tile + block / kParts * F::kBytes, static_cast<int>(block % kParts), own);
    for (std::int64_t i = 0; i < kBlockInputs; ++i) {
      const std::int64_t group = i * F::kGroups / kBlockInputs;
      const Byte code = own.codes[i / 4][4 * lane + i % 4];
      const float whole = F::kSigned ? static_cast<std::int8_t>(code) : static_cast<float>(code);
      const float scale = own.factor[lane] * static_cast<float>(own.scales[group][2 * lane]);
      const float value = scale * whole + own.minimum[group][lane];
      const std::int64_t at = place * args.num_inputs + block * kBlockInputs + i;
      if (args.out_dtype == DType::kFloat32) {
        static_cast<float*>(args.out)[at] = value;
      } else {
        static_cast<Bf16*>(args.out)[at] = to_bf16(value);
      }
    }
  }
}

void packed_rows(const PackedRowsArgs& args) {
  with_format(args.format, [&](auto format) {
    using F = decltype(format);
    auto one = [&](std::int64_t place) { unpack_one<F>(args, args.ids[place], place); };
    parallel(args.num_ids, one);
  });
}

}  // namespace
}  // namespace tokenspeed::cpu
