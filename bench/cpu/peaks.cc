// SPDX-License-Identifier: Apache-2.0
// What the processor does at most, in one line of JSON: bytes read from memory, and operations on bytes and on float32
// that stay in registers, each in a second, with so many threads. A multiplication and its addition are two operations.
// Build with -O3 -march=native. The best of several: a ceiling is not lowered by what else runs.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t kReadBytes = size_t{256} << 20;  // far more than a cache holds
constexpr int kRounds = 1 << 20;
constexpr int kRepeats = 30;
constexpr int kChains = 12;  // independent sums: enough for two units of four or five cycles each

volatile uint64_t g_sink;

double seconds_of(int num_threads, const std::function<void(int)>& work) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int index = 0; index < num_threads; ++index) threads.emplace_back(work, index);
  for (auto& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double best_s(int num_threads, const std::function<void(int)>& work) {
  double best = 1e9;
  for (int repeat = 0; repeat < kRepeats; ++repeat) best = std::min(best, seconds_of(num_threads, work));
  return best;
}

uint64_t read_all(const uint64_t* data, size_t count) {
  uint64_t sums[16] = {};
  for (size_t begin = 0; begin + 16 <= count; begin += 16)
    for (size_t lane = 0; lane < 16; ++lane) sums[lane] += data[begin + lane];
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

#if defined(__AVX512F__)
using Floats = __m512;
constexpr double kFloatOps = 2 * 16;
Floats fused(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
Floats floats(float value) { return _mm512_set1_ps(value); }
uint64_t some(Floats sum) { return static_cast<uint64_t>(_mm512_cvtss_f32(sum)); }
#elif defined(__AVX2__) && defined(__FMA__)
using Floats = __m256;
constexpr double kFloatOps = 2 * 8;
Floats fused(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
Floats floats(float value) { return _mm256_set1_ps(value); }
uint64_t some(Floats sum) { return static_cast<uint64_t>(_mm256_cvtss_f32(sum)); }
#else
using Floats = float;
constexpr double kFloatOps = 2;
Floats fused(Floats a, Floats b, Floats sum) { return a * b + sum; }
Floats floats(float value) { return value; }
uint64_t some(Floats sum) { return static_cast<uint64_t>(sum); }
#endif

#if defined(__AVX512VNNI__)
using Bytes = __m512i;
constexpr double kByteOps = 2 * 64;
Bytes dot(Bytes a, Bytes b, Bytes sum) { return _mm512_dpbusd_epi32(sum, a, b); }
Bytes bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
uint64_t some(Bytes sum) { return static_cast<uint64_t>(_mm_cvtsi128_si32(_mm512_castsi512_si128(sum))); }
constexpr const char* kByteKind = "avx512-vnni";
#elif defined(__AVX2__)
using Bytes = __m256i;
constexpr double kByteOps = 2 * 32;
Bytes dot(Bytes a, Bytes b, Bytes sum) {
  const Bytes pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
Bytes bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
uint64_t some(Bytes sum) { return static_cast<uint64_t>(_mm_cvtsi128_si32(_mm256_castsi256_si128(sum))); }
constexpr const char* kByteKind = "avx2";
#else
using Bytes = int32_t;
constexpr double kByteOps = 2;
Bytes dot(Bytes a, Bytes b, Bytes sum) { return sum + a * b; }
Bytes bytes(int value) { return value; }
uint64_t some(Bytes sum) { return static_cast<uint64_t>(sum); }
constexpr const char* kByteKind = "scalar";
#endif

template <typename Vector>
void keep(Vector& value) {
  asm volatile("" : "+x"(value));  // NOLINT: the compiler must not know what it is
}
#if !defined(__AVX2__)
void keep(int32_t& value) { asm volatile("" : "+r"(value)); }
#endif

template <typename Vector, typename Step>
uint64_t chains(Vector a, Vector b, Vector zero, Step step) {
  Vector sums[kChains];
  std::fill(sums, sums + kChains, zero);
  for (int round = 0; round < kRounds; ++round) {
    keep(a);
#pragma GCC unroll 12
    for (int chain = 0; chain < kChains; ++chain) sums[chain] = step(a, b, sums[chain]);
  }
  uint64_t total = 0;
  for (const Vector& sum : sums) total += some(sum);
  return total;
}

}  // namespace

int main(int argc, char** argv) {
  const int num_threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  std::vector<uint64_t> data(kReadBytes / sizeof(uint64_t), 1);
  const size_t share = data.size() / static_cast<size_t>(num_threads);
  const double read_s = best_s(
      num_threads, [&](int index) { g_sink = read_all(data.data() + share * static_cast<size_t>(index), share); });
  const double float_s =
      best_s(num_threads, [](int) { g_sink = chains(floats(1.0F), floats(0.5F), floats(0), fused); });
  const double byte_s = best_s(num_threads, [](int) { g_sink = chains(bytes(1), bytes(2), bytes(0), dot); });
  const double steps = static_cast<double>(kRounds) * kChains * num_threads;
  std::printf(
      "{\"read_bytes_s\": %.6g, \"float_op_s\": %.6g, \"byte_op_s\": %.6g, \"byte_kind\": \"%s\", "
      "\"num_threads\": %d}\n",
      static_cast<double>(share) * 8 * num_threads / read_s, steps * kFloatOps / float_s, steps * kByteOps / byte_s,
      kByteKind, num_threads);
}
