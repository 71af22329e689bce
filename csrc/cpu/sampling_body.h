// SPDX-License-Identifier: Apache-2.0
// A token for each row of logits, drawn or the most likely one.
//
// A survey edits the logits and finds the highest one of each group of tokens, so that later looks pass over the groups
// that can not matter. Chunks of a row are looked at alone and put together in order: no bit depends on the number of
// threads.
#pragma once

#include "sampling_draw.h"

namespace tokenspeed::cpu {
namespace {

// The logits of a chunk after penalties.
TOKENSPEED_INLINE void penalise(const SamplingArgs& args, const Row& row, std::int64_t first, std::int64_t last) {
  if (row.penalty < 0) {
    __builtin_memcpy(row.edited + first, row.raw + first, static_cast<std::size_t>(last - first) * sizeof(float));
    return;
  }
  const std::int32_t* counts = args.output_counts + row.penalty * args.counts_stride;
  const std::uint8_t* prompt =
      args.prompt_masks == nullptr ? nullptr : args.prompt_masks + row.penalty * args.prompt_stride;
  const float presence = args.presences[row.penalty];
  const float frequency = args.frequencies[row.penalty];
  const float repetition = args.repetitions[row.penalty];
  for (std::int64_t i = first; i < last; ++i) {
    const std::int32_t count = counts[i];
    float logit = row.raw[i];
    if (prompt != nullptr && (count > 0 || prompt[i] != 0)) {
      logit = logit > 0.0F ? logit / repetition : logit * repetition;
    }
    logit -= frequency * static_cast<float>(count);
    row.edited[i] = count > 0 ? logit - presence : logit;
  }
}

TOKENSPEED_INLINE void mask_group(const SamplingArgs& args, const Row& row, std::int64_t group) {
  const std::int32_t* words = args.mask_bits + row.mask * args.mask_stride;
  const std::int64_t last = (group + 1) * kGroup < args.size ? (group + 1) * kGroup : args.size;
  for (std::int64_t i = group * kGroup; i < last; ++i) {
    if (((static_cast<std::uint32_t>(words[i / 32]) >> (i % 32)) & 1U) == 0) {
      row.edited[i] = -kInfinity;
    }
  }
}

// Masks a chunk, and finds the highest logit of each of its groups.
TOKENSPEED_INLINE void survey(const SamplingArgs& args, const Row& row, std::int64_t chunk) {
  const std::int64_t first = chunk * kChunk / kGroup;
  const std::int64_t last_of_row = groups_of(args.size);
  const std::int64_t last = first + kChunk / kGroup < last_of_row ? first + kChunk / kGroup : last_of_row;
  float buffer[kGroup];
  Vec raw_most = splat(-kInfinity);
  VecInt spoilt = VecInt{};
  float top = -kInfinity;
  for (std::int64_t group = first; group < last; ++group) {
    const float* numbers = group_at(row.raw, args.size, group, buffer);
    Vec most = splat(-kInfinity);
    for (int i = 0; i < kGroupVectors; ++i) {
      const Vec value = load(numbers + i * kLanes);
      spoilt |= ~(value < kInfinity);
      most = maximum(value, most);
    }
    raw_most = maximum(most, raw_most);
    if (row.edited != nullptr) {
      if (row.mask >= 0) {
        mask_group(args, row, group);
      }
      numbers = group_at(row.edited, args.size, group, buffer);
      most = splat(-kInfinity);
      for (int i = 0; i < kGroupVectors; ++i) {
        most = maximum(load(numbers + i * kLanes), most);
      }
    }
    const float highest = highest_lane(most);
    row.highest[group] = highest;
    top = highest > top ? highest : top;
  }
  bool is_spoilt = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    is_spoilt = is_spoilt || spoilt[lane] != 0;
  }
  row.chunks[chunk] = {0.0, highest_lane(raw_most), top, is_spoilt};
}

// The first token that has the highest logit.
TOKENSPEED_INLINE std::int64_t first_of_top(const Row& row, std::int64_t size) {
  std::int64_t chunk = 0;
  while (row.chunks[chunk].top != row.top) {
    ++chunk;
  }
  std::int64_t group = chunk * kChunk / kGroup;
  while (row.highest[group] != row.top) {
    ++group;
  }
  std::int64_t token = group * kGroup;
  while (token + 1 < size && row.logits[token] != row.top) {
    ++token;
  }
  return token;
}

// What the chunks of a row say together.
TOKENSPEED_INLINE void conclude(const SamplingArgs& args, Row& row, std::int64_t num_chunks) {
  float raw_top = -kInfinity;
  for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const ChunkFacts& facts = row.chunks[chunk];
    raw_top = facts.raw_top > raw_top ? facts.raw_top : raw_top;
    row.top = facts.top > row.top ? facts.top : row.top;
    row.is_faulty = row.is_faulty || facts.is_spoilt;
  }
  row.is_faulty = row.is_faulty || raw_top == -kInfinity;
  if (row.is_faulty || !(__builtin_fabsf(row.top) < kInfinity)) {
    row.way = Way::kGreedy;
  }
  if (row.way != Way::kGreedy) {
    const auto first = static_cast<std::uint32_t>(first_of_top(row, args.size));
    row.start = noise_of(uniform(VecBits{} + first, row.key))[0] - kSlack;
  }
}

// The draw within a chunk, and its mass where it matters.
TOKENSPEED_INLINE void draw_chunk(const SamplingArgs& args, const Row& row, std::int64_t chunk) {
  if (row.way == Way::kNarrowed) {
    if (chunk == 0) {
      row.bests[0].place = narrowed(row, args.size);
    }
    return;
  }
  if (row.way == Way::kGreedy) {
    return;
  }
  const Tokens tokens{row.logits, nullptr, row.highest, args.size};
  const std::int64_t first = chunk * kChunk / kGroup;
  const std::int64_t num_groups = groups_of(args.size);
  const std::int64_t last = first + kChunk / kGroup < num_groups ? first + kChunk / kGroup : num_groups;
  row.bests[chunk] = drawn(row, tokens, first, last, -kInfinity);
  if (row.way == Way::kNucleus) {
    row.chunks[chunk].mass = mass_of(row, tokens, first, last, -kInfinity);
  }
}

TOKENSPEED_INLINE std::int64_t token_of(const SamplingArgs& args, const Row& row, std::int64_t num_chunks) {
  if (row.is_faulty) {
    return 0;
  }
  if (row.way == Way::kGreedy) {
    return first_of_top(row, args.size);
  }
  if (row.way == Way::kNarrowed) {
    return row.bests[0].place;
  }
  Best best = row.bests[0];
  double mass = row.chunks[0].mass;
  for (std::int64_t chunk = 1; chunk < num_chunks; ++chunk) {
    mass += row.chunks[chunk].mass;
    best = best.place < 0 || row.bests[chunk].score > best.score ? row.bests[chunk] : best;
  }
  if (row.way == Way::kNucleus) {
    return kept(row, {row.logits, nullptr, row.highest, args.size}, best.place, mass);
  }
  return best.place;
}

// How a row is drawn.
TOKENSPEED_INLINE void set_way(const SamplingArgs& args, std::int64_t index, Row& row) {
  if (args.temperatures == nullptr || !(args.temperatures[index] >= kGreedyBelow)) {
    return;
  }
  const float rate = 1.0F / args.temperatures[index];
  row.rate = rate > 1e-37F ? rate : 1e-37F;  // never 0, which would make NaN of -inf
  row.key =
      mix64(mix64(static_cast<std::uint64_t>(args.seeds[index])) ^ static_cast<std::uint64_t>(args.positions[index]));
  row.way = Way::kOpen;
  if (args.top_ks == nullptr) {
    return;
  }
  row.top_p = args.top_ps[index];
  row.top_k = args.top_ks[index] < args.size ? args.top_ks[index] : 0;
  const float min_p = args.min_ps[index];
  if (min_p > 0.0F) {
    row.gap_min = min_p < 1.0F ? __builtin_logf(min_p) : 0.0F;  // the most likely token always stays
  }
  if (row.top_k > 0 || min_p > 0.0F) {
    row.way = Way::kNarrowed;
  } else if (row.top_p < 1.0F) {
    row.way = Way::kNucleus;
  }
}

// Which rows have penalties, edits or masks: those have memory of their own for their logits.
TOKENSPEED_INLINE void set_edits(const SamplingArgs& args, Row* rows) {
  auto edited = [&](std::int64_t index) -> Row& {
    Row& row = rows[index];
    row.edited = args.edited + index * args.size;
    row.logits = row.edited;
    return row;
  };
  for (std::int64_t i = 0; i < args.num_penalties; ++i) {
    if (args.penalty_rows[i] < args.num_rows) {
      edited(args.penalty_rows[i]).penalty = i;
    }
  }
  for (std::int64_t i = 0; i < args.num_edits; ++i) {
    if (args.edit_rows[i] < args.num_rows) {
      edited(args.edit_rows[i]);
    }
  }
  for (std::int64_t i = 0; i < args.num_masks; ++i) {
    if (args.mask_rows[i] < args.num_rows) {
      edited(args.mask_rows[i]).mask = i;
    }
  }
}

// Calls body(row, chunk) for all chunks, on several threads where there is enough to do.
template <typename Body>
TOKENSPEED_INLINE void for_chunks(const SamplingArgs& args, std::int64_t num_chunks, std::int64_t shared_size,
                                  Body body) {
  auto item = [&](std::int64_t index) { body(index / num_chunks, index % num_chunks); };
  const std::int64_t count = args.num_rows * num_chunks;
  if (args.num_rows * args.size >= shared_size) {
    parallel(count, item);
    return;
  }
  for (std::int64_t index = 0; index < count; ++index) {
    item(index);
  }
}

TOKENSPEED_INLINE void edit_rows(const SamplingArgs& args, Row* rows, std::int64_t num_chunks) {
  set_edits(args, rows);
  for_chunks(args, num_chunks, kSurveyShared, [&](std::int64_t index, std::int64_t chunk) {
    if (rows[index].edited != nullptr) {
      const std::int64_t last = (chunk + 1) * kChunk < args.size ? (chunk + 1) * kChunk : args.size;
      penalise(args, rows[index], chunk * kChunk, last);
    }
  });
  for (std::int64_t i = 0; i < args.num_edits; ++i) {
    if (args.edit_rows[i] < args.num_rows) {
      rows[args.edit_rows[i]].edited[args.edit_ids[i]] += args.edit_values[i];
    }
  }
}

void sampling(const SamplingArgs& args) {
  const std::int64_t num_chunks = (args.size + kChunk - 1) / kChunk;
  const std::int64_t row_groups = groups_of(groups_of(args.size)) * kGroup;
  const std::int64_t row_bytes = static_cast<std::int64_t>(sizeof(Row)) + row_groups * 4 +
                                 num_chunks * static_cast<std::int64_t>(sizeof(ChunkFacts) + sizeof(Best));
  float* memory = scratch(0, static_cast<std::size_t>(args.num_rows * row_bytes) / sizeof(float));
  auto* rows = reinterpret_cast<Row*>(memory);
  auto* chunks = reinterpret_cast<ChunkFacts*>(rows + args.num_rows);
  auto* bests = reinterpret_cast<Best*>(chunks + args.num_rows * num_chunks);
  auto* highest = reinterpret_cast<float*>(bests + args.num_rows * num_chunks);
  for (std::int64_t index = 0; index < args.num_rows; ++index) {
    const float* raw = args.logits + index * args.stride;
    float* most = highest + index * row_groups;
    rows[index] = {.raw = raw,
                   .logits = raw,
                   .highest = most,
                   .chunks = chunks + index * num_chunks,
                   .bests = bests + index * num_chunks};
    set_way(args, index, rows[index]);
    for (std::int64_t group = groups_of(args.size); group < row_groups; ++group) {
      most[group] = -kInfinity;
    }
  }
  if (args.edited != nullptr) {
    edit_rows(args, rows, num_chunks);
  }
  for_chunks(args, num_chunks, kSurveyShared,
             [&](std::int64_t index, std::int64_t chunk) { survey(args, rows[index], chunk); });
  for (std::int64_t index = 0; index < args.num_rows; ++index) {
    conclude(args, rows[index], num_chunks);
  }
  for_chunks(args, num_chunks, kDrawShared,
             [&](std::int64_t index, std::int64_t chunk) { draw_chunk(args, rows[index], chunk); });
  auto finish = [&](std::int64_t index) {
    args.token_ids[index] = token_of(args, rows[index], num_chunks);
    args.is_faulty[index] = rows[index].is_faulty ? 1 : 0;
  };
  parallel(args.num_rows, finish);
}

}  // namespace
}  // namespace tokenspeed::cpu
