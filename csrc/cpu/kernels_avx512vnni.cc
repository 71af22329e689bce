// SPDX-License-Identifier: Apache-2.0
// The AVX-512 set, with products of bytes that are added up in one instruction.
#define TOKENSPEED_LANES 16
#include "packed_body.h"
#include "packed_highest.h"

namespace tokenspeed::cpu {

Kernels avx512vnni_kernels() {
  Kernels set = avx512_kernels();
  set.isa = "avx512vnni";
  set.packed_linear = packed_linear;
  set.packed_rows = packed_rows;
  set.packed_highest = packed_highest;
  return set;
}

}  // namespace tokenspeed::cpu
