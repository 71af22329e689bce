// SPDX-License-Identifier: Apache-2.0
// Attention of queries to one tile of keys and values: sums of products, scores, and a softmax that runs on. Knows no
// pages. Internal linkage: see kernel_set.h.
#pragma once

#include "simd.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kTile = 32;
constexpr float kNoScore = -1e30F;

// Softmax of one query so far: values is the sum of exp(score - top) * v, total the sum of exp(score - top).
struct Softmax {
  float* values;
  float top;
  float total;
};

// What the codes of each key and value of a tile are multiplied by.
struct Scales {
  float keys[kTile];
  float values[kTile];
};

// Keys and values of a tile, each a run of numbers N. scales: null where these are not codes.
template <typename N>
struct TileOf {
  const N* keys[kTile];
  const N* values[kTile];
  const Scales* scales = nullptr;
};
using Tile = TileOf<float>;

// Queries of one token that meet a tile of numbers N together: what is not float32 is widened once for all of them.
template <typename N>
constexpr int kMeet = sizeof(N) == sizeof(float) ? 1 : 4;

TOKENSPEED_INLINE std::int64_t min_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
TOKENSPEED_INLINE std::int64_t max_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

TOKENSPEED_INLINE void clear(Softmax& state, std::int64_t width) {
  state.top = kNoScore;
  state.total = 0.0F;
  __builtin_memset(state.values, 0, static_cast<std::size_t>(width) * sizeof(float));
}

// kVectors vectors of the values of kNum queries: values = values * decay + sum over t of weights[t] * v[t].
template <int kVectors, int kNum, typename N>
TOKENSPEED_INLINE void add_values(Softmax* states, const TileOf<N>& tile, const float* weights, std::int64_t first,
                                  std::int64_t last, std::int64_t offset, const float* decays) {
  Vec sums[kNum][kVectors];
#pragma GCC unroll 4
  for (int query = 0; query < kNum; ++query) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      sums[query][i] = load(states[query].values + offset + i * kLanes) * decays[query];
    }
  }
  for (std::int64_t t = first; t < last; ++t) {
    const N* source = tile.values[t] + offset;
    Vec each[kNum];
#pragma GCC unroll 4
    for (int query = 0; query < kNum; ++query) {
      each[query] = splat(weights[query * kTile + t]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const Vec value = load(source + i * kLanes);
#pragma GCC unroll 4
      for (int query = 0; query < kNum; ++query) {
        sums[query][i] = multiply_add(each[query], value, sums[query][i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int query = 0; query < kNum; ++query) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      store(states[query].values + offset + i * kLanes, sums[query][i]);
    }
  }
}

// From sums of products to scores: those of the positions [first, last) of a tile, kNoScore elsewhere; returns the
// largest. scales: of the codes of each key, or null.
TOKENSPEED_INLINE float to_scores(const AttentionArgs& args, std::int64_t first, std::int64_t last, const float* scales,
                                  float* scores) {
  alignas(64) static constexpr std::int32_t kPlaces[kTile] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                              11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                              22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
  Vec tops = splat(kNoScore);
  for (std::int64_t t = 0; t < kTile; t += kLanes) {
    Vec score = load(scores + t) * args.scale;
    if (scales != nullptr) {
      score *= load(scales + t);
    }
    for (int i = 0; args.soft_cap > 0.0F && i < kLanes; ++i) {
      score[i] = args.soft_cap * __builtin_tanhf(score[i] / args.soft_cap);
    }
    VecInt place;
    __builtin_memcpy(&place, kPlaces + t, sizeof(place));
    const VecInt is_seen = (place >= static_cast<std::int32_t>(first)) & (place < static_cast<std::int32_t>(last));
    score = is_seen ? score : splat(kNoScore);
    store(scores + t, score);
    tops = score > tops ? score : tops;
  }
  float top = kNoScore;
  for (int i = 0; i < kLanes; ++i) {
    top = tops[i] > top ? tops[i] : top;
  }
  return top;
}

// The sums of products of kNum queries, `width` apart, and the keys of a tile, those of the positions [first, last) at
// least. scores: kTile for each query.
template <int kNum, typename N>
__attribute__((noinline)) void multiply_keys(const float* queries, std::int64_t width, const TileOf<N>& tile,
                                             std::int64_t first, std::int64_t last, float* scores) {
  constexpr int kKeys = kNum == 1 ? 8 : kNum == 2 ? 4 : 2;  // at a time, so that sums stay in registers
  for (std::int64_t group = first / 8 * 8; group < last; group += 8) {
    Vec sums[kNum][8];
#pragma GCC unroll 4
    for (int done = 0; done < 8; done += kKeys) {
      Vec some[kNum][kKeys] = {};
      for (std::int64_t i = 0; i < width; i += kLanes) {
        Vec q[kNum];
#pragma GCC unroll 4
        for (int query = 0; query < kNum; ++query) {
          q[query] = load(queries + query * width + i);
        }
#pragma GCC unroll 8
        for (int t = 0; t < kKeys; ++t) {
          const Vec key = load(tile.keys[group + done + t] + i);
#pragma GCC unroll 4
          for (int query = 0; query < kNum; ++query) {
            some[query][t] = multiply_add(q[query], key, some[query][t]);
          }
        }
      }
#pragma GCC unroll 4
      for (int query = 0; query < kNum; ++query) {
#pragma GCC unroll 8
        for (int t = 0; t < kKeys; ++t) {
          sums[query][done + t] = some[query][t];
        }
      }
    }
#pragma GCC unroll 4
    for (int query = 0; query < kNum; ++query) {
      const Vec8 totals = sum_each(sums[query]);
      __builtin_memcpy(scores + query * kTile + group, &totals, sizeof(totals));
    }
  }
}

// Keys of a tile by dimension: number i of key t at kTile i + t.
TOKENSPEED_INLINE void turn_keys(const Tile& tile, std::int64_t width, float* turned) {
  for (std::int64_t i = 0; i < width; i += kFold) {
    for (std::int64_t first = 0; first < kTile; first += kFold) {
      Vec8 rows[kFold], pairs[kFold], quads[kFold];
#pragma GCC unroll 8
      for (int t = 0; t < kFold; ++t) {
        __builtin_memcpy(&rows[t], tile.keys[first + t] + i, sizeof(Vec8));
      }
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        pairs[2 * t] = __builtin_shufflevector(rows[2 * t], rows[2 * t + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[2 * t + 1] = __builtin_shufflevector(rows[2 * t], rows[2 * t + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
#pragma GCC unroll 2
      for (int t = 0; t < 2; ++t) {
        for (int half = 0; half < 2; ++half) {
          const Vec8 low = pairs[4 * t + half];
          const Vec8 high = pairs[4 * t + 2 + half];
          quads[4 * t + 2 * half] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 4, 5, 12, 13);
          quads[4 * t + 2 * half + 1] = __builtin_shufflevector(low, high, 2, 3, 10, 11, 6, 7, 14, 15);
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const Vec8 low = __builtin_shufflevector(quads[t], quads[4 + t], 0, 1, 2, 3, 8, 9, 10, 11);
        const Vec8 high = __builtin_shufflevector(quads[t], quads[4 + t], 4, 5, 6, 7, 12, 13, 14, 15);
        __builtin_memcpy(turned + (i + t) * kTile + first, &low, sizeof(low));
        __builtin_memcpy(turned + (i + 4 + t) * kTile + first, &high, sizeof(high));
      }
    }
  }
}

constexpr int kTileVectors = kTile / kLanes;
constexpr int kQueries = 8 / kTileVectors;  // that meet turned keys together, as many sums as hide their latency

// As multiply_keys, of kQueries queries one after another, with the same sums in the same order, and nothing to be
// added up across lanes. scores: kTile for each query.
__attribute__((noinline)) void multiply_turned(const float* queries, std::int64_t width, const float* turned,
                                               float* scores) {
  constexpr int kSums = kQueries * kTileVectors;
  Vec lanes[kLanes][kSums];
  for (int lane = 0; lane < kLanes; ++lane) {
    Vec sums[kSums] = {};
    for (std::int64_t i = lane; i < width; i += kLanes) {
      Vec keys[kTileVectors];
#pragma GCC unroll 4
      for (int vector = 0; vector < kTileVectors; ++vector) {
        keys[vector] = load(turned + i * kTile + vector * kLanes);
      }
#pragma GCC unroll 4
      for (int query = 0; query < kQueries; ++query) {
        const Vec q = splat(queries[query * width + i]);
#pragma GCC unroll 4
        for (int vector = 0; vector < kTileVectors; ++vector) {
          Vec& sum = sums[query * kTileVectors + vector];
          sum = multiply_add(q, keys[vector], sum);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      lanes[lane][i] = sums[i];
    }
  }
  // The order of `sum` and of sum_each.
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) {
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        lanes[lane][i] += lanes[lane + distance][i];
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) {
    store(scores + i * kLanes, lanes[0][i]);
  }
}

// From the sums of products of one query to what the values of the positions [first, last) are multiplied by; the
// query's softmax takes the weights into its total. Returns what its values so far are to be multiplied by.
TOKENSPEED_INLINE float to_weights(const AttentionArgs& args, std::int64_t first, std::int64_t last,
                                   const Scales* scales, float* weights, Softmax& state) {
  const float tile_top = to_scores(args, first, last, scales == nullptr ? nullptr : scales->keys, weights);
  const float top = tile_top > state.top ? tile_top : state.top;
  const float decay = exp(state.top - top);
  Vec total = Vec{};
  for (std::int64_t i = 0; i < kTile; i += kLanes) {
    const Vec score = load(weights + i);
    const Vec weight = score > splat(kNoScore) ? exp(score - top) : Vec{};
    store(weights + i, scales == nullptr ? weight : weight * load(scales->values + i));
    total += weight;
  }
  state.top = top;
  state.total = state.total * decay + sum(total);
  return decay;
}

// Adds the positions [first, last) of a tile to the softmax of kNum queries. weights: their sums of products with the
// keys there, kTile for each; they are changed.
template <int kNum, typename N>
__attribute__((noinline)) void add_tile(const AttentionArgs& args, std::int64_t width, const TileOf<N>& tile,
                                        std::int64_t first, std::int64_t last, float* weights, Softmax* states) {
  float decays[kNum];
  for (int query = 0; query < kNum; ++query) {
    decays[query] = to_weights(args, first, last, tile.scales, weights + query * kTile, states[query]);
  }
  constexpr int kMost = kNum == 1 ? 8 : kLanes == 16 || kNum < 4 ? 4 : 2;  // vectors at a time, which fill registers
  std::int64_t offset = 0;
  for (; offset + kMost * kLanes <= width; offset += kMost * kLanes) {
    add_values<kMost, kNum>(states, tile, weights, first, last, offset, decays);
  }
  for (; offset + 2 * kLanes <= width; offset += 2 * kLanes) {
    add_values<2, kNum>(states, tile, weights, first, last, offset, decays);
  }
  for (; offset < width; offset += kLanes) {
    add_values<1, kNum>(states, tile, weights, first, last, offset, decays);
  }
}

// Folds a span's softmax into the sum over the spans before it.
__attribute__((noinline)) void merge(Softmax& sum, const Softmax& span, std::int64_t width) {
  const float top = span.top > sum.top ? span.top : sum.top;
  const float keep = exp(sum.top - top);
  const float take = exp(span.top - top);
  sum.top = top;
  sum.total = sum.total * keep + span.total * take;
  for (std::int64_t i = 0; i < width; i += kLanes) {
    store(sum.values + i, load(sum.values + i) * keep + load(span.values + i) * take);
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
