# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies, their scalings for long contexts, and the table that the op reads.

Knows the formulas. Does not know how a configuration spells them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.kernels.ops.rotary import Rotary
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class WavelengthScaling:
    """Wavelengths above original_len / low_freq_factor are stretched by `factor`, those below
    original_len / high_freq_factor are kept, the band between is blended (Llama 3.1, arXiv:2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts interpolation with an attention temperature (YaRN, arXiv:2309.00071). attention_factor multiplies
    cos and sin. truncate: round the correction range to whole dimensions."""

    factor: float
    original_len: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """One rotary embedding. rotary_dim: leading dimensions of a head that turn. interleaved: neighbours turn together,
    and not dimensions half of rotary_dim apart."""

    base: float
    rotary_dim: int
    scaling: LinearScaling | WavelengthScaling | YarnScaling | None = None
    interleaved: bool = False


class RotaryEmbedding(nn.Module):
    """Turns q (T, H, K) and k (T, G, K) in place by the batch's positions, which are below max_positions."""

    table_PR: torch.Tensor

    def __init__(self, ctx: BuildContext, spec: RotarySpec, max_positions: int) -> None:
        super().__init__()
        self.register_buffer("table_PR", cos_sin_table(spec, max_positions).to(ctx.device), persistent=False)
        self.interleaved = spec.interleaved
        self._rotary: Rotary = ctx.bind("rotary")

    def forward(self, q_THK: torch.Tensor, k_TGK: torch.Tensor, batch: ForwardBatch) -> None:
        self._rotary(q_THK, k_TGK, batch.positions_T, self.table_PR, self.interleaved)


def cos_sin_table(spec: RotarySpec, max_positions: int) -> torch.Tensor:
    """(max_positions, rotary_dim) float32, a row holds cos then sin."""
    frequencies = inverse_frequencies(spec)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    amplitude = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude


def inverse_frequencies(spec: RotarySpec) -> torch.Tensor:
    """(rotary_dim / 2,) float32, radians a position."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    plain = 1.0 / (spec.base**exponents)
    scaling = spec.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, WavelengthScaling):
        return _by_wavelength(plain, scaling)
    return _by_parts(plain, spec, scaling)


def _by_wavelength(plain: torch.Tensor, scaling: WavelengthScaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((scaling.original_len / wavelengths - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _by_parts(plain: torch.Tensor, spec: RotarySpec, scaling: YarnScaling) -> torch.Tensor:
    low = _correction_dim(scaling.beta_fast, spec, scaling.original_len)
    high = _correction_dim(scaling.beta_slow, spec, scaling.original_len)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


def _correction_dim(num_rotations: float, spec: RotarySpec, original_len: int) -> float:
    """The dimension that makes `num_rotations` turns over the original length."""
    turns = original_len / (num_rotations * 2 * math.pi)
    return spec.rotary_dim * math.log(turns) / (2 * math.log(spec.base))


def yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """The attention temperature that goes with stretching by `factor`."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
