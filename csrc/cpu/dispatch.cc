// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace tokenspeed::cpu {
namespace {

std::vector<Kernels> found_sets() {
  std::vector<Kernels> sets;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512vnni")) {
      sets.push_back(avx512vnni_kernels());
    }
    sets.push_back(avx512_kernels());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    sets.push_back(avx2_kernels());
  }
#endif
  sets.push_back(portable_kernels());
  return sets;
}

const Kernels*& chosen() {
  static const Kernels* set = kernel_sets().data();
  return set;
}

}  // namespace

std::span<const Kernels> kernel_sets() {
  static const std::vector<Kernels> sets = found_sets();
  return sets;
}

const Kernels& kernels() { return *chosen(); }

bool choose_kernels(std::string_view isa) {
  const auto sets = kernel_sets();
  const auto found = std::find_if(sets.begin(), sets.end(), [&](const Kernels& set) { return set.isa == isa; });
  if (found == sets.end()) {
    return false;
  }
  chosen() = &*found;
  return true;
}

}  // namespace tokenspeed::cpu
