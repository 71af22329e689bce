# SPDX-License-Identifier: Apache-2.0
"""What happens between a projection to heads and attention: q and k are normalised head by head, turned by their
positions, and k and v are written into their pages.

q_THK: (T, H, K); k_TGK, v_TGK: (T, G, K), parts of a fused projection's output as a rule: last dimension contiguous,
other strides free. k_pages, v_pages: (P, block_size, G, K), likewise, mutated. slots_T: (T,) int64, page * block_size +
offset. Slots of live tokens are distinct; several tokens may name slots of the null page 0, whose content is
unspecified afterwards. Pages keep numbers of k's dtype, or float8_e4m3fn: rounded to that last, and what is beyond ±448
kept as ±448; or bfloat16 where k is float32, rounded to that last too; or int8 with a last dimension of K + 4, as
kv_pages has them. Solutions that write no such pages lack the features "fp8_pages", "bf16_pages" and "int8_pages".

q_norm_K, k_norm_K: (K,), both or neither. With them a head x becomes x / sqrt(mean(x ** 2) + eps) * (weight +
weight_offset), computed in float32 and rounded to x's dtype, as by rms_norm.
table_PR: (positions, rotary_dim) float32 as in rotary, row p for position p; None where nothing turns, and then
positions_T is not read. positions_T: (T,) int64. interleaved: as in rotary. Turned in float32 and rounded to x's dtype.

Returned: the queries for attention, (T, H, K) of q's dtype. They may be q_THK itself, changed in place: what the memory
of q_THK and k_TGK holds afterwards is unspecified but for that. v_TGK stays. T = 0 does nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tokenspeed.kernels.kv_pages import INT8_PAGES as INT8_PAGES

FP8_PAGES = "fp8_pages"
"""The feature that a solution needs where pages are float8_e4m3fn."""

BF16_PAGES = "bf16_pages"
"""The feature that a solution needs where pages are bfloat16 and k is float32."""


class RotaryKvWrite(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor | None,
        interleaved: bool = False,
        q_norm_K: torch.Tensor | None = None,
        k_norm_K: torch.Tensor | None = None,
        eps: float = 0.0,
        weight_offset: float = 0.0,
    ) -> torch.Tensor: ...
