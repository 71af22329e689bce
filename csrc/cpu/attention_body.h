// SPDX-License-Identifier: Apache-2.0
// Attention over pages with a running softmax (arXiv:2205.14135), in float32; what pages keep is widened where it is
// read. Of int8 they keep codes: sums are of codes, a key's scale multiplies its score and a value's scale its weight;
// and as heads were transformed before they became codes, so are queries, and sums of values once more.
//
// What is added to what depends on a token's position alone: keys are taken in tiles of kTile positions aligned to the
// sequence, tiles are gathered into spans of kSpan positions with a softmax state of their own, and spans are merged in
// order. So a token's bits are the same in a prefill, in a chunk of one and in a decode, whatever else is in the batch;
// and a long decode can give its spans to several threads.
#pragma once

#include "attention_tile.h"
#include "hadamard.h"

namespace tokenspeed::cpu {
namespace {

constexpr std::int64_t kSpan = 256;
constexpr std::int64_t kTokenBlock = 16;  // tokens of a row that share their tiles

// Whether what pages keep of a head are codes and a scale.
template <typename N>
constexpr bool kHasScales = sizeof(N) == 1;

// Some tokens of one row for one K/V head: the unit that reads tiles once for all of its queries.
struct QueryBlock {
  std::int64_t row, kv_head, first_token, num_tokens;  // tokens of the row, from 0
};

// T: numbers of queries and of the output. N: those of pages.
template <typename T, typename N>
struct AttentionJob {
  const AttentionArgs& args;
  std::int64_t width;      // head_dim rounded up to vectors
  std::int64_t num_group;  // query heads of a K/V head

  [[nodiscard]] std::int64_t query_len(std::int64_t row) const {
    return args.query_start[row + 1] - args.query_start[row];
  }
  [[nodiscard]] std::int64_t position(const QueryBlock& block, std::int64_t token) const {
    return args.seq_lens[block.row] - query_len(block.row) + block.first_token + token;
  }
  [[nodiscard]] std::int64_t window_start(std::int64_t position) const {
    return args.window > 0 ? max_of(0, position - args.window + 1) : 0;
  }

  // The block's queries as floats, token-major, padded with zeros to `width`.
  void load_queries(const QueryBlock& block, float* target) const {
    for (std::int64_t token = 0; token < block.num_tokens; ++token) {
      const std::int64_t index = args.query_start[block.row] + block.first_token + token;
      const T* source =
          static_cast<const T*>(args.q) + index * args.q_token_stride + block.kv_head * num_group * args.q_head_stride;
      for (std::int64_t head = 0; head < num_group; ++head, target += width) {
        widen(source + head * args.q_head_stride, target, args.head_dim, width);
        transform(target);
      }
    }
  }

  // A query, or a sum of values, where pages keep codes of transformed heads.
  void transform(float* head) const {
    if constexpr (kHasScales<N>) {
      hadamard(head, width, hadamard_run(args.head_dim));
    }
  }

  // What turns summed values into a mean: the head's sink takes part in the total, without a value of its own.
  [[nodiscard]] float output_scale(const Softmax& state, std::int64_t head) const {
    if (args.sinks == nullptr) {
      return 1.0F / state.total;
    }
    const float sink = args.sinks[head];
    const float top = sink > state.top ? sink : state.top;
    const float keep = exp(state.top - top);
    return keep / (state.total * keep + exp(sink - top));
  }

  // Changes the state's values.
  void store_output(const QueryBlock& block, std::int64_t query, const Softmax& state) const {
    const std::int64_t token = args.query_start[block.row] + block.first_token + query / num_group;
    const std::int64_t head = block.kv_head * num_group + query % num_group;
    T* target = static_cast<T*>(args.out) + (token * args.num_heads + head) * args.head_dim;
    const float scale = output_scale(state, head);
    transform(state.values);
    for_vectors(args.head_dim,
                [&](std::int64_t i, int count) { store_upto(target + i, load(state.values + i) * scale, count); });
  }

  // Positions that a token sees of the tile that begins at `start`.
  struct Seen {
    std::int64_t first, last;
  };

  // Calls each(key, value) of the positions [start, end) in turn.
  template <typename Each>
  __attribute__((always_inline)) void for_tokens(const QueryBlock& block, std::int64_t start, std::int64_t end,
                                                 Each each) const {
    const std::int32_t* pages = args.block_tables + block.row * args.table_stride + start / args.block_size;
    std::int64_t slot = start % args.block_size;
    for (; start < end; ++pages, slot = 0) {
      const N* key = static_cast<const N*>(args.k_pages) + *pages * args.k_page_stride + slot * args.k_slot_stride +
                     block.kv_head * args.k_head_stride;
      const N* value = static_cast<const N*>(args.v_pages) + *pages * args.v_page_stride + slot * args.v_slot_stride +
                       block.kv_head * args.v_head_stride;
      const std::int64_t stop = min_of(end, start + args.block_size - slot);
      for (; start < stop; ++start, key += args.k_slot_stride, value += args.v_slot_stride) {
        each(key, value);
      }
    }
  }

  // Asks for memory of a tile to come: pages are scattered, so the hardware can not guess.
  void fetch_tile(const QueryBlock& block, std::int64_t start, std::int64_t end) const {
    for_tokens(block, start, min_of(start + kTile, end), [&](const N* key, const N* value) {
      for (std::int64_t i = 0; i < args.head_dim; i += 64 / static_cast<std::int64_t>(sizeof(N))) {
        __builtin_prefetch(key + i);
        __builtin_prefetch(value + i);
      }
    });
  }

  // Reads the scales of a key and of a value, where pages have such.
  void read_scales(const N* key, const N* value, std::int64_t t, Scales& scales) const {
    if constexpr (kHasScales<N>) {
      __builtin_memcpy(&scales.keys[t], key + args.head_dim, sizeof(float));
      __builtin_memcpy(&scales.values[t], value + args.head_dim, sizeof(float));
    }
  }

  // Positions of a tile at or past the last that is there repeat that one.
  template <typename Any>
  static void fill_tile(TileOf<Any>& tile, std::int64_t num_live, Scales& scales) {
    for (std::int64_t t = num_live; t < kTile; ++t) {
      tile.keys[t] = tile.keys[num_live - 1];
      tile.values[t] = tile.values[num_live - 1];
      if constexpr (kHasScales<N>) {
        scales.keys[t] = scales.keys[num_live - 1];
        scales.values[t] = scales.values[num_live - 1];
      }
    }
    tile.scales = kHasScales<N> ? &scales : nullptr;
  }

  // Points at the keys and values of positions [start, start + kTile) that are before `end`.
  void point_at_tile(const QueryBlock& block, std::int64_t start, std::int64_t end, Scales& scales,
                     TileOf<N>& tile) const {
    std::int64_t t = 0;
    for_tokens(block, start, min_of(start + kTile, end), [&](const N* key, const N* value) {
      tile.keys[t] = key;
      tile.values[t] = value;
      read_scales(key, value, t, scales);
      t += 1;
    });
    fill_tile(tile, t, scales);
  }

  // The same as floats in `copies`, padded with zeros to `width`.
  void copy_tile(const QueryBlock& block, std::int64_t start, std::int64_t end, float* copies, Scales& scales,
                 Tile& tile) const {
    std::int64_t t = 0;
    for_tokens(block, start, min_of(start + kTile, end), [&](const N* key, const N* value) {
      float* key_copy = copies + 2 * t * width;
      widen(key, key_copy, args.head_dim, width);
      widen(value, key_copy + width, args.head_dim, width);
      tile.keys[t] = key_copy;
      tile.values[t] = key_copy + width;
      read_scales(key, value, t, scales);
      t += 1;
    });
    fill_tile(tile, t, scales);
  }

  // The softmax states of the block's queries over the positions of one span.
  void attend_span(const QueryBlock& block, std::int64_t span, const float* queries, Softmax* states) const {
    const std::int64_t num_queries = block.num_tokens * num_group;
    for (std::int64_t query = 0; query < num_queries; ++query) {
      clear(states[query], width);
    }
    float* copies = scratch(1, static_cast<std::size_t>(3 * kTile * width));
    const std::int64_t seen_end = position(block, block.num_tokens - 1) + 1;
    const std::int64_t end = min_of((span + 1) * kSpan, seen_end);
    const std::int64_t seen_start = max_of(span * kSpan, window_start(position(block, 0)));
    for (std::int64_t start = seen_start / kTile * kTile; start < end; start += kTile) {
      fetch_tile(block, start + kTile, end);
      Scales scales;
      if (block.num_tokens == 1 && width == args.head_dim) {
        TileOf<N> tile;
        point_at_tile(block, start, end, scales, tile);
        attend_alone(block, start, queries, tile, states);
        continue;
      }
      Tile tile;
      copy_tile(block, start, end, copies, scales, tile);
      if (block.num_tokens == 1) {
        attend_alone(block, start, queries, tile, states);
      } else {
        attend_turned(block, start, queries, tile, copies + 2 * kTile * width, states);
      }
    }
  }

  // The queries of one token and a tile, some at a time.
  template <typename Any>
  void attend_alone(const QueryBlock& block, std::int64_t start, const float* queries, const TileOf<Any>& tile,
                    Softmax* states) const {
    const Seen seen = seen_of(block, 0, start);
    if (seen.first >= seen.last) {
      return;
    }
    std::int64_t query = 0;
    for (; query + kMeet<Any> <= num_group; query += kMeet<Any>) {
      attend_some<kMeet<Any>>(queries + query * width, tile, seen, states + query);
    }
    if constexpr (kMeet<Any> > 1) {
      switch (num_group - query) {
        case 1:
          return attend_some<1>(queries + query * width, tile, seen, states + query);
        case 2:
          return attend_some<2>(queries + query * width, tile, seen, states + query);
        case 3:
          return attend_some<3>(queries + query * width, tile, seen, states + query);
        default:
          return;
      }
    }
  }

  template <int kNum, typename Any>
  void attend_some(const float* queries, const TileOf<Any>& tile, const Seen& seen, Softmax* states) const {
    float weights[kNum * kTile] = {};
    multiply_keys<kNum>(queries, width, tile, seen.first, seen.last, weights);
    add_tile<kNum>(args, width, tile, seen.first, seen.last, weights, states);
  }

  [[nodiscard]] Seen seen_of(const QueryBlock& block, std::int64_t token, std::int64_t start) const {
    const std::int64_t at = position(block, token);
    return {max_of(0, window_start(at) - start), min_of(kTile, at + 1 - start)};
  }

  // Many queries and a tile, some at a time; the last ones are taken twice where they do not come out even. Where there
  // are fewer, whatever follows them is computed too and dropped.
  void attend_turned(const QueryBlock& block, std::int64_t start, const float* queries, const Tile& tile, float* turned,
                     Softmax* states) const {
    const std::int64_t num_queries = block.num_tokens * num_group;
    turn_keys(tile, width, turned);
    float weights[kQueries * kTile];
    for (std::int64_t done = 0; done < num_queries;) {
      const std::int64_t first = num_queries < kQueries ? 0 : min_of(done, num_queries - kQueries);
      multiply_turned(queries + first * width, width, turned, weights);
      for (; done < min_of(first + kQueries, num_queries); ++done) {
        const Seen seen = seen_of(block, done / num_group, start);
        if (seen.first < seen.last) {
          add_tile<1>(args, width, tile, seen.first, seen.last, weights + (done - first) * kTile, states + done);
        }
      }
    }
  }

  [[nodiscard]] std::int64_t first_span(const QueryBlock& block) const {
    return window_start(position(block, 0)) / kSpan;
  }
  [[nodiscard]] std::int64_t last_span(const QueryBlock& block) const {
    return position(block, block.num_tokens - 1) / kSpan;
  }

  // A whole block: its spans one after another.
  void attend_block(const QueryBlock& block) const {
    const std::int64_t num_queries = block.num_tokens * num_group;
    float* queries = scratch(0, static_cast<std::size_t>((3 * num_queries + kQueries) * width));
    float* sum_values = queries + num_queries * width;
    float* span_values = sum_values + num_queries * width;
    auto* sums = reinterpret_cast<Softmax*>(
        scratch(2, static_cast<std::size_t>(2 * num_queries) * sizeof(Softmax) / sizeof(float)));
    Softmax* spans = sums + num_queries;
    for (std::int64_t query = 0; query < num_queries; ++query) {
      sums[query].values = sum_values + query * width;
      spans[query].values = span_values + query * width;
      clear(sums[query], width);
    }
    load_queries(block, queries);
    for (std::int64_t span = first_span(block); span <= last_span(block); ++span) {
      attend_span(block, span, queries, spans);
      for (std::int64_t query = 0; query < num_queries; ++query) {
        merge(sums[query], spans[query], width);
      }
    }
    for (std::int64_t query = 0; query < num_queries; ++query) {
      store_output(block, query, sums[query]);
    }
  }

  // One span of a block, left in `partial`: top, total and values of each query.
  void attend_partial(const QueryBlock& block, std::int64_t span, float* partial) const {
    const std::int64_t num_queries = block.num_tokens * num_group;
    float* queries = scratch(0, static_cast<std::size_t>((num_queries + kQueries) * width));
    auto* states =
        reinterpret_cast<Softmax*>(scratch(2, static_cast<std::size_t>(num_queries) * sizeof(Softmax) / sizeof(float)));
    for (std::int64_t query = 0; query < num_queries; ++query) {
      states[query].values = partial + query * partial_stride() + 2;
    }
    load_queries(block, queries);
    attend_span(block, span, queries, states);
    for (std::int64_t query = 0; query < num_queries; ++query) {
      partial[query * partial_stride()] = states[query].top;
      partial[query * partial_stride() + 1] = states[query].total;
    }
  }

  // The partial results of a block's spans, added up in order.
  void merge_partials(const QueryBlock& block, float* partials) const {
    const std::int64_t num_queries = block.num_tokens * num_group;
    const std::int64_t num_spans = last_span(block) - first_span(block) + 1;
    float* values = scratch(0, static_cast<std::size_t>(width));
    for (std::int64_t query = 0; query < num_queries; ++query) {
      Softmax sum{values, 0.0F, 0.0F};
      clear(sum, width);
      for (std::int64_t span = 0; span < num_spans; ++span) {
        float* partial = partials + (span * num_queries + query) * partial_stride();
        merge(sum, Softmax{partial + 2, partial[0], partial[1]}, width);
      }
      store_output(block, query, sum);
    }
  }

  [[nodiscard]] std::int64_t partial_stride() const { return width + 2; }
};

// A unit of work. span < 0: the whole block; otherwise one span, with its place in the buffer of partial results.
struct AttentionItem {
  QueryBlock block;
  std::int64_t span;
  std::int64_t partial;  // in floats
};

// Work items of a call in memory of the calling thread.
struct AttentionPlan {
  AttentionItem* items;
  std::int64_t num_items;
  std::int64_t num_partial_floats;
};

// Calls emit(block) for each query block, the last and longest of a row first.
template <typename Job, typename Emit>
TOKENSPEED_INLINE void for_blocks(const Job& job, Emit emit) {
  for (std::int64_t row = 0; row < job.args.num_rows; ++row) {
    const std::int64_t query_len = job.query_len(row);
    for (std::int64_t block = (query_len + kTokenBlock - 1) / kTokenBlock - 1; block >= 0; --block) {
      const std::int64_t first = block * kTokenBlock;
      for (std::int64_t head = 0; head < job.args.num_kv_heads; ++head) {
        emit(QueryBlock{row, head, first, min_of(kTokenBlock, query_len - first)});
      }
    }
  }
}

// Spans become items of their own where whole blocks would leave threads idle.
template <typename Job>
AttentionPlan plan_attention(const Job& job) {
  std::int64_t num_blocks = 0;
  std::int64_t num_spans = 0;
  for_blocks(job, [&](const QueryBlock& block) {
    num_blocks += 1;
    num_spans += job.last_span(block) - job.first_span(block) + 1;
  });
  const bool split = num_blocks < 4 * num_threads() && num_spans > num_blocks;
  const std::int64_t num_items = split ? num_spans : num_blocks;
  const auto bytes = static_cast<std::size_t>(num_items) * sizeof(AttentionItem);
  AttentionPlan plan{reinterpret_cast<AttentionItem*>(scratch(3, bytes / sizeof(float))), 0, 0};
  for_blocks(job, [&](const QueryBlock& block) {
    if (!split) {
      plan.items[plan.num_items++] = {block, -1, 0};
      return;
    }
    for (std::int64_t span = job.first_span(block); span <= job.last_span(block); ++span) {
      plan.items[plan.num_items++] = {block, span, plan.num_partial_floats};
      plan.num_partial_floats += block.num_tokens * job.num_group * job.partial_stride();
    }
  });
  return plan;
}

template <typename T, typename N>
void paged_attention_of(const AttentionArgs& args) {
  const AttentionJob<T, N> job{args, (args.head_dim + kLanes - 1) / kLanes * kLanes,
                               args.num_heads / args.num_kv_heads};
  const std::int64_t row_size = args.num_heads * args.head_dim;
  const std::int64_t num_live = args.num_rows > 0 ? args.query_start[args.num_rows] : 0;
  if (num_live < args.num_tokens) {  // without tokens there may be no memory to name
    __builtin_memset(static_cast<T*>(args.out) + num_live * row_size, 0,
                     static_cast<std::size_t>((args.num_tokens - num_live) * row_size) * sizeof(T));
  }
  const AttentionPlan plan = plan_attention(job);
  float* partials = scratch(4, static_cast<std::size_t>(plan.num_partial_floats));
  auto attend = [&](std::int64_t index) {
    const AttentionItem& item = plan.items[index];
    if (item.span < 0) {
      job.attend_block(item.block);
    } else {
      job.attend_partial(item.block, item.span, partials + item.partial);
    }
  };
  parallel(plan.num_items, attend);
  for (std::int64_t index = 0; index < plan.num_items; ++index) {
    const AttentionItem& item = plan.items[index];
    if (item.span >= 0 && item.span == job.first_span(item.block)) {
      job.merge_partials(item.block, partials + item.partial);
    }
  }
}

void paged_attention(const AttentionArgs& args) {
  const bool is_wide = args.dtype == DType::kFloat32;
  switch (args.page_dtype) {
    case DType::kFloat32:
      return paged_attention_of<float, float>(args);
    case DType::kBFloat16:
      return is_wide ? paged_attention_of<float, Bf16>(args) : paged_attention_of<Bf16, Bf16>(args);
    case DType::kInt8:
      return is_wide ? paged_attention_of<float, std::int8_t>(args) : paged_attention_of<Bf16, std::int8_t>(args);
  }
}

}  // namespace
}  // namespace tokenspeed::cpu
