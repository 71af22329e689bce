// SPDX-License-Identifier: Apache-2.0
// Blocks of threads, warps, barriers and bulk copies of a GPU on one CPU thread: in the place of
// ops/decode_step/_persistent_ptx.cuh, device code runs where there is no GPU. Threads take turns wherever they wait;
// blocks stay behind and copies come late, drawn at random; shared memory holds NaN at first. x86-64 alone.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

using u32 = unsigned int;
using bf16 = unsigned short;
using u64 = unsigned long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }

constexpr u32 SPINS_MAX = 100000;

namespace emulated {
constexpr int STACK = 1 << 16;

struct Group {  // of threads that wait for one another
  int size = 0, num_here = 0;
  unsigned times = 0;
};
struct Thread {
  void* stack_pointer = nullptr;
  unsigned block = 0, index = 0;
  bool is_done = false;
  Group* warp = nullptr;
  u64* lanes = nullptr;  // what the lanes of the warp show one another: 16 words each
};
struct Copy {
  std::function<void()> land;
};
inline std::vector<Thread> threads;
inline std::vector<std::vector<unsigned char>> memories;
inline std::vector<Group> consumers, blocks, warps;
inline std::vector<u64> lane_words;
inline std::vector<Copy> copies;
inline Thread* running = nullptr;
inline void* scheduler = nullptr;
inline bool has_failed = false;
inline std::mt19937 random;
inline std::function<void()> kernel;

extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
emulated_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");

inline void yield() { emulated_switch(&running->stack_pointer, scheduler); }
inline void wait(Group& group) {
  const unsigned time = group.times;
  if (++group.num_here == group.size) {
    group.num_here = 0, group.times++;
  } else {
    while (group.times == time) yield();
  }
}
}  // namespace emulated

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx;

namespace emulated {
inline void enter() {
  kernel();
  running->is_done = true;
  yield();
}
// Runs num_blocks * num_threads of them to their end; false where one gives up.
inline bool run(int num_blocks, int num_threads, int num_consumers, int memory, unsigned seed, std::function<void()> f) {
  const int num_warps = (num_threads + 31) / 32;
  kernel = std::move(f), has_failed = false, random.seed(seed), copies.clear();
  threads.assign(num_blocks * num_threads, {});
  memories.assign(num_blocks, std::vector<unsigned char>(memory + 1024, 0xff));
  consumers.assign(num_blocks, {num_consumers});
  blocks.assign(num_blocks, {num_threads});
  warps.assign(num_blocks * num_warps, {32});
  lane_words.assign(num_blocks * num_warps * 32 * 16, 0);
  std::vector<std::vector<unsigned char>> stacks(threads.size(), std::vector<unsigned char>(STACK));
  for (size_t i = 0; i < threads.size(); i++) {
    Thread& thread = threads[i];
    thread.block = i / num_threads, thread.index = i % num_threads;
    const int warp = thread.block * num_warps + thread.index / 32;
    thread.warp = &warps[warp], thread.lanes = &lane_words[warp * 32 * 16];
    void** top = (void**)(((uintptr_t)stacks[i].data() + STACK) & ~(uintptr_t)15);
    *--top = nullptr;
    *--top = (void*)enter;
    thread.stack_pointer = top - 6;
  }
  std::vector<int> asleep(num_blocks);  // turns that a block stays behind
  for (size_t num_left = threads.size(); num_left && !has_failed;) {
    for (int& turns : asleep) turns = turns ? turns - 1 : random() % 32 ? 0 : random() % 256;
    for (Thread& thread : threads) {
      if (thread.is_done || has_failed || asleep[thread.block]) continue;
      running = &thread, threadIdx.x = thread.index, blockIdx.x = thread.block;
      emulated_switch(&scheduler, thread.stack_pointer);
      num_left -= thread.is_done;
    }
    for (size_t i = 0; i < copies.size();) {
      if (random() % 4) {
        i++;
        continue;
      }
      copies[i].land();
      copies[i] = std::move(copies.back());
      copies.pop_back();
    }
  }
  return !has_failed;
}
template <class T>
T shown_by(int lane, int word = 0) {
  T value;
  memcpy(&value, running->lanes + lane * 16 + word, sizeof value);
  return value;
}
template <class T>
void show(T value, int word = 0) {
  memcpy(running->lanes + running->index % 32 * 16 + word, &value, sizeof value);
}
struct Barrier {  // in the 8 bytes of a u64
  unsigned char count, left;
  short phase;
  int bytes;
};
inline Barrier& at(u64* barrier) { return *(Barrier*)barrier; }
inline void turn(Barrier& barrier) {
  if (barrier.left == 0 && barrier.bytes == 0) barrier.left = barrier.count, barrier.phase ^= 1;
}
inline void landed(u64* barrier, int num_bytes) {
  at(barrier).bytes -= num_bytes;
  turn(at(barrier));
}
struct Map {  // in the place of a tensor map
  const bf16* pages;
  long long page_stride, token_stride, head_stride, num_tokens;
};
}  // namespace emulated

inline unsigned char* shared_memory() {
  return (unsigned char*)(((uintptr_t)emulated::memories[blockIdx.x].data() + 1023) & ~(uintptr_t)1023);
}
inline void __trap() {
  emulated::has_failed = true;
  emulated::yield();
}
inline void barrier_init(u64* barrier, int num_arrivals) {
  emulated::at(barrier) = {(unsigned char)num_arrivals, (unsigned char)num_arrivals, 0, 0};
}
inline void barriers_made() {}
inline void barrier_arrive(u64* barrier) {
  emulated::at(barrier).left--;
  emulated::turn(emulated::at(barrier));
}
inline void barrier_expect(u64* barrier, int num_bytes) {
  emulated::at(barrier).bytes += num_bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(u64* barrier, u32 parity) {
  for (int spins = 0; emulated::at(barrier).phase == (short)parity; spins++) {
    if (spins > (int)SPINS_MAX) __trap();
    emulated::yield();
  }
}
inline u64 read_once_policy() { return 0; }
inline void copy_bytes(void* to, const void* from, int num_bytes, u64* barrier, u64) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || num_bytes % 16) __trap();
  emulated::copies.push_back({[=] {
    memcpy(to, from, num_bytes);
    emulated::landed(barrier, num_bytes);
  }});
}
inline void copy_tokens(void* to, const void* map, int number, int token, int head, int page, u64* barrier, u64) {
  const emulated::Map m = *(const emulated::Map*)map;
  if ((uintptr_t)to % 1024) __trap();
  emulated::copies.push_back({[=] {
    for (int t = 0; t < m.num_tokens; t++) {
      const bf16* from = m.pages + page * m.page_stride + head * m.head_stride + (token + t) * m.token_stride + number;
      for (int chunk = 0; chunk < 8; chunk++)
        memcpy((unsigned char*)to + t * 128 + ((chunk ^ t) & 7) * 16, from + chunk * 8, 16);
    }
    emulated::landed(barrier, (int)m.num_tokens * 128);
  }});
}
inline void prefetch_map(const void*) {}
inline void consumers_wait() { emulated::wait(emulated::consumers[blockIdx.x]); }
inline void __syncthreads() { emulated::wait(emulated::blocks[blockIdx.x]); }
inline void __syncwarp() { emulated::wait(*emulated::running->warp); }
template <class T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  emulated::show(value);
  __syncwarp();
  const T other = emulated::shown_by<T>((threadIdx.x % 32) ^ distance);
  __syncwarp();
  return other;
}
inline void counter_add(u32* counter, u32 number) { *counter += number; }
inline u32 counter_next(u32* counter) { return (*counter)++; }
inline void counter_wait(const u32* counter, u32 target) {
  for (int spins = 0; *(const volatile u32*)counter < target; spins++) {
    if (spins > (int)SPINS_MAX) __trap();
    emulated::yield();
  }
}
inline float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline float low(u32 pair) { return float_of(pair << 16); }
inline float high(u32 pair) { return float_of(pair & 0xffff0000u); }
inline u32 rounded(float value) {
  const u32 bits = bits_of(value);
  return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline u32 packed(float first, float second) { return rounded(first) | rounded(second) << 16; }
inline void multiply_tile(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  using emulated::shown_by;
  const u32 words[6] = {a0, a1, a2, a3, b0, b1};
  for (int i = 0; i < 6; i++) emulated::show(words[i], i);
  __syncwarp();
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const u32 a = shown_by<u32>(row % 8 * 4 + k % 8 / 2, k / 8 * 2 + row / 8);
      const u32 b = shown_by<u32>(column * 4 + k % 8 / 2, 4 + k / 8);
      c[i] += (k % 2 ? high(a) : low(a)) * (k % 2 ? high(b) : low(b));
    }
  }
  __syncwarp();
}
inline void load_any(u32* to, const void* row, bool is_turned) {
  emulated::show(row);
  __syncwarp();
  const int lane = threadIdx.x % 32;
  for (int matrix = 0; matrix < 4; matrix++) {
    bf16 two[2];
    for (int i = 0; i < 2; i++) {
      const int r = is_turned ? lane % 4 * 2 + i : lane / 4, c = is_turned ? lane / 4 : lane % 4 * 2 + i;
      two[i] = emulated::shown_by<const bf16*>(matrix * 8 + r)[c];
    }
    memcpy(to + matrix, two, 4);
  }
  __syncwarp();
}
inline void load_matrices(u32* to, const void* row) { load_any(to, row, false); }
inline void load_matrices_turned(u32* to, const void* row) { load_any(to, row, true); }
template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
void __stcg(T* at, T value) { *at = value; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
using std::exp2f;
using std::fmaxf;
