# SPDX-License-Identifier: Apache-2.0
"""Few rows in Triton, the weights read once by as many programs as keep memory busy; more rows, and matrices for which
it was measured faster, by cuBLAS."""

from __future__ import annotations

from tokenspeed.kernels.ops.linear._chosen import few_rows_or_product
from tokenspeed.kernels.platform import triton_on_cuda
from tokenspeed.kernels.registry import Band, Solution

SOLUTION = Solution("triton", Band.PERFORMANT, triton_on_cuda, few_rows_or_product, graph_safe=True)
