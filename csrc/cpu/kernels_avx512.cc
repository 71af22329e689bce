// SPDX-License-Identifier: Apache-2.0
#define TOKENSPEED_ISA avx512
#define TOKENSPEED_LANES 16
#include "kernel_set.h"
