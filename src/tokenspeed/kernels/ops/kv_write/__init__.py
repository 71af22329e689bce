# SPDX-License-Identifier: Apache-2.0
"""Scatter this step's K and V into their pages.

k_TGK, v_TGK: (T, G, K), last dimension contiguous, other strides free. k_pages, v_pages: (P, block_size, G, K),
likewise, mutated. K and V may have other heads and dimensions than each other, and their pages may be parts of one
tensor that do not overlap, as the two parts of a latent are. slots_T: (T,) int64, page * block_size + offset. Slots of
live tokens are distinct; several tokens may name slots of the null page 0, whose content is unspecified afterwards.
T = 0 does nothing.
Pages are of the dtype of K and V, or float8_e4m3fn, which keeps what is beyond ±448 as ±448, or bfloat16 where K and V
are float32, rounded to the nearest and of two to the even one; or int8 with a last dimension of K + 4, as kv_pages has
them. Solutions that write no such pages lack the features "fp8_pages", "bf16_pages" and "int8_pages".
"""

from __future__ import annotations

from typing import Protocol

import torch

from tokenspeed.kernels.kv_pages import INT8_PAGES as INT8_PAGES

FP8_PAGES = "fp8_pages"
"""The feature that a solution needs where pages are float8_e4m3fn."""

BF16_PAGES = "bf16_pages"
"""The feature that a solution needs where pages are bfloat16 and K and V are float32."""


class KvWrite(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> None: ...
