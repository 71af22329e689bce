// SPDX-License-Identifier: Apache-2.0
// What the persistent step needs of the machine, a function each: barriers, bulk copies, tensor-core products. Knows
// nothing of models. A test replaces this file by one that does the same on a CPU.

typedef unsigned int u32;
typedef unsigned short bf16;  // its bits
typedef unsigned long long u64;

constexpr u32 SPINS_MAX = 1u << 22;  // of a wait, some seconds: a step that hangs ends in an error

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// mbarriers: a phase ends when the threads have arrived and the announced bytes have come.
__device__ __forceinline__ void barrier_init(u64* barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_arrivals));
}
__device__ __forceinline__ void barriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ bool barrier_passed(u64* barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return passed;
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  for (u32 spins = 0; !barrier_passed(barrier, parity); spins++)
    if (spins > SPINS_MAX) __trap();
}

__device__ __forceinline__ u64 read_once_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_bytes(void* to, const void* from, int num_bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(to)),
      "l"(from), "r"(num_bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// A box of pages: 64 numbers of each of some tokens, whose 16-byte chunk c lands at c ^ (token & 7).
__device__ __forceinline__ void copy_tokens(
    void* to, const void* map, int first_number, int first_token, int head, int page, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(first_number), "r"(first_token), "r"(head), "r"(page), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Threads 0 ... 255 wait for one another.
__device__ __forceinline__ void consumers_wait() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

// Counters of the whole device. Adding releases what the thread, and those it has waited for, wrote; reading acquires.
__device__ __forceinline__ void counter_add(u32* counter, u32 number) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(number) : "memory");
}
__device__ __forceinline__ u32 counter_next(u32* counter) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(counter) : "memory");
  return old;
}
__device__ __forceinline__ u32 counter_read(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void counter_wait(const u32* counter, u32 target) {
  for (u32 spins = 0; counter_read(counter) < target; spins++)
    if (spins > SPINS_MAX) __trap();
}

__device__ __forceinline__ u32 bits_of(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 packed(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
// c (16, 8) += a (16, 16) b (16, 8); a: rows 0 ... 7 and 8 ... 15 of the first 8 columns, then of the last 8.
__device__ __forceinline__ void multiply_tile(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices, a row from each lane's address; turned: transposed on their way.
__device__ __forceinline__ void load_matrices(u32* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_matrices_turned(u32* to, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
