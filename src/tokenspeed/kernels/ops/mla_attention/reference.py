# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch: expands every latent of a row to keys and values of all heads, in float32."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def mla_attention(
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
) -> torch.Tensor:
    num_tokens, num_heads, _ = q_nope_THN.shape
    out_THV = torch.zeros((num_tokens, num_heads, w_v_HVC.shape[1]), dtype=q_nope_THN.dtype, device=q_nope_THN.device)
    starts, block_size, latent_dim = query_start.tolist(), latent_pages.shape[1], w_k_HNC.shape[2]
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        first, last = starts[row], starts[row + 1]
        pages = block_tables_RB[row, : -(-seq_len // block_size)].long()
        cached_SX = latent_pages[pages].flatten(0, 2)[:seq_len].float()
        latent_SC, turned_SE = cached_SX[:, :latent_dim], cached_SX[:, latent_dim:]
        keys_SHN = torch.einsum("sc,hnc->shn", latent_SC, w_k_HNC.float())
        values_SHV = torch.einsum("sc,hvc->shv", latent_SC, w_v_HVC.float())
        scores_HQS = torch.einsum("qhn,shn->hqs", q_nope_THN[first:last].float(), keys_SHN)
        scores_HQS += torch.einsum("qhe,se->hqs", q_rope_THE[first:last].float(), turned_SE)
        position_Q = torch.arange(seq_len - (last - first), seq_len, device=scores_HQS.device)
        is_later_QS = torch.arange(seq_len, device=scores_HQS.device)[None, :] > position_Q[:, None]
        weights_HQS = (scale * scores_HQS).masked_fill(is_later_QS, float("-inf")).softmax(dim=-1)
        out_THV[first:last] = torch.einsum("hqs,shv->qhv", weights_HQS, values_SHV).to(out_THV.dtype)
    return out_THV


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: mla_attention)
