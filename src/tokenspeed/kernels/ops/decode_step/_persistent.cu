// SPDX-License-Identifier: Apache-2.0
// The persistent step, second half: its attention, and the order of things. See _persistent_products.cuh.

// ---- what the blocks tell one another ----

constexpr int GRID = 0, ATTENDED = 32, LEFT = 64, HEADS_READY = 96, HEADS_DONE = HEADS_READY + 8 * NUM_KV_HEADS;

__device__ __forceinline__ u32* counter_of(const Params& params, int index) { return params.counters + index; }

__device__ __forceinline__ void wait_for(const Params& params, int index, u32 target) {
  if (threadIdx.x == 0) counter_wait(counter_of(params, index), target);
  consumers_wait();
}
// All blocks have come here, for the `times`th time; what they wrote before can be read.
__device__ __forceinline__ void blocks_wait(const Params& params, int times) {
  consumers_wait();
  if (threadIdx.x == 0) counter_add(counter_of(params, GRID), 1);
  wait_for(params, GRID, (u32)times * NUM_BLOCKS);
}

__device__ __forceinline__ int overlap(int begin, int end, int other_begin, int other_end) {
  const int first = begin > other_begin ? begin : other_begin, last = end < other_end ? end : other_end;
  return last > first ? last - first : 0;
}
// Tell those who attend a K/V head how many of its rows of qkv the block has written.
__device__ __forceinline__ void announce_heads(const Params& params) {
  consumers_wait();
  const int begin = rows_begin(QKV_SIZE, blockIdx.x), end = rows_begin(QKV_SIZE, blockIdx.x + 1);
  for (int head = threadIdx.x; head < NUM_KV_HEADS; head += CONSUMERS) {
    const int k = HEADS_SIZE + head * HEAD_DIM, v = k + KV_SIZE;
    const int num_rows = overlap(begin, end, head * HEAD_FLOATS, (head + 1) * HEAD_FLOATS) +
                         overlap(begin, end, k, k + HEAD_DIM) + overlap(begin, end, v, v + HEAD_DIM);
    if (num_rows) counter_add(counter_of(params, HEADS_READY + 8 * head), num_rows);
  }
}

// ---- the consumers: attention ----

constexpr int LANE_DIMS = HEAD_DIM / 32;

// What a lane needs to norm and turn its numbers of a head, known before the head is.
struct Turn {
  float cosine[LANE_DIMS], sine[LANE_DIMS], gain[LANE_DIMS];
};
__device__ __forceinline__ Turn load_turn(const Params& params, const Layer& layer, const bf16* norm, int position) {
  const int rotary_dim = (int)layer.rotary_dim, half = rotary_dim / 2;
  Turn turn;
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) {
    const int dim = threadIdx.x % 32 + 32 * i, pair = layer.interleaved ? dim / 2 : dim < half ? dim : dim - half;
    const float* angles = layer.rotary + (long long)position * rotary_dim + pair;
    turn.cosine[i] = dim < rotary_dim ? __ldg(angles) : 1.f;
    turn.sine[i] = dim < rotary_dim ? __ldg(angles + half) : 0.f;
    turn.gain[i] = norm != nullptr ? number(norm + dim) + params.gain_offset : 1.f;
  }
  return turn;
}

// One head of qkv, a warp's work: norm, rotation, factor. staged: HEAD_DIM floats of the warp's own.
__device__ void turn_head(
    const Params& params, const Layer& layer, const float* from, bool is_normed, const Turn& turn, float factor,
    float* staged, bf16* to) {
  const int lane = threadIdx.x % 32, rotary_dim = (int)layer.rotary_dim, half = rotary_dim / 2;
  float x[LANE_DIMS], squares = 0;
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) x[i] = __ldcg(from + lane + 32 * i);
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) squares += x[i] * x[i];
  const float scale = is_normed ? rsqrtf(warp_sum(squares) / HEAD_DIM + params.eps) : 1.f;
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) staged[lane + 32 * i] = x[i] *= scale * turn.gain[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) {
    const int dim = lane + 32 * i;
    const bool is_second = layer.interleaved ? dim % 2 : dim >= half;
    const int other = layer.interleaved ? dim ^ 1 : is_second ? dim - half : dim + half;
    float y = x[i];
    if (dim < rotary_dim) y = x[i] * turn.cosine[i] + staged[other] * (is_second ? turn.sine[i] : -turn.sine[i]);
    to[dim] = (bf16)packed(y * factor, 0.f);
  }
  __syncwarp();
}

// Once they are there: queries of the head to shared memory; by its first split also the new token's K and V, to shared
// memory and pages.
__device__ void ready_heads(
    const Params& params, const Layer& layer, const Span& span, int index, int position, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_jobs = span.split == 0 ? GROUP + 2 : GROUP;
  const float* k = params.qkv + HEADS_SIZE + span.head * HEAD_DIM;
  const long long page = params.tables[layer.group][position / BLOCK_SIZE];
  const long long place =
      page * layer.page_stride + position % BLOCK_SIZE * layer.token_stride + span.head * layer.head_stride;
  Turn turn = load_turn(params, layer, warp < GROUP ? layer.q_norm : layer.k_norm, position);
  wait_for(params, HEADS_READY + 8 * span.head, (u32)(index + 1) * (HEAD_FLOATS + 2 * HEAD_DIM));
  for (int job = warp; job < num_jobs; job += NUM_WARPS) {
    float* staged = shared.buffer + warp * HEAD_DIM;
    if (job > warp) turn = load_turn(params, layer, job < GROUP ? layer.q_norm : layer.k_norm, position);
    if (job < GROUP) {
      turn_head(params, layer, params.qkv + (span.head * GROUP + job) * HEAD_DIM, layer.q_norm != nullptr, turn,
                params.score_scale * LOG2_E, staged, shared.q + job * Q_STRIDE);
    } else if (job == GROUP) {
      turn_head(params, layer, k, layer.k_norm != nullptr, turn, 1.f, staged, shared.new_k);
      for (int dim = lane; dim < HEAD_DIM; dim += 32) layer.k_pages[place + dim] = shared.new_k[dim];
    } else {
      for (int dim = lane; dim < HEAD_DIM; dim += 32) {
        shared.new_v[dim] = (bf16)packed(__ldcg(k + KV_SIZE + dim), 0.f);
        layer.v_pages[place + dim] = shared.new_v[dim];
      }
    }
  }
  consumers_wait();
}

// What a warp has attended: of rows lane / 4 and lane / 4 + 8, maximum and sum of weights (the sum the lane's own part),
// and sums of V as the tensor cores hand them out.
struct Attended {
  float max[ROW_HALVES], sum[ROW_HALVES], values[WARP_DIM / 8][4];
};

// 16-byte chunk of a token in a slot, as copy_tokens puts it.
__device__ __forceinline__ const unsigned char* chunk_at(const unsigned char* slot, int token, int chunk) {
  return slot + chunk / 8 * (UNIT * 128) + token * 128 + ((chunk ^ token) & 7) * 16;
}

// Scores of a warp's 16 tokens, and their weights; those outside [first, last) have none. in `scores` 8 tokens each.
__device__ __forceinline__ void score_tokens(const unsigned char* slot, int tile, const u32* q, float scores[2][4]) {
  const int lane = threadIdx.x % 32, token = tile * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++) {
    u32 keys[4];
    load_matrices(keys, chunk_at(slot, token, 2 * k + lane / 8 % 2));
    const u32* a = q + k * 2 * ROW_HALVES;
    const u32 a1 = ROW_HALVES > 1 ? a[2] : 0u, a3 = ROW_HALVES > 1 ? a[3] : 0u;
    multiply_tile(scores[0], a[0], a1, a[1], a3, keys[0], keys[1]);
    multiply_tile(scores[1], a[0], a1, a[1], a3, keys[2], keys[3]);
  }
}

// Scores to weights, for the rows of one half; returns by how much what was summed before has to shrink.
__device__ __forceinline__ float weigh(float scores[2][4], int half, float& max, float& sum) {
  float* a = scores[0] + 2 * half;
  float* b = scores[1] + 2 * half;
  float highest = fmaxf(fmaxf(a[0], a[1]), fmaxf(b[0], b[1]));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  const float now = fmaxf(max, highest), shrink = exp2f(max - now);
  max = now;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    a[i] = a[i] > NOTHING ? exp2f(a[i] - now) : 0.f;
    b[i] = b[i] > NOTHING ? exp2f(b[i] - now) : 0.f;
  }
  sum = sum * shrink + ((a[0] + a[1]) + (b[0] + b[1]));
  return shrink;
}

__device__ void attend_units(const Span& span, int position, Ring& ring, Attended& mine) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4 * 2;
  const int group = warp / UNIT_WARPS, tile = warp % UNIT_WARPS / DIM_WARPS, first_chunk = warp % DIM_WARPS * (WARP_DIM / 8);
  u32 q[HEAD_DIM / 16 * 2 * ROW_HALVES];
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 8; k++)
#pragma unroll
    for (int half = 0; half < ROW_HALVES; half++) {
      const bf16* at = ring.shared->q + (row + 8 * half) * Q_STRIDE + k * 8 + pair;
      q[k / 2 * 2 * ROW_HALVES + half * 2 + k % 2] = row + 8 * half < GROUP ? *(const u32*)at : 0u;
    }
  for (int unit = span.begin; unit < span.end; unit++) {
    const bool is_mine = (unit - span.begin) % UNITS_AT_ONCE == group;
    const int token = unit * UNIT + tile * 16 + pair;  // of the lane's first score
    float scores[2][4] = {}, shrink[2] = {1.f, 1.f};
    u32 seen[2] = {};  // masks of the lane's pairs of tokens
    barrier_wait(ring.full(), ring.parity);
    if (is_mine) score_tokens(ring.at(), tile, q, scores);
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty());
    ring.next();
    if (is_mine) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int at = token + 8 * i + j;
          if (at >= span.first_token && at < position)
            seen[i] |= j ? 0xffff0000u : 0xffffu;
          else
            scores[i][j] = scores[i][2 + j] = NOTHING;
        }
#pragma unroll
      for (int half = 0; half < ROW_HALVES; half++) shrink[half] = weigh(scores, half, mine.max[half], mine.sum[half]);
    }
    barrier_wait(ring.full(), ring.parity);
    if (is_mine) {
      const u32 a0 = packed(scores[0][0], scores[0][1]), a2 = packed(scores[1][0], scores[1][1]);
      const u32 a1 = ROW_HALVES > 1 ? packed(scores[0][2], scores[0][3]) : 0u;
      const u32 a3 = ROW_HALVES > 1 ? packed(scores[1][2], scores[1][3]) : 0u;
      const int v_token = tile * 16 + lane % 16;
#pragma unroll
      for (int i = 0; i < WARP_DIM / 16; i++) {
        u32 v[4];
        load_matrices_turned(v, chunk_at(ring.at(), v_token, first_chunk + 2 * i + lane / 16));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          v[j] &= seen[j % 2];  // what is not seen may be NaN, which no weight of 0 takes away
          mine.values[2 * i + j / 2][j % 2] *= shrink[0], mine.values[2 * i + j / 2][2 + j % 2] *= shrink[1];
        }
        multiply_tile(mine.values[2 * i], a0, a1, a2, a3, v[0], v[1]);
        multiply_tile(mine.values[2 * i + 1], a0, a1, a2, a3, v[2], v[3]);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty());
    ring.next();
  }
}

// Score of the new token, by the warps that have had the least to do.
__device__ void score_new(const Span& span, Shared& shared) {
  const int lane = threadIdx.x % 32;
  for (int row = NUM_WARPS - 1 - (int)threadIdx.x / 32; row < GROUP; row += NUM_WARPS) {
    float score = 0;
    if (span.split == 0) {
      for (int dim = lane; dim < HEAD_DIM; dim += 32)
        score += low(shared.q[row * Q_STRIDE + dim]) * low(shared.new_k[dim]);
      score = warp_sum(score);
    }
    if (lane == 0) {
      shared.tile_max[TILES][row] = span.split == 0 ? score : NOTHING;
      shared.tile_sum[TILES][row] = span.split == 0 ? 1.f : 0.f;
    }
  }
}

// A warp's sums to its buffer; on later turns beside those that are there, for which both shrink.
__device__ __forceinline__ void keep_sums(const Attended& mine, int half, int turn, Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp / DIM_WARPS, row = lane / 4 + 8 * half;
  const int first = tile % SUM_BUFFERS;
  float factor = 1.f, other_factor = 0.f;
  if (turn) {
    float before = NOTHING;
    for (int i = 0; i < turn; i++) before = fmaxf(before, shared.tile_max[first + i * SUM_BUFFERS][row]);
    const float now = fmaxf(before, mine.max[half]);
    factor = exp2f(mine.max[half] - now), other_factor = exp2f(before - now);
  }
  float* to = shared.buffer + first * HEAD_FLOATS + row * HEAD_DIM + warp % DIM_WARPS * WARP_DIM + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < WARP_DIM / 8; i++) {
    float2 sum = make_float2(factor * mine.values[i][2 * half], factor * mine.values[i][2 * half + 1]);
    float2* at = (float2*)(to + i * 8);
    if (turn) sum.x += other_factor * at->x, sum.y += other_factor * at->y;
    *at = sum;
  }
}

// The block's sums over its tokens, the new one included, to `parts` and `stats`.
__device__ void add_up_warps(const Params& params, const Span& span, Attended& mine, Shared& shared) {
  constexpr int TURNS = TILES / SUM_BUFFERS;
  const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 / DIM_WARPS;
#pragma unroll
  for (int half = 0; half < ROW_HALVES; half++) {
    const int row = lane / 4 + 8 * half;
    mine.sum[half] += __shfl_xor_sync(~0u, mine.sum[half], 1);
    mine.sum[half] += __shfl_xor_sync(~0u, mine.sum[half], 2);
    if (lane % 4 == 0 && row < GROUP) shared.tile_max[tile][row] = mine.max[half], shared.tile_sum[tile][row] = mine.sum[half];
  }
  score_new(span, shared);
  for (int turn = 0; turn < TURNS; turn++) {
    if (turn) consumers_wait();
#pragma unroll
    for (int half = 0; half < ROW_HALVES; half++)
      if (tile / SUM_BUFFERS == turn && lane / 4 + 8 * half < GROUP) keep_sums(mine, half, turn, shared);
  }
  consumers_wait();
  const int part = span.head * SPLITS + span.split;
  for (int at = 2 * (int)threadIdx.x; at < HEAD_FLOATS; at += 2 * CONSUMERS) {
    const int row = at / HEAD_DIM, dim = at % HEAD_DIM;
    float maxima[SUM_BUFFERS], highest = shared.tile_max[TILES][row], weights;
#pragma unroll
    for (int i = 0; i < SUM_BUFFERS; i++) {
      maxima[i] = shared.tile_max[i][row];
      for (int turn = 1; turn < TURNS; turn++) maxima[i] = fmaxf(maxima[i], shared.tile_max[i + turn * SUM_BUFFERS][row]);
      highest = fmaxf(highest, maxima[i]);
    }
    const float new_weight = exp2f(shared.tile_max[TILES][row] - highest) * shared.tile_sum[TILES][row];
    float2 sum = make_float2(0.f, 0.f);
    if (span.split == 0) sum = make_float2(new_weight * low(shared.new_v[dim]), new_weight * low(shared.new_v[dim + 1]));
    weights = new_weight;
#pragma unroll
    for (int i = 0; i < SUM_BUFFERS; i++) {
      const float factor = exp2f(maxima[i] - highest);
      const float2 more = *(const float2*)(shared.buffer + i * HEAD_FLOATS + at);
      sum.x += factor * more.x, sum.y += factor * more.y;
      if constexpr (TURNS == 1) weights += factor * shared.tile_sum[i][row];
    }
    if constexpr (TURNS > 1)
      for (int i = 0; i < TILES; i++) weights += exp2f(shared.tile_max[i][row] - highest) * shared.tile_sum[i][row];
    __stcg((float2*)(params.parts + (long long)part * HEAD_FLOATS + at), sum);
    if (dim == 0) __stcg((float2*)params.stats + part * GROUP + row, make_float2(highest, weights));
  }
}

// All splits of a head to its output, two numbers a thread; as many splits at once as are loaded in one go.
__device__ void merge_splits(const Params& params, const Span& span) {
  constexpr int AT_ONCE = 16;
  for (int at = 2 * (int)threadIdx.x; at < HEAD_FLOATS; at += 2 * CONSUMERS) {
    float highest = NOTHING, weights = 0, first = 0, second = 0;
    for (int begin = 0; begin < span.num_splits; begin += AT_ONCE) {
      float2 sums[AT_ONCE], stats[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const long long part = span.head * SPLITS + begin + i;
        const bool is_there = begin + i < span.num_splits;
        sums[i] = is_there ? __ldcg((const float2*)(params.parts + part * HEAD_FLOATS + at)) : make_float2(0.f, 0.f);
        stats[i] = is_there ? __ldcg((const float2*)params.stats + part * GROUP + at / HEAD_DIM) : make_float2(NOTHING, 0.f);
      }
      float now = highest;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) now = fmaxf(now, stats[i].x);
      const float shrink = exp2f(highest - now);
      weights *= shrink, first *= shrink, second *= shrink, highest = now;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float factor = exp2f(stats[i].x - now);
        weights += factor * stats[i].y, first += factor * sums[i].x, second += factor * sums[i].y;
      }
    }
    *(u32*)(params.attended + span.head * HEAD_FLOATS + at) = packed(first / weights, second / weights);
  }
}

__device__ void attend(const Params& params, const Layer& layer, int index, int position, Ring& ring) {
  Shared& shared = *ring.shared;
  const Span span = span_of(position, layer);
  if (span.head == NUM_KV_HEADS) return;
  ready_heads(params, layer, span, index, position, shared);
  Attended mine = {};
  for (int half = 0; half < ROW_HALVES; half++) mine.max[half] = NOTHING;
  attend_units(span, position, ring, mine);
  add_up_warps(params, span, mine, shared);
  consumers_wait();
  u32* done = counter_of(params, HEADS_DONE + 8 * span.head);
  if (threadIdx.x == 0) shared.is_last = counter_next(done) == (u32)span.num_splits - 1;
  consumers_wait();
  if (!shared.is_last) return;
  merge_splits(params, span);
  consumers_wait();
  if (threadIdx.x == 0) {
    *done = 0;  // nobody looks at it before the next layer
    counter_add(counter_of(params, ATTENDED), 1);
  }
}

// ---- the step ----

__device__ void consume(const Params& params, int position, Ring ring) {
  Shared& shared = *ring.shared;
  const bf16* embedded = params.embed + params.token_id[0] * (long long)HIDDEN;
  const int thread = threadIdx.x, first_row = rows_begin(HIDDEN, blockIdx.x);
  for (int row = first_row + thread; row < rows_begin(HIDDEN, blockIdx.x + 1); row += CONSUMERS)
    shared.residual[row - first_row] = number(embedded + row) * params.embed_scale;
  const auto add_to_stream = [&](int row, float y) {
    __stcg(params.stream + row, shared.residual[row - first_row] += y);
  };
  int times = 0;
  Gains gains = load_gains(shared.layers[0].norm_before_attention);
  for (int index = 0; index < NUM_LAYERS; index++) {
    const Layer& layer = shared.layers[index];
    {
      Input<HIDDEN> x;
      load_normed(params, index ? nullptr : embedded, gains, x, shared);
      multiply<QKV_SIZE, HIDDEN, false>(
          layer.qkv_bias, x, ring, [&](int row, float y) { __stcg(params.qkv + row, y); });
    }
    announce_heads(params);
    attend(params, layer, index, position, ring);
    {
      Input<HEADS_SIZE> x;
      wait_for(params, ATTENDED, (u32)(index + 1) * NUM_KV_HEADS);
      load_input<HEADS_SIZE>(params.attended, x);
      multiply<HIDDEN, HEADS_SIZE, false>(layer.out_bias, x, ring, add_to_stream);
    }
    gains = load_gains(layer.norm_before_mlp);
    blocks_wait(params, ++times);
    {
      Input<HIDDEN> x;
      load_normed(params, nullptr, gains, x, shared);
      multiply<FF, HIDDEN, true>(layer.gate_up_bias, x, ring, [&](int row, float gate, float up) {
        params.gated[row] = (bf16)packed(activated(gate) * up, 0.f);
      });
    }
    blocks_wait(params, ++times);
    {
      Input<FF> x;
      load_input<FF>(params.gated, x);
      multiply<HIDDEN, FF, false>(layer.down_bias, x, ring, add_to_stream);
    }
    gains = load_gains(index + 1 < NUM_LAYERS ? shared.layers[index + 1].norm_before_attention : params.norm);
    blocks_wait(params, ++times);
  }
  const bool is_last = thread == 0 && counter_next(counter_of(params, LEFT)) == NUM_BLOCKS - 1;
  Input<HIDDEN> x;
  load_normed(params, nullptr, gains, x, shared);
  multiply<VOCAB, HIDDEN, false>(nullptr, x, ring, [&](int row, float y) { params.logits[row] = y; });
  if (!is_last) return;
  // All have left their last wait: nobody reads the counters any more.
  *counter_of(params, GRID) = *counter_of(params, ATTENDED) = *counter_of(params, LEFT) = 0;
  for (int head = 0; head < NUM_KV_HEADS; head++) *counter_of(params, HEADS_READY + 8 * head) = 0;
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) decode_step(const __grid_constant__ Params params) {
  unsigned char* memory = shared_memory();
  Shared& shared = *(Shared*)(memory + NUM_SLOTS * SLOT);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < NUM_SLOTS; slot++) {
      barrier_init(&shared.full[slot], 1);
      barrier_init(&shared.empty[slot], NUM_WARPS);
    }
    barriers_made();
  }
  constexpr int LAYERS_SIZE = sizeof(Layer) * NUM_LAYERS / sizeof(u64);
  for (int at = threadIdx.x; at < LAYERS_SIZE; at += CONSUMERS + 32)
    ((u64*)shared.layers)[at] = ((const u64*)params.layers)[at];
  __syncthreads();
  const int position = (int)params.position[0];
  Ring ring{memory, &shared};
  if (threadIdx.x < CONSUMERS)
    consume(params, position, ring);
  else if (threadIdx.x == CONSUMERS)
    produce(params, position, ring);
}
