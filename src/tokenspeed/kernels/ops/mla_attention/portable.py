# SPDX-License-Identifier: Apache-2.0
"""In torch, each row in the form that takes fewer operations: expanded for long prefills, absorbed for decodes.

Scores and sums are float32; products with the weights are rounded to the model's dtype. A row's bits do not depend on
its neighbours, but on how it is cut into steps they do, since that decides the form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


@dataclass(frozen=True, slots=True)
class Row:
    """One row's queries, what it has cached, and the weights of all heads."""

    q_nope_QHN: torch.Tensor
    q_rope_QHE: torch.Tensor
    cached_SX: torch.Tensor
    w_k_HNC: torch.Tensor
    w_v_HVC: torch.Tensor
    scale: float


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
    starts, block_size = query_start.tolist(), latent_pages.shape[1]
    for row, seq_len in enumerate(seq_lens_R.tolist()):
        queries = slice(starts[row], starts[row + 1])
        if queries.start == queries.stop:
            continue
        pages = block_tables_RB[row, : -(-seq_len // block_size)].long()
        cached_SX = latent_pages[pages].flatten(0, 2)[:seq_len]
        one = Row(q_nope_THN[queries], q_rope_THE[queries], cached_SX, w_k_HNC, w_v_HVC, scale)
        out_THV[queries] = absorbed(one) if absorbs(one) else expanded(one)
    return out_THV


def absorbs(row: Row) -> bool:
    """Whether the absorbed form takes fewer operations for a head of this row."""
    query_len, seq_len = row.q_nope_QHN.shape[0], row.cached_SX.shape[0]
    (_, nope_dim, latent_dim), value_dim, rope_dim = row.w_k_HNC.shape, row.w_v_HVC.shape[1], row.q_rope_QHE.shape[2]
    through_weights, num_pairs = (nope_dim + value_dim) * latent_dim, query_len * (seq_len - query_len // 2)
    cost_absorbed = query_len * through_weights + num_pairs * (2 * latent_dim + rope_dim)
    return cost_absorbed < seq_len * through_weights + num_pairs * (nope_dim + rope_dim + value_dim)


def absorbed(row: Row) -> torch.Tensor:
    """(Q, H, V): every head a query of the latents themselves."""
    latent_dim = row.w_k_HNC.shape[2]
    q_latent_QHC = torch.einsum("qhn,hnc->qhc", row.q_nope_QHN, row.w_k_HNC)
    q_QHX = torch.cat((q_latent_QHC, row.q_rope_QHE), dim=-1).float()
    cached_SX = row.cached_SX.float()
    weights_HQS = _softmax(torch.einsum("qhx,sx->hqs", q_QHX, cached_SX), row.scale)
    sums_QHC = torch.einsum("hqs,sc->qhc", weights_HQS, cached_SX[:, :latent_dim])
    return torch.einsum("qhc,hvc->qhv", sums_QHC.to(row.w_v_HVC.dtype), row.w_v_HVC)


def expanded(row: Row) -> torch.Tensor:
    """(Q, H, V): keys and values of each head made of the latents."""
    latent_dim = row.w_k_HNC.shape[2]
    latent_SC, turned_SE = row.cached_SX[:, :latent_dim], row.cached_SX[:, latent_dim:]
    keys_SHN = torch.einsum("sc,hnc->shn", latent_SC, row.w_k_HNC).float()
    values_SHV = torch.einsum("sc,hvc->shv", latent_SC, row.w_v_HVC).float()
    scores_HQS = torch.einsum("qhn,shn->hqs", row.q_nope_QHN.float(), keys_SHN)
    scores_HQS += torch.einsum("qhe,se->hqs", row.q_rope_QHE.float(), turned_SE.float())
    out_QHV = torch.einsum("hqs,shv->qhv", _softmax(scores_HQS, row.scale), values_SHV)
    return out_QHV.to(row.w_v_HVC.dtype)


def _softmax(scores_HQS: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal: the last query is at the last position."""
    _, query_len, seq_len = scores_HQS.shape
    is_seen_QS = torch.ones((query_len, seq_len), dtype=torch.bool, device=scores_HQS.device).tril(seq_len - query_len)
    return (scale * scores_HQS).masked_fill(~is_seen_QS, float("-inf")).softmax(dim=-1)


SOLUTION = Solution("portable", Band.PORTABLE, lambda _ctx: Ok(), lambda _ctx: mla_attention)
