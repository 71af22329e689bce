# SPDX-License-Identifier: Apache-2.0
"""Sampling in torch, on any device. The oracle of the other solutions; knows only the contract beside it.

Filters look at the most likely tokens first and widen only for rows whose kept set reaches beyond them, so a full
sort is rare; the result is the same however wide the look was.
"""

from __future__ import annotations

import math

import torch

from tokenspeed.kernels.ops.sampling import (
    GREEDY_BELOW,
    Draws,
    Edits,
    Filters,
    Masks,
    Penalties,
    Sampled,
    SamplingInputs,
)
from tokenspeed.kernels.registry import Band, Ok, Solution

FIRST_LOOK = 128
WIDEN_BY = 16


def sample(logits_SV: torch.Tensor, inputs: SamplingInputs, into: Sampled | None = None) -> Sampled:
    """See the contract."""
    sampled = into or Sampled.empty(len(logits_SV), logits_SV.device)
    if len(logits_SV) == 0:
        return sampled
    highest_S, greedy_S = _highest(logits_SV)
    is_faulty_S = ~torch.isfinite(highest_S)
    edited_SV = _edit(logits_SV, inputs)
    if edited_SV is not logits_SV:
        greedy_S = _highest(edited_SV)[1]
    token_ids_S = greedy_S if inputs.draws is None else _draw(edited_SV, greedy_S, inputs.draws)
    sampled.token_ids_S.copy_(token_ids_S.masked_fill(is_faulty_S, 0))
    sampled.is_faulty_S.copy_(is_faulty_S)
    return sampled


def noise(seed_N: torch.Tensor, position_N: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Exponential noise, float32 (N, K): −ln(1 − u) for a uniform u that hashes (seed, position, token id).

    token_ids: int64 or int32, (N, K) or (1, K). u has 31 bits, so the smallest value is 2⁻³².
    """
    key_N1 = _mix64(_mix64(seed_N) ^ position_N).unsqueeze(-1)
    bits = token_ids.to(torch.int32) * _signed(0x9E3779B1, 32)
    bits = _mix32_(bits + key_N1.to(torch.int32))
    bits = _mix32_(bits.bitwise_xor_((key_N1 >> 32).to(torch.int32)))
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _highest(logits_SV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logit of each row and the first id that has it. On a host numpy finds it ten times as fast."""
    if logits_SV.device.type != "cpu":
        highest_S, greedy_S = logits_SV.max(dim=-1)
        return highest_S, greedy_S
    greedy_S = torch.from_numpy(logits_SV.numpy().argmax(axis=-1))
    return logits_SV.gather(1, greedy_S[:, None])[:, 0], greedy_S


def _edit(logits_SV: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """The logits after penalties, biases and bans: a copy when there are any."""
    if inputs.penalties is None and inputs.edits is None and inputs.masks is None:
        return logits_SV
    edited_SV = logits_SV.clone()
    num_rows = logits_SV.shape[0]
    if inputs.penalties is not None:
        _penalise(edited_SV, _real_penalties(inputs.penalties, num_rows))
    if inputs.edits is not None:
        _add(edited_SV, _real_edits(inputs.edits, num_rows))
    if inputs.masks is not None:
        _mask(edited_SV, _real_masks(inputs.masks, num_rows))
    return edited_SV


def _real_penalties(penalties: Penalties, num_rows: int) -> Penalties:
    """Without those of rows that are not there."""
    is_real_P = penalties.rows_P < num_rows
    if is_real_P.all():
        return penalties
    prompt_mask_PV = penalties.prompt_mask_PV
    return Penalties(
        penalties.rows_P[is_real_P],
        penalties.output_counts_PV[is_real_P],
        None if prompt_mask_PV is None else prompt_mask_PV[is_real_P],
        penalties.presence_P[is_real_P],
        penalties.frequency_P[is_real_P],
        penalties.repetition_P[is_real_P],
    )


def _real_edits(edits: Edits, num_rows: int) -> Edits:
    is_real_N = edits.rows_N < num_rows
    return Edits(edits.rows_N[is_real_N], edits.token_ids_N[is_real_N], edits.values_N[is_real_N])


def _real_masks(masks: Masks, num_rows: int) -> Masks:
    is_real_G = masks.rows_G < num_rows
    return masks if is_real_G.all() else Masks(masks.rows_G[is_real_G], masks.bits_GW[is_real_G])


def _penalise(logits_SV: torch.Tensor, penalties: Penalties) -> None:
    row_PV = logits_SV[penalties.rows_P]
    counts_PV = penalties.output_counts_PV
    if penalties.prompt_mask_PV is not None:
        factor_P1 = penalties.repetition_P.unsqueeze(-1)
        repeated_PV = torch.where(row_PV > 0, row_PV / factor_P1, row_PV * factor_P1)
        row_PV = torch.where(penalties.prompt_mask_PV | (counts_PV > 0), repeated_PV, row_PV)
    row_PV = row_PV - penalties.frequency_P.unsqueeze(-1) * counts_PV
    row_PV = row_PV - penalties.presence_P.unsqueeze(-1) * (counts_PV > 0)
    logits_SV[penalties.rows_P] = row_PV


def _add(logits_SV: torch.Tensor, edits: Edits) -> None:
    logits_SV.index_put_((edits.rows_N, edits.token_ids_N), edits.values_N, accumulate=True)


def _mask(logits_SV: torch.Tensor, masks: Masks) -> None:
    shifts = torch.arange(32, dtype=torch.int32, device=logits_SV.device)
    bits_GV = (masks.bits_GW.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, : logits_SV.shape[-1]]
    logits_SV[masks.rows_G] = logits_SV[masks.rows_G].masked_fill_(bits_GV == 0, -math.inf)


def _draw(logits_SV: torch.Tensor, greedy_S: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The tokens of all rows: drawn where the temperature says so, else the greedy ones."""
    token_ids_S = greedy_S.clone()
    is_drawn_S = draws.temperature_S >= GREEDY_BELOW
    is_open_S = is_drawn_S
    if draws.filters is not None:
        filters = draws.filters
        is_open_S = is_drawn_S & (filters.top_k_S <= 0) & (filters.top_p_S >= 1) & (filters.min_p_S <= 0)
    for choose, is_chosen_S in ((_draw_open, is_open_S), (_draw_filtered, is_drawn_S & ~is_open_S)):
        (rows_D,) = torch.nonzero(is_chosen_S, as_tuple=True)
        if rows_D.numel() > 0:
            part = _take(draws, rows_D)
            token_ids_S[rows_D] = choose(logits_SV[rows_D] / part.temperature_S.unsqueeze(-1), part)
    return token_ids_S


def _take(draws: Draws, rows: torch.Tensor) -> Draws:
    filters = None if draws.filters is None else _take_filters(draws.filters, rows)
    return Draws(draws.temperature_S[rows], draws.seed_S[rows], draws.position_S[rows], filters)


def _take_filters(filters: Filters, rows: torch.Tensor) -> Filters:
    return Filters(filters.top_k_S[rows], filters.top_p_S[rows], filters.min_p_S[rows])


def _draw_open(scaled_DV: torch.Tensor, draws: Draws) -> torch.Tensor:
    vocab_ids_1V = torch.arange(scaled_DV.shape[-1], dtype=torch.int32, device=scaled_DV.device).unsqueeze(0)
    noise_DV = noise(draws.seed_S, draws.position_S, vocab_ids_1V)
    return (scaled_DV - noise_DV.log_()).argmax(dim=-1)


def _draw_filtered(scaled_DV: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Look at the FIRST_LOOK most likely tokens; rows that may keep more are looked at again, wider."""
    assert draws.filters is not None, "filtered rows without filters"
    vocab_size = scaled_DV.shape[-1]
    log_probs_DV = torch.log_softmax(scaled_DV, dim=-1)
    drawn_D = torch.zeros_like(draws.seed_S)
    rows_E = torch.arange(drawn_D.shape[0], device=drawn_D.device)
    width = min(vocab_size, FIRST_LOOK)
    while rows_E.numel() > 0:
        log_probs_EK, ids_EK = log_probs_DV[rows_E].topk(width, dim=-1)
        floor_E, is_seen_E = _floor(log_probs_EK, _take_filters(draws.filters, rows_E), vocab_size)
        noise_EK = noise(draws.seed_S[rows_E], draws.position_S[rows_E], ids_EK)
        scores_EK = (log_probs_EK - noise_EK.log_()).masked_fill(log_probs_EK < floor_E.unsqueeze(-1), -math.inf)
        drawn_E = ids_EK.gather(-1, scores_EK.argmax(dim=-1, keepdim=True)).squeeze(-1)
        drawn_D[rows_E[is_seen_E]] = drawn_E[is_seen_E]
        rows_E = rows_E[~is_seen_E]
        width = min(vocab_size, width * WIDEN_BY)
    return drawn_D


def _floor(log_probs_EK: torch.Tensor, filters: Filters, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probability of the least likely kept token, and whether the K tokens show the whole kept set.

    log_probs_EK: the K most likely, descending, normalised over the whole vocabulary.
    """
    width = log_probs_EK.shape[-1]
    beyond_E = log_probs_EK[:, -1]
    top_k_E, top_p_E, min_p_E = filters.top_k_S, filters.top_p_S.double(), filters.min_p_S
    open_E = torch.full_like(beyond_E, -math.inf)
    floor_E = torch.where(min_p_E > 0, log_probs_EK[:, 0] + torch.log(min_p_E), open_E)
    last_E1 = (top_k_E.clamp(1, width) - 1).unsqueeze(-1)
    kth_E = log_probs_EK.gather(-1, last_E1).squeeze(-1)
    floor_E = torch.maximum(floor_E, torch.where((top_k_E > 0) & (top_k_E <= width), kth_E, open_E))

    # top-p runs over what the other filters left, renormalised; where they left all, the total is 1 by definition.
    is_narrowed_E = (top_k_E > 0) | (min_p_E > 0)
    probs_EK = log_probs_EK.double().exp().masked_fill_(log_probs_EK < floor_E.unsqueeze(-1), 0.0)
    total_E = torch.where(is_narrowed_E, probs_EK.sum(dim=-1), 1.0)
    more_likely_EK = probs_EK.cumsum(dim=-1) - probs_EK
    is_in_EK = more_likely_EK < (top_p_E * total_E).unsqueeze(-1)
    num_in_E1 = is_in_EK.sum(dim=-1, keepdim=True).clamp_(min=1)
    nucleus_E = torch.where(top_p_E < 1, log_probs_EK.gather(-1, num_in_E1 - 1).squeeze(-1), open_E)

    is_seen_E = (torch.maximum(floor_E, nucleus_E) > beyond_E) & (~is_narrowed_E | (floor_E > beyond_E))
    return torch.maximum(floor_E, nucleus_E), is_seen_E | (width == vocab_size)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on int64 that wraps."""
    x = x + _signed(0x9E3779B97F4A7C15, 64)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB, 64)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix32_(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3 (Appleby) on int32 that wraps, in place."""
    x.bitwise_xor_((x >> 16).bitwise_and_((1 << 16) - 1)).mul_(_signed(0x85EBCA6B, 32))
    x.bitwise_xor_((x >> 13).bitwise_and_((1 << 19) - 1)).mul_(_signed(0xC2B2AE35, 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_((1 << 16) - 1))


SOLUTION = Solution("reference", Band.REFERENCE, lambda _ctx: Ok(), lambda _ctx: sample, batch_invariant=True)
