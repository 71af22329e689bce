// SPDX-License-Identifier: Apache-2.0
// What sampling knows of a row of logits, and tokens by the group.
#pragma once

#include "simd.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kGroup = 64;            // tokens
constexpr std::int64_t kChunk = 256 * kGroup;  // tokens that a thread takes at once
constexpr int kGroupVectors = static_cast<int>(kGroup) / kLanes;
constexpr float kNoiseMax = 22.3F;  // no noise is above -ln(2^-32)
constexpr float kFar = -30.0F;      // a gap below which a million tokens have no mass that shows
constexpr float kSlack = 1e-3F;     // more than a score is off by rounding

// Tokens of a call below which waking a thread costs more than it saves.
constexpr std::int64_t kSurveyShared = 1 << 17;
constexpr std::int64_t kDrawShared = 1 << 15;

struct ChunkFacts {
  double mass;
  float raw_top;  // of the logits as they came
  float top;
  bool is_spoilt;  // a logit is no number, or +inf
};

struct Best {
  float score;
  std::int64_t place;  // -1: none
};

enum class Way : std::uint8_t { kGreedy, kOpen, kNucleus, kNarrowed };

struct Row {
  const float* raw;
  const float* logits;      // the edited ones where there are such
  float* edited = nullptr;  // or null
  float* highest;           // of each group
  ChunkFacts* chunks;
  Best* bests;  // of each chunk
  Way way = Way::kGreedy;
  std::int64_t penalty = -1;  // -1: none
  std::int64_t mask = -1;
  std::uint64_t key = 0;
  float rate = 1.0F;
  std::int64_t top_k = 0;  // 0: off
  float top_p = 1.0F;
  float gap_min = -kInfinity;  // what min-p keeps reaches it
  float top = -kInfinity;
  float start = -kInfinity;  // a little less than the first of the most likely tokens scores
  bool is_faulty = false;
};

// Some tokens of a row: numbers[i] is the logit of ids[i], or of i.
struct Tokens {
  const float* numbers;
  const std::int32_t* ids;
  const float* highest;  // of each group, or null
  std::int64_t size;
};

TOKENSPEED_INLINE std::int64_t groups_of(std::int64_t size) { return (size + kGroup - 1) / kGroup; }

// The numbers of a group; those beyond the end are -inf.
TOKENSPEED_INLINE const float* group_at(const float* numbers, std::int64_t size, std::int64_t group, float* buffer) {
  const float* found = numbers + group * kGroup;
  const std::int64_t count = size - group * kGroup;
  if (count >= kGroup) {
    return found;
  }
  for (std::int64_t i = 0; i < kGroup; ++i) {
    buffer[i] = i < count ? found[i] : -kInfinity;
  }
  return buffer;
}

TOKENSPEED_INLINE float highest_lane(Vec value) {
#if TOKENSPEED_LANES == 16
  const Vec8 low = __builtin_shufflevector(value, value, 0, 1, 2, 3, 4, 5, 6, 7);
  const Vec8 high = __builtin_shufflevector(value, value, 8, 9, 10, 11, 12, 13, 14, 15);
  return highest_of(low > high ? low : high);
#else
  return highest_of(value);
#endif
}

}  // namespace
}  // namespace tokenspeed::cpu
