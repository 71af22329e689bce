// SPDX-License-Identifier: Apache-2.0
// The persistent step, first half: its shapes, its ring and its products.
//
// One row's decode step of a whole dense model in one kernel, a block on each processor.
//
// In each block one thread, the producer, streams everything that the block reads of weights, K and V into a ring of
// slots in shared memory, in an order that is known when the step begins: it never waits for other blocks. 256
// consumers multiply what has come. Between two products all blocks wait for one another, which the ring hides: it
// goes on filling. Rows of a matrix are shared out evenly, a run of them to each block. The residual stream is float32;
// each block keeps its own part of it in shared memory and publishes it to `stream`.
//
// Compiled between _persistent_ptx.cuh and _persistent.cu with constants of the model: HIDDEN, FF, VOCAB, NUM_HEADS, NUM_KV_HEADS,
// HEAD_DIM, NUM_LAYERS, NUM_GROUPS, BLOCK_SIZE (tokens of a page), GELU (1 or 0); and of the machine: NUM_BLOCKS,
// SPLITS (blocks that share a K/V head at the most), SLOT (bytes, a multiple of 4096), MEMORY (bytes of shared memory).

constexpr int NUM_WARPS = 8, CONSUMERS = 32 * NUM_WARPS;
constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS, HEADS_SIZE = NUM_HEADS * HEAD_DIM, KV_SIZE = NUM_KV_HEADS * HEAD_DIM;
constexpr int QKV_SIZE = HEADS_SIZE + 2 * KV_SIZE;
constexpr int RESIDUAL_MAX = HIDDEN / NUM_BLOCKS + 1;  // rows of the residual stream that a block has
constexpr int VECTOR = 8;                              // numbers that a thread loads at once
constexpr int ACROSS = CONSUMERS * VECTOR;             // numbers that the consumers load at once
constexpr int SUMS_MAX = 256;                          // rows whose sums are kept until they are used
constexpr float NOTHING = -1e30f;                      // the logarithm of no weight
constexpr float LOG2_E = 1.4426950408889634f;

// Attention goes by units of tokens of one page, a slot for K and one for V.
__device__ constexpr int unit_tokens(int tokens) {
  return BLOCK_SIZE % tokens == 0 && tokens * HEAD_DIM * 2 <= SLOT ? tokens : unit_tokens(tokens / 2);
}
constexpr int UNIT = unit_tokens(64), UNIT_BYTES = UNIT * HEAD_DIM * 2;
constexpr int DIM_WARPS = HEAD_DIM > 128 ? HEAD_DIM / 128 : 1;  // warps that share 16 tokens, each with dims of its own
constexpr int WARP_DIM = HEAD_DIM / DIM_WARPS, UNIT_WARPS = UNIT / 16 * DIM_WARPS, UNITS_AT_ONCE = NUM_WARPS / UNIT_WARPS;
constexpr int TILES = NUM_WARPS / DIM_WARPS;  // 16 tokens each
constexpr int ROW_HALVES = GROUP > 8 ? 2 : 1, Q_STRIDE = HEAD_DIM + 8;  // padded against bank conflicts
constexpr int HEAD_FLOATS = GROUP * HEAD_DIM, BUFFER_FLOATS = HEAD_FLOATS > 4096 ? HEAD_FLOATS : 4096;
__device__ constexpr int sum_buffers(int number) {
  return number == 1 || number * HEAD_FLOATS <= BUFFER_FLOATS ? number : sum_buffers(number / 2);
}
constexpr int SUM_BUFFERS = sum_buffers(TILES);  // that the warps' parts of attention are added up in

struct Layer {
  const bf16 *norm_before_attention, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias;
  const bf16 *norm_before_mlp, *gate_up, *gate_up_bias, *down, *down_bias;
  const unsigned char *k_map, *v_map;
  bf16 *k_pages, *v_pages;
  const float* rotary;
  long long rotary_dim, interleaved, group, window, page_stride, token_stride, head_stride;
};

struct Params {
  const Layer* layers;
  const bf16 *embed, *norm, *head;
  const long long *token_id, *position;
  float *stream, *qkv, *parts, *stats, *logits;
  bf16 *attended, *gated;
  u32* counters;  // zero before and after a step
  float embed_scale, eps, gain_offset, score_scale;
  int weights_in_flight, pages_in_flight;  // slots that may be on their way at once
  const int* tables[NUM_GROUPS];
};

struct alignas(16) Scratch {
  Layer layers[NUM_LAYERS];
  float buffer[BUFFER_FLOATS];  // sums of rows, parts of attention, heads on their way through norm and rotation
  bf16 q[GROUP * Q_STRIDE], new_k[HEAD_DIM], new_v[HEAD_DIM];
  float residual[RESIDUAL_MAX], warp_sums[NUM_WARPS], tile_max[TILES + 1][GROUP], tile_sum[TILES + 1][GROUP];
  u32 is_last;
};
constexpr int NUM_SLOTS = (MEMORY - (int)sizeof(Scratch)) / (SLOT + 2 * (int)sizeof(u64));
static_assert(NUM_SLOTS >= 3, "no room for a ring");

struct Shared : Scratch {
  u64 full[NUM_SLOTS], empty[NUM_SLOTS];
};

struct Ring {
  unsigned char* memory;
  Shared* shared;
  int slot = 0, num_issued = 0;
  u32 parity = 0;
  __device__ unsigned char* at() const { return memory + slot * SLOT; }
  __device__ u64* full() const { return &shared->full[slot]; }
  __device__ u64* empty() const { return &shared->empty[slot]; }
  __device__ void next() {
    if (++slot == NUM_SLOTS) slot = 0, parity ^= 1;
  }
};

// How a product with rows of K numbers goes through the ring: `rows` whole rows a slot, or a row in `parts` slots.
template <int K>
struct Cut {
  static constexpr int VECTORS = (K + ACROSS - 1) / ACROSS;  // of a row, a thread
  static constexpr int FIT = SLOT / (ACROSS * 2);
  static constexpr int PARTS = (VECTORS + FIT - 1) / FIT, PART_VECTORS = (VECTORS + PARTS - 1) / PARTS;
  static constexpr int ROWS = PARTS > 1 ? 1 : SLOT / (K * 2) > 8 ? 8 : SLOT / (K * 2);
  static constexpr int SLOTS = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1, BATCH = ROWS * SLOTS;  // whose sums are added at once
};

__device__ __forceinline__ int rows_begin(int num_rows, int block) {
  return (int)((long long)num_rows * block / NUM_BLOCKS);
}

// Which units of which head a block attends; nobody where its head is NUM_KV_HEADS. Units are counted from position 0.
struct Span {
  int head, split, num_splits, begin, end, first_token;
};
__device__ __forceinline__ Span span_of(int position, const Layer& layer) {
  const int head = (int)blockIdx.x / SPLITS, split = (int)blockIdx.x % SPLITS;
  const int first_token = layer.window > position ? 0 : position - (int)layer.window + 1;
  const int first = first_token / UNIT, num_units = (position + UNIT - 1) / UNIT - first;
  const int num_splits = num_units < 1 ? 1 : num_units < SPLITS ? num_units : SPLITS;
  if (head >= NUM_KV_HEADS || split >= num_splits) return {NUM_KV_HEADS, 0, num_splits, 0, 0, 0};
  return {head, split, num_splits, first + (int)((long long)num_units * split / num_splits),
          first + (int)((long long)num_units * (split + 1) / num_splits), first_token};
}

// ---- the producer ----

// Room in the ring for bytes that are about to come. No more than `in_flight` slots are on their way: more would only
// queue up in front of the memory, where the blocks' messages to one another have to wait too.
__device__ __forceinline__ void announce(Ring& ring, int num_bytes, int in_flight) {
  if (ring.num_issued >= in_flight) {
    const int before = ring.slot - in_flight;
    barrier_wait(&ring.shared->full[before < 0 ? before + NUM_SLOTS : before], before < 0 ? ring.parity ^ 1 : ring.parity);
  } else {
    ring.num_issued++;
  }
  barrier_wait(ring.empty(), ring.parity ^ 1);
  barrier_expect(ring.full(), num_bytes);
}

template <int N, int K, bool GATED>
__device__ void stream_weights(const bf16* weights, Ring& ring, int in_flight, u64 policy) {
  using C = Cut<K>;
  const int end = rows_begin(N, blockIdx.x + 1);
  for (int row = rows_begin(N, blockIdx.x); row < end; row += C::ROWS) {
    const int num_numbers = K * (end - row < C::ROWS ? end - row : C::ROWS);
    for (int half = 0; half < (GATED ? 2 : 1); half++) {
      const bf16* from = weights + (long long)(row + half * N) * K;
      for (int done = 0; done < num_numbers; done += C::PARTS > 1 ? C::PART_VECTORS * ACROSS : num_numbers) {
        int count = num_numbers - done;
        if (C::PARTS > 1 && count > C::PART_VECTORS * ACROSS) count = C::PART_VECTORS * ACROSS;
        announce(ring, count * 2, in_flight);
        copy_bytes(ring.at(), from + done, count * 2, ring.full(), policy);
        ring.next();
      }
    }
  }
}

__device__ void stream_pages(
    const Params& params, const Layer& layer, int position, Ring& ring, int in_flight, u64 policy) {
  const Span span = span_of(position, layer);
  const int* table = params.tables[layer.group];
  for (int unit = span.begin; unit < span.end; unit++) {
    const int page = table[unit * UNIT / BLOCK_SIZE], token = unit * UNIT % BLOCK_SIZE;
    for (int which = 0; which < 2; which++) {
      announce(ring, UNIT_BYTES, in_flight);
      for (int part = 0; part < HEAD_DIM / 64; part++)
        copy_tokens(ring.at() + part * UNIT * 128, which ? layer.v_map : layer.k_map, part * 64, token, span.head, page,
                    ring.full(), policy);
      ring.next();
    }
  }
}

__device__ void produce(const Params& params, int position, Ring ring) {
  const u64 policy = read_once_policy();
  const int in_flight = params.weights_in_flight < NUM_SLOTS ? params.weights_in_flight : NUM_SLOTS;
  const int pages_in_flight = params.pages_in_flight < NUM_SLOTS ? params.pages_in_flight : NUM_SLOTS;
  for (int index = 0; index < NUM_LAYERS; index++) {
    const Layer& layer = ring.shared->layers[index];
    prefetch_map(layer.k_map);
    prefetch_map(layer.v_map);
    stream_weights<QKV_SIZE, HIDDEN, false>(layer.qkv, ring, in_flight, policy);
    stream_pages(params, layer, position, ring, pages_in_flight, policy);
    stream_weights<HIDDEN, HEADS_SIZE, false>(layer.out, ring, in_flight, policy);
    stream_weights<FF, HIDDEN, true>(layer.gate_up, ring, in_flight, policy);
    stream_weights<HIDDEN, FF, false>(layer.down, ring, in_flight, policy);
  }
  stream_weights<VOCAB, HIDDEN, false>(params.head, ring, in_flight, policy);
}

// ---- the consumers: products ----

__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = 16; distance; distance >>= 1) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}
__device__ __forceinline__ void unpack(uint4 eight, float* to) {
  to[0] = low(eight.x), to[1] = high(eight.x), to[2] = low(eight.y), to[3] = high(eight.y);
  to[4] = low(eight.z), to[5] = high(eight.z), to[6] = low(eight.w), to[7] = high(eight.w);
}
__device__ __forceinline__ float number(const bf16* at) { return low(__ldg(at)); }

// A thread's part of a vector of K numbers: 8 at each ACROSS, the thread's own place in them. Long ones stay packed.
template <int K>
struct Input {
  static constexpr int VECTORS = Cut<K>::VECTORS;
  static constexpr bool PACKED = VECTORS > 6;
  float numbers[PACKED ? 1 : VECTORS * VECTOR];
  uint4 pairs[PACKED ? VECTORS : 1];

  static __device__ __forceinline__ int column(int index) { return index * ACROSS + (int)threadIdx.x * VECTOR; }
  // Whether the row goes that far; known at compile time but for the last vectors of a row.
  static __device__ __forceinline__ bool has(int index) { return (index + 1) * ACROSS <= K || column(index) < K; }
  __device__ __forceinline__ void set(int index, const float* eight) {
    if constexpr (PACKED) {
      pairs[index] = {packed(eight[0], eight[1]), packed(eight[2], eight[3]), packed(eight[4], eight[5]),
                      packed(eight[6], eight[7])};
    } else {
#pragma unroll
      for (int i = 0; i < VECTOR; i++) numbers[index * VECTOR + i] = eight[i];
    }
  }
  __device__ __forceinline__ float dot(int index, uint4 weights) const {
    float w[VECTOR], x[VECTOR];
    unpack(weights, w);
    if constexpr (PACKED) {
      unpack(pairs[index], x);
    } else {
#pragma unroll
      for (int i = 0; i < VECTOR; i++) x[i] = numbers[index * VECTOR + i];
    }
    const float even = w[0] * x[0] + w[2] * x[2] + w[4] * x[4] + w[6] * x[6];
    return even + (w[1] * x[1] + w[3] * x[3] + w[5] * x[5] + w[7] * x[7]);
  }
};

// A thread's parts of the dot products of the next ROWS rows: the slot is loaded into registers and freed before it is
// multiplied. Rows past the end are what an earlier slot left; nobody reads their sums.
template <int K>
__device__ __forceinline__ void slot_dots(float* sums, const Input<K>& x, Ring& ring) {
  using C = Cut<K>;
#pragma unroll
  for (int part = 0; part < C::PARTS; part++) {
    uint4 weights[C::ROWS][C::PART_VECTORS];
    barrier_wait(ring.full(), ring.parity);
#pragma unroll
    for (int row = 0; row < C::ROWS; row++)
#pragma unroll
      for (int i = 0; i < C::PART_VECTORS; i++)
        if (part * C::PART_VECTORS + i < C::VECTORS && x.has(part * C::PART_VECTORS + i))
          weights[row][i] = *(const uint4*)(ring.at() + row * K * 2 + i * ACROSS * 2 + threadIdx.x * VECTOR * 2);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty());
    ring.next();
#pragma unroll
    for (int row = 0; row < C::ROWS; row++)
#pragma unroll
      for (int i = 0; i < C::PART_VECTORS; i++)
        if (part * C::PART_VECTORS + i < C::VECTORS && x.has(part * C::PART_VECTORS + i))
          sums[row] += x.dot(part * C::PART_VECTORS + i, weights[row][i]);
  }
}

// The warp's sums of four rows, row r's to where[r * NUM_WARPS]: six exchanges, where a row each would take twenty.
__device__ __forceinline__ void add_up(float a, float b, float c, float d, float* where) {
  const int lane = threadIdx.x % 32;
  const bool upper = lane & 16, odd = lane & 8;
  const float first = (upper ? c : a) + __shfl_xor_sync(~0u, upper ? a : c, 16);
  const float second = (upper ? d : b) + __shfl_xor_sync(~0u, upper ? b : d, 16);
  float sum = (odd ? second : first) + __shfl_xor_sync(~0u, odd ? first : second, 8);
  sum += __shfl_xor_sync(~0u, sum, 4);
  sum += __shfl_xor_sync(~0u, sum, 2);
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (lane % 8 == 0) where[lane / 8 * NUM_WARPS] = sum;
}
template <int ROWS>
__device__ __forceinline__ void add_up_rows(const float* sums, float* where) {
#pragma unroll
  for (int row = 0; row < ROWS; row += 4)
    add_up(sums[row], row + 1 < ROWS ? sums[row + 1] : 0.f, row + 2 < ROWS ? sums[row + 2] : 0.f,
           row + 3 < ROWS ? sums[row + 3] : 0.f, where + row * NUM_WARPS);
}
__device__ __forceinline__ float row_sum(const float* warps) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < NUM_WARPS; warp++) sum += warps[warp];
  return sum;
}

// store(row, y) of the block's rows of y = weights x + bias; GATED: store(row, gate, up), whose rows lie N apart.
template <int N, int K, bool GATED, class Store>
__device__ void multiply(const bf16* bias, const Input<K>& x, Ring& ring, Store store) {
  using C = Cut<K>;
  constexpr int STEP = (SUMS_MAX - 4) / C::BATCH * C::BATCH;  // 4: sums of no row
  float* sums = ring.shared->buffer;
  float* up_sums = sums + SUMS_MAX * NUM_WARPS;
  const int end = rows_begin(N, blockIdx.x + 1), warp = threadIdx.x / 32;
  for (int begin = rows_begin(N, blockIdx.x); begin < end; begin += STEP) {
    const int num_rows = end - begin < STEP ? end - begin : STEP, row = begin + (int)threadIdx.x;
    const bool has_bias = bias != nullptr && (int)threadIdx.x < num_rows;
    const float gate_bias = has_bias ? number(bias + row) : 0.f, up_bias = GATED && has_bias ? number(bias + N + row) : 0.f;
    for (int done = 0; done < num_rows; done += C::BATCH) {
      float gate[C::BATCH] = {}, up[C::BATCH] = {};
#pragma unroll
      for (int i = 0; i < C::SLOTS; i++) {
        if (done + i * C::ROWS >= num_rows) break;
        slot_dots<K>(gate + i * C::ROWS, x, ring);
        if constexpr (GATED) slot_dots<K>(up + i * C::ROWS, x, ring);
      }
      add_up_rows<C::BATCH>(gate, sums + done * NUM_WARPS + warp);
      if constexpr (GATED) add_up_rows<C::BATCH>(up, up_sums + done * NUM_WARPS + warp);
    }
    consumers_wait();
    if ((int)threadIdx.x < num_rows) {
      const float y = row_sum(sums + threadIdx.x * NUM_WARPS) + gate_bias;
      if constexpr (GATED)
        store(row, y, row_sum(up_sums + threadIdx.x * NUM_WARPS) + up_bias);
      else
        store(row, y);
    }
    if (begin + STEP < end) consumers_wait();
  }
}

// Gains of a norm, loaded before the blocks wait for one another: they come from memory, what is normed from the cache.
struct Gains {
  uint4 pairs[Cut<HIDDEN>::VECTORS];
};
__device__ __forceinline__ Gains load_gains(const bf16* norm) {
  Gains gains;
#pragma unroll
  for (int i = 0; i < Cut<HIDDEN>::VECTORS; i++)
    if (Input<HIDDEN>::has(i)) gains.pairs[i] = __ldg((const uint4*)(norm + Input<HIDDEN>::column(i)));
  return gains;
}

// The normed residual stream; of the first norm: the token's embedding, `embedded`, in place of it.
__device__ void load_normed(
    const Params& params, const bf16* embedded, const Gains& gains, Input<HIDDEN>& x, Shared& shared) {
  constexpr int VECTORS = Cut<HIDDEN>::VECTORS;
  float values[VECTORS][VECTOR] = {}, squares = 0;
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    if (!x.has(i)) continue;
    if (embedded != nullptr) {
      unpack(__ldg((const uint4*)(embedded + x.column(i))), values[i]);
      for (int j = 0; j < VECTOR; j++) values[i][j] *= params.embed_scale;
    } else {
      *(float4*)values[i] = __ldcg((const float4*)(params.stream + x.column(i)));
      *(float4*)(values[i] + 4) = __ldcg((const float4*)(params.stream + x.column(i)) + 1);
    }
  }
#pragma unroll
  for (int i = 0; i < VECTORS; i++)
#pragma unroll
    for (int j = 0; j < VECTOR; j++) squares += values[i][j] * values[i][j];
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) shared.warp_sums[threadIdx.x / 32] = squares;
  consumers_wait();
  const float scale = rsqrtf(row_sum(shared.warp_sums) / HIDDEN + params.eps);
#pragma unroll
  for (int i = 0; i < VECTORS; i++) {
    float gain[VECTOR] = {};
    if (x.has(i)) unpack(gains.pairs[i], gain);
#pragma unroll
    for (int j = 0; j < VECTOR; j++) values[i][j] *= scale * (gain[j] + params.gain_offset);
    x.set(i, values[i]);
  }
}

template <int K>
__device__ void load_input(const bf16* from, Input<K>& x) {
  uint4 pairs[Cut<K>::VECTORS] = {};
#pragma unroll
  for (int i = 0; i < Cut<K>::VECTORS; i++)
    if (x.has(i)) pairs[i] = __ldcg((const uint4*)(from + x.column(i)));
#pragma unroll
  for (int i = 0; i < Cut<K>::VECTORS; i++) {
    float eight[VECTOR];
    unpack(pairs[i], eight);
    x.set(i, eight);
  }
}

__device__ __forceinline__ float activated(float gate) {
#if GELU
  // gelu(x) in its tanh form is x * sigmoid(2 z), since (1 + tanh z) / 2 = sigmoid(2 z).
  return gate / (1.f + __expf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)));
#else
  return gate / (1.f + __expf(-gate));
#endif
}
