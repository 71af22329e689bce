# SPDX-License-Identifier: Apache-2.0
"""Launch of the device code for one row, and a rule for its tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.kernels.platform import has_dependent_launch

INPUTS_MAX = 4096
MANY_OUTPUTS = 512


@dataclass(frozen=True, slots=True)
class RowTile:
    """What a program computes: outputs, reading inputs in blocks of `inputs`."""

    outputs: int
    inputs: int
    num_warps: int


class OneRow:
    """The launch on one device."""

    def __init__(self, device: str) -> None:
        from tokenspeed.kernels.ops.linear import _triton

        self._kernels = _triton
        self._pdl = has_dependent_launch(device)
        self._launch = {"launch_pdl": True} if self._pdl else {}

    def __call__(
        self,
        x_1D: torch.Tensor,
        weight_ND: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_1N: torch.Tensor,
        *,
        tile: RowTile,
    ) -> None:
        """Write x @ weight.T + bias."""
        num_outputs, num_inputs = weight_ND.shape
        assert x_1D.shape == (1, num_inputs), (weight_ND.shape, x_1D.shape)
        assert num_inputs == 1 or x_1D.stride(1) == weight_ND.stride(1) == 1, (x_1D.stride(), weight_ND.stride())
        self._kernels.one_row[(-(-num_outputs // tile.outputs),)](
            x_1D,
            weight_ND,
            out_1N if bias_N is None else bias_N,
            out_1N,
            num_outputs,
            weight_ND.stride(0),
            NUM_INPUTS=num_inputs,
            BLOCK_N=tile.outputs,
            BLOCK_D=tile.inputs,
            HAS_BIAS=bias_N is not None,
            PDL=self._pdl,
            num_warps=tile.num_warps,
            **self._launch,
        )


def tile_for(num_outputs: int, num_inputs: int) -> RowTile:
    """Whole rows of weights where they are short; else the longest blocks that they are a number of."""
    inputs = max(16, 1 << (num_inputs - 1).bit_length())
    if inputs > INPUTS_MAX:
        fitting = (block for block in (INPUTS_MAX, INPUTS_MAX // 2, INPUTS_MAX // 4) if num_inputs % block == 0)
        inputs = next(fitting, INPUTS_MAX // 4)
    outputs = 4 if num_outputs >= MANY_OUTPUTS else 1
    return RowTile(outputs, inputs, max(1, min(8, outputs * inputs // 512)))
