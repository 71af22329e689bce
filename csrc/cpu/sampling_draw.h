// SPDX-License-Identifier: Apache-2.0
// The draw among tokens of a row, without a sort.
//
// The noise of a draw is bounded, so groups far below the best score so far are not given any. What top-k and min-p
// keep is listed. For top-p nothing is sorted either: a kept set holds each token that is more likely than one in it.
// So the winner among all tokens, where it is kept, is the winner among the kept ones; where it is not, neither is any
// token as likely or less, and the next winner is looked for among the more likely ones. Each look drops a random part
// of those.
#pragma once

#include "sampling_rows.h"

namespace tokenspeed::cpu {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
TOKENSPEED_INLINE std::uint64_t mix64(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

// The 32-bit finaliser of MurmurHash3 (Appleby).
TOKENSPEED_INLINE VecBits mix32(VecBits x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6BU;
  x = (x ^ (x >> 13)) * 0xC2B2AE35U;
  return x ^ (x >> 16);
}

// The uniform numbers of some tokens, in [1/2, 2^31].
TOKENSPEED_INLINE Vec uniform(VecBits ids, std::uint64_t key) {
  VecBits bits = mix32(ids * 0x9E3779B1U + static_cast<std::uint32_t>(key));
  bits = mix32(bits ^ static_cast<std::uint32_t>(key >> 32)) & 0x7FFFFFFFU;
  return __builtin_convertvector(as<VecInt>(bits), Vec) + 0.5F;
}

// Natural logarithm of normal numbers above 0, to about one unit in the last place. The polynomial is Cephes' logf.
TOKENSPEED_INLINE Vec log(Vec x) {
  const VecInt bits = as<VecInt>(x);
  const VecInt exponent = (bits - 0x3F3504F3) >> 23;
  const Vec m = as<Vec>(bits - (exponent << 23)) - 1.0F;
  const Vec e = __builtin_convertvector(exponent, Vec);
  Vec p = splat(7.0376836292e-2F);
  p = p * m - 1.1514610310e-1F;
  p = p * m + 1.1676998740e-1F;
  p = p * m - 1.2420140846e-1F;
  p = p * m + 1.4249322787e-1F;
  p = p * m - 1.6668057665e-1F;
  p = p * m + 2.0000714765e-1F;
  p = p * m - 2.4999993993e-1F;
  p = p * m + 3.3333331174e-1F;
  const Vec square = m * m;
  const Vec small = p * m * square - e * 2.12194440e-4F - square * 0.5F;
  return (m + small) + e * 0.693359375F;
}

// -ln(E) for E = -ln(1 - u): where E is small it decides most, and 1 - u would round it away, so a series stands for
// the logarithm (below 1/16 off by 1e-8 of E).
TOKENSPEED_INLINE Vec noise_of(Vec numbers) {
  const Vec u = minimum(numbers * 0x1p-31F, splat(1.0F - 0x1p-24F));
  Vec series = u * (1.0F / 6) + (1.0F / 5);
  series = series * u + (1.0F / 4);
  series = series * u + (1.0F / 3);
  series = series * u + (1.0F / 2);
  series = (series * u + 1.0F) * u;
  return -log(u < 0.0625F ? series : -log(1.0F - u));
}

// As much as noise_of, or a little more: -ln(u), whose logarithm is taken to be straight between powers of 2.
TOKENSPEED_INLINE Vec noise_bound(Vec numbers) {
  const Vec log2 = __builtin_convertvector(as<VecInt>(numbers), Vec) * 0x1p-23F;
  return (158.0F - log2) * 0.69314718F;
}

TOKENSPEED_INLINE VecBits ids_at(const Tokens& tokens, std::int64_t place) {
  VecBits ids;
  if (tokens.ids != nullptr) {
    __builtin_memcpy(&ids, tokens.ids + place, sizeof(ids));
    return ids;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    ids[lane] = static_cast<std::uint32_t>(lane);
  }
  return ids + static_cast<std::uint32_t>(place);
}

// Takes the best of a group whose logit is above `above`, where it is better.
TOKENSPEED_INLINE void draw_group(const Row& row, const Tokens& tokens, std::int64_t group, float above, Best& best) {
  float buffer[kGroup];
  const float* numbers = group_at(tokens.numbers, tokens.size, group, buffer);
  Vec uniforms[kGroupVectors];
  Vec gaps[kGroupVectors];
  Vec most = splat(-kInfinity);
  for (int i = 0; i < kGroupVectors; ++i) {
    const Vec value = load(numbers + i * kLanes);
    uniforms[i] = uniform(ids_at(tokens, group * kGroup + i * kLanes), row.key);
    gaps[i] = value > above ? (value - row.top) * row.rate : splat(-kInfinity);
    most = maximum(gaps[i] + noise_bound(uniforms[i]), most);
  }
  if (highest_lane(most) + kSlack < best.score) {
    return;
  }
  float scores[kGroup];
  for (int i = 0; i < kGroupVectors; ++i) {
    store(scores + i * kLanes, gaps[i] + noise_of(uniforms[i]));
  }
  for (std::int64_t i = 0; i < kGroup; ++i) {
    if (scores[i] > best.score) {
      best = {scores[i], group * kGroup + i};
    }
  }
}

// The draw among tokens of some groups whose logit is above `above`; of equal scores the first.
TOKENSPEED_INLINE Best drawn(const Row& row, const Tokens& tokens, std::int64_t first, std::int64_t last, float above) {
  Best best{row.start, -1};
  for (std::int64_t group = first; group < last; ++group) {
    if (tokens.highest != nullptr) {
      const float highest = tokens.highest[group];
      if (!(highest > above) || (highest - row.top) * row.rate + kNoiseMax < best.score) {
        continue;
      }
    }
    draw_group(row, tokens, group, above, best);
  }
  return best;
}

// The sum of e^gap over tokens of some groups whose logit is above `above`. It is 0 only where there are none.
TOKENSPEED_INLINE double mass_of(const Row& row, const Tokens& tokens, std::int64_t first, std::int64_t last,
                                 float above) {
  double mass = 0.0;
  for (std::int64_t group = first; group < last; ++group) {
    if (tokens.highest != nullptr) {
      const float highest = tokens.highest[group];
      if (!(highest > above) || (highest - row.top) * row.rate < kFar) {
        continue;
      }
    }
    float buffer[kGroup];
    const float* numbers = group_at(tokens.numbers, tokens.size, group, buffer);
    Vec sums = Vec{};
    for (int i = 0; i < kGroupVectors; ++i) {
      const Vec value = load(numbers + i * kLanes);
      sums += value > above ? exp((value - row.top) * row.rate) : Vec{};
    }
    mass += static_cast<double>(sum(sums));
  }
  return mass;
}

// The winner among those tokens that top-p keeps, given the one among all and the mass of all.
TOKENSPEED_INLINE std::int64_t kept(const Row& row, const Tokens& tokens, std::int64_t place, double mass) {
  const std::int64_t num_groups = groups_of(tokens.size);
  for (;;) {
    const float logit = tokens.numbers[place];
    const double above = mass_of(row, tokens, 0, num_groups, logit);
    if (above == 0.0 || above < static_cast<double>(row.top_p) * mass) {
      return place;
    }
    const Best next = drawn(row, tokens, 0, num_groups, logit);
    if (next.place < 0) {
      return place;
    }
    place = next.place;
  }
}

// The bits of a number that sort as it does; the same again gives the number back.
TOKENSPEED_INLINE std::int32_t order_of(std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// A number that k of `size` reach and at most `slack` more, but for equals; size is a multiple of the lanes.
TOKENSPEED_INLINE float reached_by(const float* numbers, std::int64_t size, std::int64_t k, std::int64_t slack) {
  std::int64_t reached = order_of(__builtin_bit_cast(std::int32_t, -kInfinity));
  std::int64_t missed = std::int64_t{order_of(__builtin_bit_cast(std::int32_t, kInfinity))} + 1;
  while (missed - reached > 1) {
    const std::int64_t middle = reached + (missed - reached) / 2;
    const float bound = __builtin_bit_cast(float, order_of(static_cast<std::int32_t>(middle)));
    VecInt counts = VecInt{};
    for (std::int64_t i = 0; i < size; i += kLanes) {
      counts -= load(numbers + i) >= bound;
    }
    std::int64_t count = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      count += counts[lane];
    }
    if (count < k) {
      missed = middle;
      continue;
    }
    reached = middle;
    if (count <= k + slack) {
      break;
    }
  }
  return __builtin_bit_cast(float, order_of(static_cast<std::int32_t>(reached)));
}

// A list of tokens in the memory of this thread, with room for `size` and a group.
struct TokenList {
  float* numbers;
  std::int32_t* ids;
  std::int64_t size;

  explicit TokenList(std::int64_t room)
      : numbers(scratch(1, static_cast<std::size_t>(room + kGroup))),
        ids(reinterpret_cast<std::int32_t*>(scratch(2, static_cast<std::size_t>(room + kGroup)))),
        size(0) {}

  // Numbers beyond the end, so that it may be read by vectors.
  void pad() {
    for (std::int64_t i = size; i < groups_of(size) * kGroup; ++i) {
      numbers[i] = -kInfinity;
      ids[i] = 0;
    }
  }

  void keep_from(float low) {
    std::int64_t num_kept = 0;
    for (std::int64_t i = 0; i < size; ++i) {
      numbers[num_kept] = numbers[i];
      ids[num_kept] = ids[i];
      num_kept += numbers[i] >= low ? 1 : 0;
    }
    size = num_kept;
  }
};

// The tokens above -inf that min-p keeps and that reach `low`.
TOKENSPEED_INLINE void list_tokens(const Row& row, std::int64_t size, float low, TokenList& list) {
  for (std::int64_t group = 0; group < groups_of(size); ++group) {
    const float highest = row.highest[group];
    if (!(highest > -kInfinity && highest >= low && (highest - row.top) * row.rate >= row.gap_min)) {
      continue;
    }
    const std::int64_t last = (group + 1) * kGroup < size ? (group + 1) * kGroup : size;
    for (std::int64_t i = group * kGroup; i < last; ++i) {
      const float logit = row.logits[i];
      list.numbers[list.size] = logit;
      list.ids[list.size] = static_cast<std::int32_t>(i);
      const bool is_in = logit > -kInfinity && logit >= low && (logit - row.top) * row.rate >= row.gap_min;
      list.size += is_in ? 1 : 0;
    }
  }
}

// The token of a row with top-k or min-p. A number that k groups reach is reached by k tokens at least.
std::int64_t narrowed(const Row& row, std::int64_t size) {
  const std::int64_t num_groups = groups_of(size);
  float low = -kInfinity;
  if (row.top_k > 0 && row.top_k <= num_groups) {
    low = reached_by(row.highest, groups_of(num_groups) * kGroup, row.top_k, 4 + row.top_k / 8);
  }
  TokenList list(size);
  list_tokens(row, size, low, list);
  list.pad();
  if (row.top_k > 0 && row.top_k < list.size) {
    list.keep_from(reached_by(list.numbers, groups_of(list.size) * kGroup, row.top_k, 0));
    list.pad();
  }
  const Tokens tokens{list.numbers, list.ids, nullptr, groups_of(list.size) * kGroup};
  const std::int64_t last = groups_of(list.size);
  std::int64_t place = drawn(row, tokens, 0, last, -kInfinity).place;
  if (place >= 0 && row.top_p < 1.0F) {
    place = kept(row, tokens, place, mass_of(row, tokens, 0, last, -kInfinity));
  }
  return place < 0 ? 0 : list.ids[place];
}

}  // namespace
}  // namespace tokenspeed::cpu
