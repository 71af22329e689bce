# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in torch, on any device. The oracle of the other solutions; knows only the contract beside it."""

from __future__ import annotations

import torch

from tokenspeed.kernels.ops.logprobs import MAX_TOP, Logprobs
from tokenspeed.kernels.registry import Band, Ok, Solution


def logprobs(logits_SV: torch.Tensor, token_ids_S: torch.Tensor, num_top: int) -> Logprobs:
    """See the contract."""
    assert 0 <= num_top <= MAX_TOP, num_top
    log_probs_SV = torch.log_softmax(logits_SV, dim=-1)
    chosen_S1 = token_ids_S.unsqueeze(-1)
    ranks_S = (logits_SV > logits_SV.gather(-1, chosen_S1)).sum(dim=-1) + 1
    top_ids_SK = _top_ids(logits_SV, min(num_top, logits_SV.shape[-1]))
    return Logprobs(
        log_probs_SV.gather(-1, chosen_S1).squeeze(-1), ranks_S, top_ids_SK, log_probs_SV.gather(-1, top_ids_SK)
    )


def _top_ids(logits_SV: torch.Tensor, num_top: int) -> torch.Tensor:
    """The ids of the highest logits. topk takes any of equals, so where some are left out or out of order, sort."""
    if num_top == 0 or logits_SV.shape[0] == 0:
        return torch.zeros(logits_SV.shape[0], num_top, dtype=torch.int64, device=logits_SV.device)
    values_SK, ids_SK = logits_SV.topk(num_top, dim=-1)
    is_unclear = (logits_SV >= values_SK[:, -1:]).sum() > values_SK.numel() or (values_SK.diff(dim=-1) == 0).any()
    if not is_unclear:
        return ids_SK
    return logits_SV.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: logprobs, batch_invariant=True)
