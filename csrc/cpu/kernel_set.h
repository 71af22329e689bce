// SPDX-License-Identifier: Apache-2.0
// Included once by each kernels_<isa>.cc, which is compiled for that instruction set: everything below this line has
// internal linkage or lives in a namespace of its own, so that the linker can not mix instruction sets.
#pragma once

#include "attention_body.h"
#include "elementwise_body.h"
#include "experts_body.h"
#include "linear_body.h"
#include "packed_body.h"
#include "packed_highest.h"
#include "sampling_body.h"

#define TOKENSPEED_JOIN(a, b) a##b
#define TOKENSPEED_NAME(isa) TOKENSPEED_JOIN(isa, _kernels)
#define TOKENSPEED_TEXT_OF(isa) #isa
#define TOKENSPEED_TEXT(isa) TOKENSPEED_TEXT_OF(isa)

namespace tokenspeed::cpu {

Kernels TOKENSPEED_NAME(TOKENSPEED_ISA)() {
  return {TOKENSPEED_TEXT(TOKENSPEED_ISA),
          kFewRows,
          linear,
          packed_linear,
          packed_rows,
          packed_highest,
          experts,
          paged_attention,
          rms_norm,
          rotary,
          gated,
          kv_write,
          sampling};
}

}  // namespace tokenspeed::cpu
