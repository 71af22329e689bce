// SPDX-License-Identifier: Apache-2.0
#define TOKENSPEED_ISA avx2
#define TOKENSPEED_LANES 8
#include "kernel_set.h"
