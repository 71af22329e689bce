# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch: gathers the pages of one row at a time."""

from __future__ import annotations

import torch

from tokenspeed.kernels.kv_pages import from_codes
from tokenspeed.kernels.ops.paged_attention import BF16_PAGES, FP8_PAGES, INT8_PAGES, SINKS
from tokenspeed.kernels.registry import Band, Ok, Solution


def paged_attention(
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
) -> torch.Tensor:
    out_THK = torch.zeros(q_THK.shape, dtype=q_THK.dtype, device=q_THK.device)
    starts, seq_lens = query_start.tolist(), seq_lens_R.tolist()
    block_size, num_queries_per_kv = k_pages.shape[1], q_THK.shape[1] // k_pages.shape[2]
    for row, seq_len in enumerate(seq_lens):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        pages = block_tables_RB[row, : -(-seq_len // block_size)].long()
        k_SHK = _numbers(k_pages[pages].flatten(0, 1)[:seq_len]).repeat_interleave(num_queries_per_kv, dim=1)
        v_SHK = _numbers(v_pages[pages].flatten(0, 1)[:seq_len]).repeat_interleave(num_queries_per_kv, dim=1)
        scores_HQS = torch.einsum("qhk,shk->hqs", q_THK[first:last].float(), k_SHK) * scale
        if soft_cap is not None:
            scores_HQS = soft_cap * torch.tanh(scores_HQS / soft_cap)
        mask_QS = _mask(seq_len, last - first, window, q_THK.device)
        weights_HQS = _softmax(scores_HQS.masked_fill(~mask_QS, float("-inf")), sinks_H)
        values_SHK = v_SHK.masked_fill(~mask_QS.any(dim=0)[:, None, None], 0.0)
        out_THK[first:last] = torch.einsum("hqs,shk->qhk", weights_HQS, values_SHK).to(q_THK.dtype)
    return out_THK


def _numbers(pages: torch.Tensor) -> torch.Tensor:
    return from_codes(pages) if pages.dtype is torch.int8 else pages.float()


def _mask(seq_len: int, query_len: int, window: int | None, device: torch.device) -> torch.Tensor:
    query_Q = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_S = torch.arange(seq_len, device=device)[None, :]
    mask_QS = key_S <= query_Q
    return mask_QS if window is None else mask_QS & (key_S > query_Q - window)


def _softmax(scores_HQS: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    if sinks_H is None:
        return scores_HQS.softmax(dim=-1)
    sinks_HQ1 = sinks_H[:, None, None].expand(-1, scores_HQS.shape[1], 1)
    return torch.cat((scores_HQS, sinks_HQ1), dim=-1).softmax(dim=-1)[..., :-1]


SOLUTION = Solution(
    "reference",
    Band.REFERENCE,
    lambda _ctx: Ok(),
    lambda _ctx: paged_attention,
    features=frozenset({SINKS, BF16_PAGES, FP8_PAGES, INT8_PAGES}),
)
