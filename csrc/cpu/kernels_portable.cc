// SPDX-License-Identifier: Apache-2.0
#define TOKENSPEED_ISA portable
#define TOKENSPEED_LANES 8
#include "kernel_set.h"
