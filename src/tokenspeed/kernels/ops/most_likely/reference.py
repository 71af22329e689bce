# SPDX-License-Identifier: Apache-2.0
"""The oracle, in torch."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import Band, Ok, Solution


def most_likely(logits_SV: torch.Tensor, told_2S: torch.Tensor) -> None:
    if len(logits_SV) == 0:
        return
    highest_S, token_ids_S = logits_SV.max(dim=-1)
    is_faulty_S = ~torch.isfinite(highest_S)
    told_2S[0] = token_ids_S.masked_fill(is_faulty_S, 0)
    told_2S[1] = is_faulty_S


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: most_likely, batch_invariant=True)
