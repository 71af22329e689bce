// SPDX-License-Identifier: Apache-2.0
// Matrix product of activations with a packed weight. Rows of activations become bytes, 32 inputs to a scale; products
// of bytes are added up in whole numbers, and what 32 inputs come to is added in float32, block after block. That order
// is the same whatever the number of rows, so a row's result does not depend on the batch it came in.
#pragma once

#include "packed_formats.h"
#include "packed_inputs.h"

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

// The eight rows' weights for one of a block's inputs, before factor and minimum.
template <typename F>
TOKENSPEED_INLINE Vec8 weights_of(const typename F::Of& block, std::uint32_t input) {
  const Words words = as<Words>(block.codes[input / 4]);
  const Words top = words << (24 - 8 * (input % 4));
  const Ints codes = F::kSigned ? as<Ints>(top) >> 24 : as<Ints>(top >> 24);
  return __builtin_convertvector(codes * even_shorts(block.scales[input * F::kGroups / kBlockInputs]), Vec8);
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
      Vec8 values[kTiles];
#pragma GCC unroll 8
      for (int tile = 0; tile < kTiles; ++tile) {
        values[tile] = __builtin_convertvector(totals[row][tile], Vec8);
      }
      if (__builtin_expect(scale.apart != 0, 0)) {
#pragma GCC unroll 8
        for (int tile = 0; tile < kTiles; ++tile) {
          const Vec8 weights = weights_of<F>(panel[tile], scale.apart - 1);
          values[tile] = multiply_add(weights, splat8(scale.rest), values[tile]);
        }
      }
#pragma GCC unroll 8
      for (int tile = 0; tile < kTiles; ++tile) {
        Vec8& sum = sums[row][tile];
        sum = multiply_add(values[tile], panel[tile].factor * scale.scale, sum);
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

// Some tiles of a piece and, of many rows, some rows.
struct PackedItem {
  const PieceJob& job;
  std::int64_t first_row, first_tile, num_tiles;
};

struct PackedJob {
  PackedLinearArgs args;
  Rows8 rows;
  PieceJob pieces[kPiecesMax];
  std::int64_t num_items, num_row_blocks, most_tiles_an_item;

  [[nodiscard]] PackedItem item_at(std::int64_t item) const {
    std::int64_t index = 0;
    while (index + 1 < args.num_pieces && item >= pieces[index + 1].first_item) {
      index += 1;
    }
    const PieceJob& job = pieces[index];
    const std::int64_t place = item - job.first_item;
    const std::int64_t first_tile = place / num_row_blocks * job.tiles_an_item;
    const std::int64_t left = job.num_tiles - first_tile;
    return {job, place % num_row_blocks * kPanelRows, first_tile, left < job.tiles_an_item ? left : job.tiles_an_item};
  }

  // Of many rows.
  void operator()(std::int64_t index) const {
    const PackedItem item = item_at(index);
    const std::int64_t left = args.num_rows - item.first_row;
    with_format(static_cast<PackedFormat>(item.job.piece->format),
                [&](auto format) { many_rows<decltype(format)>(item, left < kPanelRows ? left : kPanelRows); });
  }

  // Of few rows: eight results of each of them, tile by tile.
  void compute(std::int64_t index, float* results) const {
    const PackedItem item = item_at(index);
    with_format(static_cast<PackedFormat>(item.job.piece->format),
                [&](auto format) { few_rows<decltype(format)>(item, results); });
  }

  void commit(std::int64_t index, const float* results) const {
    const PackedItem item = item_at(index);
    for (std::int64_t tile = item.first_tile; tile < item.first_tile + item.num_tiles; ++tile) {
      for (std::int64_t row = 0; row < args.num_rows; ++row, results += kTileRows) {
        finish(item.job, row, tile, load8(results));
      }
    }
  }

  template <typename F>
  Blocks<F> tile_at(const PieceJob& job, std::int64_t tile) const {
    return {job.piece->data, job.piece->num_outputs, args.num_inputs, tile};
  }

  template <typename F>
  void few_rows(const PackedItem& item, float* results) const {
    if constexpr (kFewRows > 1) {
      switch (args.num_rows) {
        case 4:
          return few_rows<F, 4>(item, results);
        case 3:
          return few_rows<F, 3>(item, results);
        case 2:
          return few_rows<F, 2>(item, results);
        default:
          break;
      }
    }
    few_rows<F, 1>(item, results);
  }

  template <typename F, int kRows>
  void few_rows(const PackedItem& item, float* results) const {
    constexpr std::int64_t kParts = F::kInputs / kBlockInputs;
    const std::int64_t num_blocks = args.num_inputs / F::kInputs;
    for (std::int64_t tile = 0; tile < item.num_tiles; ++tile) {
      const Blocks<F> blocks = tile_at<F>(item.job, item.first_tile + tile);
      Vec8 sums[kRows][1] = {};
      for (std::int64_t block = 0; block < num_blocks; ++block) {
        blocks.fetch_first(block, kFetchAhead);
        blocks.fetch_second(block, 1);
        for (int part = 0; part < kParts; ++part) {
          typename F::Of own;
          blocks.expand(block, part, own);
          multiply<F, kRows, 1>(rows.at(0, 0, block * kParts + part), &own, 1, sums);
        }
      }
      for (std::int64_t row = 0; row < kRows; ++row, results += kTileRows) {
        store8(results, sums[row][0]);
      }
    }
  }

  // Some tiles, panel by panel of the rows' activations.
  template <typename F>
  void many_rows(const PackedItem& item, std::int64_t num_rows) const {
    const std::int64_t num_blocks = args.num_inputs / kBlockInputs;
    const std::int64_t pair_sums = num_rows * kPanelTiles * kTileRows;
    const auto num_sums = static_cast<std::size_t>(pair_sums * (item.num_tiles + 1) / kPanelTiles);
    float* sums = scratch(0, num_sums);
    __builtin_memset(sums, 0, num_sums * sizeof(float));
    for (std::int64_t panel = 0; panel * rows.panel_blocks < num_blocks; ++panel) {
      for (std::int64_t place = 0; place < item.num_tiles; place += kPanelTiles) {
        add_pair<F>(item.job, item.first_tile + place, panel, item.first_row, num_rows,
                    sums + place / kPanelTiles * pair_sums);
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
    const Blocks<F> sources[kPanelTiles] = {tile_at<F>(job, tile), tile_at<F>(job, has_second ? tile + 1 : tile)};
    auto* panel = reinterpret_cast<Panel*>(scratch(2, kPanelBlocks * sizeof(Panel) / sizeof(float)));
    for (std::int64_t i = 0; i < size; ++i) {
      const std::int64_t block = (first + i) / kParts;
      const int part = static_cast<int>((first + i) % kParts);
      for (std::int64_t side = 0; side < kPanelTiles; ++side) {
        sources[side].expand(block, part, panel[i][side]);
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

struct Activations {
  const void* x;
  std::int64_t num_inputs, stride;
  DType dtype;
};

struct QuantizeJob {
  Activations from;
  Rows8 rows;

  void operator()(std::int64_t row) const {
    const std::int64_t num_blocks = from.num_inputs / kBlockInputs;
    if (from.dtype == DType::kFloat32) {
      quantize_row(static_cast<const float*>(from.x) + row * from.stride, num_blocks, rows, row);
    } else {
      quantize_row(static_cast<const Bf16*>(from.x) + row * from.stride, num_blocks, rows, row);
    }
  }
};

// How activations lie as bytes, and how many blocks of them there are in all.
TOKENSPEED_INLINE Rows8 shape_of(const PackedLinearArgs& args, std::int64_t& num_blocks) {
  const std::int64_t row_blocks = args.num_inputs / kBlockInputs;
  const std::int64_t num_panels = args.num_rows <= kFewRows ? 1 : (row_blocks + kPanelBlocks - 1) / kPanelBlocks;
  const std::int64_t panel_blocks = (row_blocks + num_panels - 1) / num_panels;
  num_blocks = num_panels * args.num_rows * panel_blocks;
  return {nullptr, nullptr, args.num_rows, panel_blocks};
}

constexpr std::size_t kBytesABlock = kBlockInputs + sizeof(Scale);  // of activations as bytes

TOKENSPEED_INLINE void place_rows(std::byte* memory, std::int64_t num_blocks, Rows8& rows) {
  rows.codes = reinterpret_cast<std::int8_t*>(memory);
  rows.scales = reinterpret_cast<Scale*>(memory + num_blocks * kBlockInputs);
}

// Shares the outputs out. num_jobs: of about this size that are shared out together.
TOKENSPEED_INLINE void share_out(PackedJob& job, std::int64_t num_jobs = 1) {
  const PackedLinearArgs& args = job.args;
  const bool is_few = args.num_rows <= kFewRows;
  job.num_row_blocks = is_few ? 1 : (args.num_rows + kPanelRows - 1) / kPanelRows;
  std::int64_t first_output = 0;
  for (std::int64_t index = 0; index < args.num_pieces; ++index) {
    const PackedPiece& piece = args.pieces[index];
    const PackedShape shape = packed_shape(static_cast<PackedFormat>(piece.format));
    const std::int64_t num_tiles = tiles_of(piece.num_outputs);
    const std::int64_t tile_bytes = kTileRows * args.num_inputs / shape.inputs * shape.bytes;
    const std::int64_t even = num_tiles * num_jobs / (4 * num_threads()) + 1;
    const std::int64_t most = kItemBytes / tile_bytes + 1;
    const std::int64_t pairs = num_tiles * num_jobs * job.num_row_blocks / (kPanelTiles * 4 * num_threads()) + 1;
    const std::int64_t group = pairs * kPanelTiles < kGroupTiles ? pairs * kPanelTiles : kGroupTiles;
    const std::int64_t tiles_an_item = is_few ? (even < most ? even : most) : group;
    job.pieces[index] = {&piece, first_output, job.num_items, num_tiles, tiles_an_item};
    job.num_items += (num_tiles + tiles_an_item - 1) / tiles_an_item * job.num_row_blocks;
    job.most_tiles_an_item = job.most_tiles_an_item > tiles_an_item ? job.most_tiles_an_item : tiles_an_item;
    first_output += piece.num_outputs;
  }
}

struct FewRowsTask : BackupTask {
  PackedJob job;
};

// What threads read lies behind the task.
TOKENSPEED_INLINE void multiply_few(const PackedLinearArgs& args) {
  constexpr std::size_t kTaskBytes = (sizeof(FewRowsTask) + 63) / 64 * 64;
  std::int64_t num_blocks = 0;
  const Rows8 shape = shape_of(args, num_blocks);
  std::byte* memory = lasting_memory(kTaskBytes + static_cast<std::size_t>(num_blocks) * kBytesABlock);
  auto* task = reinterpret_cast<FewRowsTask*>(memory);
  *task = {{[](const BackupTask& own, std::int64_t item, float* result) {
              static_cast<const FewRowsTask&>(own).job.compute(item, result);
            },
            [](const BackupTask& own, std::int64_t item, const float* result) {
              static_cast<const FewRowsTask&>(own).job.commit(item, result);
            },
            0, 0},
           {args, shape, {}, 0, 1, 0}};
  place_rows(memory + kTaskBytes, num_blocks, task->job.rows);
  const QuantizeJob quantize{{args.x, args.num_inputs, args.x_stride, args.dtype}, task->job.rows};
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    quantize(row);
  }
  share_out(task->job);
  task->count = task->job.num_items;
  task->num_result_floats = static_cast<std::size_t>(task->job.most_tiles_an_item * args.num_rows * kTileRows);
  parallel_with_backup(*task);
}

TOKENSPEED_INLINE void multiply_many(const PackedLinearArgs& args) {
  std::int64_t num_blocks = 0;
  PackedJob job{args, shape_of(args, num_blocks), {}, 0, 1, 0};
  auto* memory = scratch(1, static_cast<std::size_t>(num_blocks) * kBytesABlock / sizeof(float));
  place_rows(reinterpret_cast<std::byte*>(memory), num_blocks, job.rows);
  QuantizeJob quantize{{args.x, args.num_inputs, args.x_stride, args.dtype}, job.rows};
  parallel(args.num_rows, quantize);
  share_out(job);
  parallel(job.num_items, job);
}

void packed_linear(const PackedLinearArgs& args) {
  if (args.num_rows > 0) {
    args.num_rows <= kFewRows ? multiply_few(args) : multiply_many(args);
  }
}

// Row `row` of a packed matrix as numbers.
template <typename F>
void unpack_one(const PackedRowsArgs& args, std::int64_t row, std::int64_t place) {
  constexpr std::int64_t kParts = F::kInputs / kBlockInputs;
  const Blocks<F> blocks(args.data, args.num_outputs, args.num_inputs, row / kTileRows);
  const std::int64_t lane = row % kTileRows;
  for (std::int64_t block = 0; block < args.num_inputs / kBlockInputs; ++block) {
    typename F::Of own;
    blocks.expand(block / kParts, static_cast<int>(block % kParts), own);
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
