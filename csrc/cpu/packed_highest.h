// SPDX-License-Identifier: Apache-2.0
// The highest output of each row, of a weight in planes, read in part.
//
// The plane of upper bits gives each output up to an error that has a bound: codes differ from the middle of what their
// upper bits allow by a vector e, so that a group of inputs that share a scale s adds at most s |e| |x| to it, by
// Cauchy and Schwarz. The packed weight has the largest |e| of each row, its blur; |x| of each group is known; so the
// bound is the blur times the sum of s |x|, which costs as much as the scales. First all outputs are computed so. Then,
// whole, the tile that promises most; then those others that may still hold something higher. What is computed whole
// has the bits that packed_linear gives it.
//
// Activations with a few large channels would make the bound useless. So blocks of 32 inputs whose |x| is largest are
// computed whole in the first round already, and add nothing to it but what rounding may.
#pragma once

#include "packed_body.h"

namespace tokenspeed::cpu {
namespace {

// More outputs than this part left over: one more block is read whole. Fewer than the other: one less.
constexpr double kManyLeft = 0.04;
constexpr double kFewLeft = 0.01;
constexpr std::int64_t kLeftItem = 8;  // tiles of the second round that a thread takes at once

// What the first round finds of some tiles and a row: no output is above `most`, and one of the tile is about as high
// as `likely`, the highest of them.
struct Promise {
  float most, likely;
  std::int64_t tile;
};

// Of the second round. lane: of the highest output, the first of several; -1 where one is NaN or +inf.
struct Left {
  std::int32_t row, tile, lane;
  float highest;
};

TOKENSPEED_INLINE Vec8 instead_of_nan(Vec8 value, float other) {
  return without_sign(value) > 0x7F800000 ? splat8(other) : value;
}

struct HighestJob {
  PackedHighestArgs args;
  Rows8 rows;
  float* lengths;  // of each row, block of 32 inputs and 16 of them, or of all 32 and whatever: what s is multiplied by
  std::uint8_t* is_whole;  // each block of 32
  float* bounds;           // of each row and tile: no output is above it
  Promise* promises;       // of each row and item
  std::int64_t num_tiles, tiles_an_item;
  std::int64_t num_bytes;  // of the weight

  [[nodiscard]] std::int64_t num_items() const { return (num_tiles + tiles_an_item - 1) / tiles_an_item; }

  [[nodiscard]] std::int64_t tiles_of_item(std::int64_t item) const {
    const std::int64_t left = num_tiles - item * tiles_an_item;
    return left < tiles_an_item ? left : tiles_an_item;
  }

  void commit(std::int64_t item, const float* results) const {
    const std::int64_t first = item * tiles_an_item;
    for (std::int64_t row = 0; row < rows.num_rows; ++row) {
      Promise best{-kInfinity, -kInfinity, first};
      for (std::int64_t tile = 0; tile < tiles_of_item(item); ++tile) {
        const float* own = results + 2 * (tile * rows.num_rows + row);
        bounds[row * num_tiles + first + tile] = own[0];
        best.most = own[0] > best.most ? own[0] : best.most;
        if (own[1] > best.likely) {
          best.likely = own[1];
          best.tile = first + tile;
        }
      }
      promises[row * num_items() + item] = best;
    }
  }

  // The item of whose tiles one seems to hold the row's highest output.
  [[nodiscard]] const Promise& best_of(std::int64_t row) const {
    const Promise* own = promises + row * num_items();
    std::int64_t best = 0;
    for (std::int64_t item = 1; item < num_items(); ++item) {
      best = own[item].likely > own[best].likely ? item : best;
    }
    return own[best];
  }

  template <typename F>
  [[nodiscard]] Blocks<F> tile_at(std::int64_t tile) const {
    return {args.piece->data, args.piece->num_outputs, args.num_inputs, tile};
  }

  [[nodiscard]] Vec8 blurs_of(std::int64_t tile) const {
    typedef std::uint8_t Eight __attribute__((vector_size(kFold)));
    const auto from_end = (num_tiles - tile) * kTileRows;
    const auto bytes = load_vector<Eight>(args.piece->data + num_bytes - from_end);
    return __builtin_convertvector(bytes, Vec8) * (1.0F / kBlurScale);
  }

  // spreads[row] += s |x| of each group of a part, with s in steps of the upper bits.
  template <typename F, int kRows>
  void add_spread(const typename F::Of& block, float step, std::int64_t place, Vec8 (&spreads)[kRows]) const {
#pragma GCC unroll 2
    for (int group = 0; group < F::kGroups; ++group) {
      const Vec8 scales = block.factor * __builtin_convertvector(even_shorts(block.scales[group]), Vec8);
      const Vec8 sizes = as<Vec8>(without_sign(scales));
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const float length = lengths[2 * (row * rows.panel_blocks + place) + group];
        spreads[row] = multiply_add(sizes, splat8(step * length), spreads[row]);
      }
    }
  }

  template <typename F, int kRows>
  void survey(std::int64_t item, float* results) const {
    using Upper = typename F::Upper;
    constexpr std::int64_t kParts = F::kInputs / kBlockInputs;
    const std::int64_t first_tile = item * tiles_an_item;
    const std::int64_t num_blocks = args.num_inputs / F::kInputs;
    for (std::int64_t tile = 0; tile < tiles_of_item(item); ++tile) {
      const Blocks<F> blocks = tile_at<F>(first_tile + tile);
      Vec8 sums[kRows][1] = {};
      Vec8 spreads[kRows] = {};
      for (std::int64_t block = 0; block < num_blocks; ++block) {
        blocks.fetch_first(block, kFetchAhead);
        for (int part = 0; part < kParts; ++part) {
          const std::int64_t input = block * kParts + part;
          if (is_whole[input] != 0) {
            blocks.fetch_second(block, 1);
            typename F::Of own;
            blocks.expand(block, part, own);
            multiply<F, kRows, 1>(rows.at(0, 0, input), &own, 1, sums);
            add_spread<F, kRows>(own, F::kStep, input, spreads);
          } else {
            typename Upper::Of own;
            Upper::expand(blocks.first + block * F::kBytes, part, own);
            multiply<Upper, kRows, 1>(rows.at(0, 0, input), &own, 1, sums);
            add_spread<Upper, kRows>(own, 1.0F, input, spreads);
          }
        }
      }
      const Vec8 blurs = blurs_of(first_tile + tile);
      for (std::int64_t row = 0; row < kRows; ++row, results += 2) {
        const Vec8 least_above = multiply_add(blurs, spreads[row], sums[row][0]);
        results[0] = highest_of(instead_of_nan(least_above, kInfinity));
        results[1] = highest_of(instead_of_nan(sums[row][0], -kInfinity));
      }
    }
  }

  template <typename F>
  void survey(std::int64_t item, float* results) const {
    if constexpr (kFewRows > 1) {
      switch (rows.num_rows) {
        case 4:
          return survey<F, 4>(item, results);
        case 3:
          return survey<F, 3>(item, results);
        case 2:
          return survey<F, 2>(item, results);
        default:
          break;
      }
    }
    survey<F, 1>(item, results);
  }

  template <typename F>
  void fetch(std::int64_t tile) const {
    const Blocks<F> blocks = tile_at<F>(tile);
    for (std::int64_t block = 0; block < args.num_inputs / F::kInputs; ++block) {
      blocks.fetch_first(block, 0);
      blocks.fetch_second(block, 0);
    }
  }

  // One tile of a row.
  template <typename F>
  void look(Left& left) const {
    constexpr int kParts = F::kInputs / kBlockInputs;
    const Blocks<F> blocks = tile_at<F>(left.tile);
    Vec8 sums[1][1] = {};
    for (std::int64_t block = 0; block < args.num_inputs / F::kInputs; ++block) {
      for (int part = 0; part < kParts; ++part) {
        typename F::Of own;
        blocks.expand(block, part, own);
        multiply<F, 1, 1>(rows.at(left.row, 0, block * kParts + part), &own, 1, sums);
      }
    }
    left.lane = 0;
    left.highest = -kInfinity;
    for (int lane = 0; lane < kTileRows && left.tile * kTileRows + lane < args.piece->num_outputs; ++lane) {
      const float value = sums[0][0][lane];
      if (!(value < kInfinity)) {
        left.lane = -1;
        return;
      }
      if (value > left.highest) {
        left.lane = lane;
        left.highest = value;
      }
    }
  }
};

template <typename Use>
TOKENSPEED_INLINE void with_planes(std::int64_t format, Use use) {
  static_cast<PackedFormat>(format) == PackedFormat::kQ8_0Planes ? use(Q8_0Planes{}) : use(Q6KPlanes{});
}

struct SurveyTask : BackupTask {
  HighestJob job;
};

// Lengths of the activations of each group of a row: 32 inputs where a format has one, else 16.
TOKENSPEED_INLINE void find_lengths(const HighestJob& job, std::int64_t row, bool has_halves) {
  for (std::int64_t block = 0; block < job.rows.panel_blocks; ++block) {
    const Rows8 own = job.rows.at(row, 0, block);
    const Scale& scale = *own.scales;
    float squares[2] = {};
    for (std::int64_t i = 0; i < kBlockInputs; ++i) {
      const float code = own.codes[i];
      const float value = scale.apart == static_cast<std::uint32_t>(i) + 1 ? scale.rest : code;
      squares[has_halves ? 2 * i / kBlockInputs : 0] += value * value;
    }
    float* lengths = job.lengths + 2 * (row * job.rows.panel_blocks + block);
    for (int half = 0; half < 2; ++half) {
      lengths[half] = scale.scale * __builtin_sqrtf(squares[half]);
    }
  }
}

// The blocks that matter most to all rows together are read whole; what lengths are multiplied by then is only for
// what sums in float32 may be off by: each of them once for every block, relative to codes of at most sixteen steps.
TOKENSPEED_INLINE void choose_whole(const HighestJob& job, std::int64_t count) {
  const std::int64_t num_blocks = job.rows.panel_blocks;
  const float rounding = 1e-4F + 5e-5F * static_cast<float>(num_blocks + 8);
  auto length_of = [&](std::int64_t row, std::int64_t block) {
    const float* own = job.lengths + 2 * (row * num_blocks + block);
    return own[0] + own[1];
  };
  __builtin_memset(job.is_whole, 0, static_cast<std::size_t>(num_blocks));
  for (; count > 0; --count) {
    std::int64_t largest = -1;
    float most = 0.0F;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      float all = 0.0F;
      for (std::int64_t row = 0; row < job.rows.num_rows; ++row) {
        all += length_of(row, block);
      }
      if (job.is_whole[block] == 0 && all > most) {
        largest = block;
        most = all;
      }
    }
    if (largest < 0) {
      break;
    }
    job.is_whole[largest] = 1;
  }
  for (std::int64_t row = 0; row < job.rows.num_rows; ++row) {
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      float* own = job.lengths + 2 * (row * num_blocks + block);
      const float factor = rounding + (job.is_whole[block] != 0 ? 0.0F : 1.0F);
      own[0] *= factor;
      own[1] *= factor;
    }
  }
}

// The tiles that may hold an output above `found[row]`, or one that is not finite. Returns how many.
TOKENSPEED_INLINE std::int64_t list_left(const HighestJob& job, const Left* found, Left* left) {
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < job.rows.num_rows; ++row) {
    const Promise* promises = job.promises + row * job.num_items();
    const float* bounds = job.bounds + row * job.num_tiles;
    for (std::int64_t item = 0; item < job.num_items() && found[row].lane >= 0; ++item) {
      const std::int64_t first = item * job.tiles_an_item;
      const std::int64_t end = promises[item].most >= found[row].highest ? first + job.tiles_of_item(item) : first;
      for (std::int64_t tile = first; tile < end; ++tile) {
        if (bounds[tile] >= found[row].highest && tile != found[row].tile) {
          left[count++] = {static_cast<std::int32_t>(row), static_cast<std::int32_t>(tile), 0, 0.0F};
        }
      }
    }
  }
  return count;
}

TOKENSPEED_INLINE void keep_highest(const Left& other, Left& best) {
  if (best.lane < 0 || other.lane < 0) {
    best.lane = -1;
  } else if (other.highest > best.highest || (other.highest == best.highest && other.tile < best.tile)) {
    best = other;
  }
}

// All of a survey lies in lasting memory: the task, activations, their lengths, and which blocks are read whole.
template <typename F>
void find_highest(const PackedHighestArgs& args) {
  constexpr std::size_t kTaskBytes = (sizeof(SurveyTask) + 63) / 64 * 64;
  const std::int64_t num_blocks = args.num_inputs / kBlockInputs;
  const auto all_blocks = static_cast<std::size_t>(args.num_rows * num_blocks);
  std::byte* memory = lasting_memory(kTaskBytes + all_blocks * (kBytesABlock + 2 * sizeof(float)) +
                                     static_cast<std::size_t>(num_blocks));
  auto* task = reinterpret_cast<SurveyTask*>(memory);
  *task = {{[](const BackupTask& own, std::int64_t item, float* result) {
              static_cast<const SurveyTask&>(own).job.survey<F>(item, result);
            },
            [](const BackupTask& own, std::int64_t item, const float* result) {
              static_cast<const SurveyTask&>(own).job.commit(item, result);
            },
            0, 0},
           {args, {nullptr, nullptr, args.num_rows, num_blocks}, nullptr, nullptr, nullptr, nullptr, 0, 1, 0}};
  HighestJob& job = task->job;
  memory += kTaskBytes;
  place_rows(memory, args.num_rows * num_blocks, job.rows);
  job.lengths = reinterpret_cast<float*>(memory + all_blocks * kBytesABlock);
  job.is_whole = reinterpret_cast<std::uint8_t*>(job.lengths + 2 * all_blocks);
  const QuantizeJob quantize{{args.x, args.num_inputs, args.x_stride, args.dtype}, job.rows};
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    quantize(row);
    find_lengths(job, row, F::kGroups > 1);
  }
  const std::int64_t wanted = *args.num_whole < 0 ? 0 : *args.num_whole;
  const std::int64_t num_whole = wanted < num_blocks ? wanted : num_blocks;
  choose_whole(job, num_whole);

  job.num_tiles = tiles_of(args.piece->num_outputs);
  job.num_bytes = static_cast<std::int64_t>(
      packed_size(static_cast<PackedFormat>(args.piece->format), args.piece->num_outputs, args.num_inputs));
  const std::int64_t even = job.num_tiles / (4 * num_threads()) + 1;
  const std::int64_t largest = kItemBytes / (args.num_inputs / F::kInputs * F::kBytes) + 1;
  job.tiles_an_item = even < largest ? even : largest;
  const auto num_pairs = static_cast<std::size_t>(args.num_rows * job.num_tiles);
  const auto num_promises = static_cast<std::size_t>(args.num_rows * job.num_items());
  job.promises = reinterpret_cast<Promise*>(scratch(0, num_promises * sizeof(Promise) / sizeof(float) + num_pairs));
  job.bounds = reinterpret_cast<float*>(job.promises + num_promises);
  task->count = job.num_items();
  task->num_result_floats = static_cast<std::size_t>(2 * job.tiles_an_item * args.num_rows);
  parallel_with_backup(*task);

  Left found[kFewRows];
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    found[row] = {static_cast<std::int32_t>(row), static_cast<std::int32_t>(job.best_of(row).tile), 0, 0.0F};
    job.look<F>(found[row]);
  }
  auto* left = reinterpret_cast<Left*>(scratch(1, num_pairs * sizeof(Left) / sizeof(float)));
  const std::int64_t num_left = list_left(job, found, left);
  auto look_at_some = [&](std::int64_t item) {
    for (std::int64_t i = item * kLeftItem; i < num_left && i < (item + 1) * kLeftItem; ++i) {
      if (i + 1 < num_left) {
        job.fetch<F>(left[i + 1].tile);
      }
      job.look<F>(left[i]);
    }
  };
  parallel((num_left + kLeftItem - 1) / kLeftItem, look_at_some);
  for (std::int64_t i = 0; i < num_left; ++i) {
    keep_highest(left[i], found[left[i].row]);
  }
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const Left& own = found[row];
    args.ids[row] = own.lane < 0 ? 0 : own.tile * kTileRows + own.lane;
    args.is_faulty[row] = own.lane < 0 || own.highest == -kInfinity ? 1 : 0;
  }
  const double part = static_cast<double>(num_left) / static_cast<double>(num_pairs);
  if (part > kManyLeft && num_whole < num_blocks) {
    *args.num_whole = num_whole + 1;
  } else {
    *args.num_whole = part < kFewLeft && num_whole > 0 ? num_whole - 1 : num_whole;
  }
}

void packed_highest(const PackedHighestArgs& args) {
  for (std::int64_t row = 0; row < args.num_rows; row += kFewRows) {
    PackedHighestArgs some = args;
    const std::int64_t row_bytes = args.x_stride * (args.dtype == DType::kFloat32 ? 4 : 2);
    const std::int64_t left = args.num_rows - row;
    some.x = static_cast<const Byte*>(args.x) + row * row_bytes;
    some.ids += row;
    some.is_faulty += row;
    some.num_rows = left < kFewRows ? left : kFewRows;
    with_planes(args.piece->format, [&](auto format) { find_highest<decltype(format)>(some); });
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
