# SPDX-License-Identifier: Apache-2.0
"""Causal multi-head latent attention (arXiv:2405.04434) of ragged query rows over pages of latents.

R rows, T query tokens, H heads, C latent dimension, N and E dimensions of a query that meet the latent and the shared
turned key, V value dimension, P pages, B table columns.

q_nope_THN: (T, H, N), q_rope_THE: (T, H, E), already turned. latent_pages: (P, block_size, 1, C + E), already holding
this step's tokens: the latent c of a token, normalised, then its turned key r, both shared by all heads. w_k_HNC:
(H, N, C), w_v_HVC: (H, V, C). Last dimensions contiguous, other strides free. query_start, seq_lens_R, block_tables_RB:
as in paged_attention, and so is which positions a token attends, without a window.

Head h of a token at a position of latent (c, r): score = scale * (q_nope . (w_k[h] c) + q_rope . r), value = w_v[h] c;
softmax in float32. A solution is free to expand latents to keys and values, which pays for many queries over few
positions, or to take the queries to the latents and the sums back (the absorbed form: q_nope w_k[h] is a query of c,
and w_v[h] applies to the weighted sum of c), which pays for a decode: the two are the same sum.

Nothing outside the attended positions is read into the result, so pages may hold NaN elsewhere.
Returned: new (T, H, V) of q's dtype, contiguous. Rows with query_len 0 are skipped; tokens at or past query_start[R]
are zero. T = 0 or R = 0 is allowed.
"""

from __future__ import annotations

from typing import Protocol

import torch


class MlaAttention(Protocol):
    """Signature of the op."""

    def __call__(
        self,
        q_nope_THN: torch.Tensor,
        q_rope_THE: torch.Tensor,
        latent_pages: torch.Tensor,
        w_k_HNC: torch.Tensor,
        w_v_HVC: torch.Tensor,
        *,
        query_start: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_tables_RB: torch.Tensor,
        scale: float,
    ) -> torch.Tensor: ...
