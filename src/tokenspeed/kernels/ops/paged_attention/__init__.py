# SPDX-License-Identifier: Apache-2.0
"""Causal attention of ragged query rows over paged K and V.

R rows, T query tokens, H query heads, G K/V heads (H a multiple of G; query head h reads K/V head h // (H / G)),
K head dimension, P pages, B table columns.

q_THK: (T, H, K), last dimension contiguous. k_pages, v_pages: (P, block_size, G, K), last dimension contiguous, already
holding this step's tokens. query_start: (R + 1,) int32, row r owns tokens query_start[r] : query_start[r + 1].
seq_lens_R: (R,) int32, tokens of the row including this step's. block_tables_RB: (R, B) int32 page numbers.

Token i of a row with query_len n sits at position p = seq_len - n + i and attends positions
max(0, p - window + 1) ... p, both inclusive: a window counts tokens including the current one; None means no window.
score = scale * q . k, then soft_cap * tanh(score / soft_cap) when soft_cap is given; softmax in float32.
sinks_H: (H,) float32, contiguous, or None: one more score of each head that every token of it attends, past scale,
soft_cap and window, and that has no value: it only takes weight away. Solutions without it lack the feature "sinks".
max_query_len: what the host knows query lengths to be at most, so that a launch needs no look at the device; None: T.
k_pages and v_pages are of q's dtype, or float8_e4m3fn, or bfloat16 where q is float32: their numbers count as they are.
Or they are of int8 with a last dimension of K + 4, as kv_pages has them. Solutions without these lack the features
"fp8_pages", "bf16_pages" and "int8_pages".
Nothing outside the attended positions is read into the result, so pages may hold NaN elsewhere.

Returned: new (T, H, K) of q's dtype, contiguous. Rows with query_len 0 are skipped; tokens at or past
query_start[R] are zero. T = 0 or R = 0 is allowed. No log-sum-exp is returned yet.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tokenspeed.kernels.kv_pages import INT8_PAGES as INT8_PAGES

SINKS = "sinks"
"""The feature that a solution needs where sinks_H is given."""

FP8_PAGES = "fp8_pages"
"""The feature that a solution needs where pages are float8_e4m3fn."""

BF16_PAGES = "bf16_pages"
"""The feature that a solution needs where pages are bfloat16 and q is float32."""


class PagedAttention(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        q_THK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        query_start: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_tables_RB: torch.Tensor,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_H: torch.Tensor | None = None,
        max_query_len: int | None = None,
    ) -> torch.Tensor: ...
