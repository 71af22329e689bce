# SPDX-License-Identifier: Apache-2.0
"""Contract of the sampling op: one token for each row of logits. Knows no request and no seat.

Shapes: S rows, V vocabulary, P penalised rows, N coordinates, G masked rows, W = ceil(V / 32) words.

`sample(logits_SV, inputs, into=None) -> Sampled`
* logits_SV: (S, V) float32 on any device, any strides; S may be 0. Never changed.
* The order is: repetition, frequency and presence penalty; biases; banned tokens and masks (−inf);
  temperature; min-p; top-k; top-p over what top-k left; draw.
* A row with temperature 0 takes the most likely token (the lowest id of equals) and ignores the filters.
* A filter is a threshold: tokens as likely as the last one kept are kept too, so the set never depends on sort order.
  min-p keeps p ≥ min_p · p_max; top-k keeps the k most likely; top-p keeps a token while the probability of the
  strictly more likely kept tokens is below top_p (at least one token stays).
* The draw is argmax over kept tokens of logit / temperature + g, where g = −ln(E) is Gumbel noise and E the
  exponential noise of `noise`: a pure function of (seed, position, token id), so that a draw never depends on the
  batch, on padding or on how the prompt was chunked. Position is the index of the drawn token in its sequence.
* A row whose highest raw logit is not finite (any NaN, any +inf, nothing but −inf) is faulty: its token is 0.
* A solution may sum probabilities in float32 and take faster logarithms. Then a token at the edge of a filter, within
  1e-5 of it, may fall to the other side, and of two scores as near as that either may win: the same one each time.
* into: tensors to write to, contiguous, and then what is returned; else there are new ones.
* So that a call of fixed shapes can be captured, the parts may hold more than it needs: greedy rows have temperature 0,
  filters that are off are no filters, and a penalty, an edit or a mask whose row is S or more stands for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: a division by them would overflow float32."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """rows_P: int64 indices into S, each once. output_counts_PV: int32, how often the row generated each token.
    prompt_mask_PV: bool, tokens of the prompt, or None where no row has a repetition penalty (it counts prompt and
    output; presence and frequency count output only). The three factors are (P,) float32."""

    rows_P: torch.Tensor
    output_counts_PV: torch.Tensor
    prompt_mask_PV: torch.Tensor | None
    presence_P: torch.Tensor
    frequency_P: torch.Tensor
    repetition_P: torch.Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """Values added to single logits: rows_N and token_ids_N int64, values_N float32, −inf bans a token."""

    rows_N: torch.Tensor
    token_ids_N: torch.Tensor
    values_N: torch.Tensor


@dataclass(frozen=True, slots=True)
class Masks:
    """Tokens that rows may take: bit i % 32 of word i // 32 stands for token i. rows_G int64, bits_GW int32, at least
    one bit set below V in each row; no row of S twice."""

    rows_G: torch.Tensor
    bits_GW: torch.Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Per row: top_k_S int64 (0 is off), top_p_S float32 (1 is off), min_p_S float32 (0 is off)."""

    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    min_p_S: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that are drawn, not greedy: temperature_S float32 (0 is greedy), seed_S and position_S int64. filters is
    None when no row has any."""

    temperature_S: torch.Tensor
    seed_S: torch.Tensor
    position_S: torch.Tensor
    filters: Filters | None = None


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """A part is None when no row needs it: that choice is the host's, so that nothing waits for the device."""

    draws: Draws | None = None
    penalties: Penalties | None = None
    edits: Edits | None = None
    masks: Masks | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """token_ids_S int64; is_faulty_S bool."""

    token_ids_S: torch.Tensor
    is_faulty_S: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Sampled:
        """Memory for so many rows."""
        token_ids_S = torch.empty(num_rows, dtype=torch.int64, device=device)
        return cls(token_ids_S, torch.empty(num_rows, dtype=torch.bool, device=device))


class SampleFn(Protocol):
    """A solution of this op."""

    def __call__(self, logits_SV: torch.Tensor, inputs: SamplingInputs, into: Sampled | None = None) -> Sampled: ...
