// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"

namespace tokenspeed::cpu {
namespace {

Kernels choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return __builtin_cpu_supports("avx512vnni") ? avx512vnni_kernels() : avx512_kernels();
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    return avx2_kernels();
  }
#endif
  return portable_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace tokenspeed::cpu
