# SPDX-License-Identifier: Apache-2.0
"""Launch of the device code for few rows. Knows no rule for choosing a tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed.kernels.platform import has_dependent_launch

ARRIVALS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes: outputs x rows over 1 / num_splits of the inputs, read in blocks of `inputs` of which
    `stages` are on their way at a time. prefetch: bytes of each row of weights that are asked for ahead of the kernel
    before."""

    outputs: int
    inputs: int
    num_splits: int = 1
    stages: int = 4
    num_warps: int = 4
    prefetch: int = 0


class FewRows:
    """The launch on one device. Splits of one product count themselves in by counters that all calls share: calls must
    follow each other, as those of one stream do."""

    def __init__(self, device: str) -> None:
        from tokenspeed.kernels.ops.linear import _triton

        self._kernels = _triton
        self._pdl = has_dependent_launch(device)
        self._launch = {"launch_pdl": True} if self._pdl else {}
        self._arrivals = torch.zeros(ARRIVALS_MAX, dtype=torch.int32, device=device)

    def __call__(
        self,
        x_TD: torch.Tensor,
        weight_ND: torch.Tensor,
        bias_N: torch.Tensor | None,
        out_TN: torch.Tensor,
        *,
        tile: Tile,
        rows: int,
        fold: bool = False,
    ) -> None:
        """Write x @ weight.T + bias. rows: of a tile. fold: a program takes all splits of its tile, with the bits of
        those that share them."""
        (num_rows, num_inputs), num_outputs = x_TD.shape, weight_ND.shape[0]
        assert weight_ND.shape[1] == num_inputs, (weight_ND.shape, x_TD.shape)
        assert num_inputs == 1 or x_TD.stride(1) == weight_ND.stride(1) == 1, (x_TD.stride(), weight_ND.stride())
        is_split = tile.num_splits > 1 and not fold
        grid = (-(-num_outputs // tile.outputs), -(-num_rows // rows), tile.num_splits if is_split else 1)
        partials = out_TN
        if is_split:
            assert grid[0] * grid[1] <= ARRIVALS_MAX, grid
            partials_size = grid[0] * grid[1] * grid[2] * tile.outputs * rows
            partials = torch.empty(partials_size, dtype=torch.float32, device=x_TD.device)
        self._kernels.few_rows[grid](
            x_TD,
            weight_ND,
            out_TN if bias_N is None else bias_N,
            out_TN,
            partials,
            self._arrivals,
            num_rows,
            num_outputs,
            num_inputs,
            x_TD.stride(0),
            weight_ND.stride(0),
            tile.num_splits,
            BLOCK_N=tile.outputs,
            BLOCK_D=tile.inputs,
            BLOCK_R=rows,
            STAGES=tile.stages,
            IS_SPLIT=is_split,
            HAS_BIAS=bias_N is not None,
            EVEN=num_inputs % (tile.inputs * tile.num_splits) == 0,
            PREFETCH=tile.prefetch if self._pdl else 0,
            WIDEN=not x_TD.is_cuda,
            FOLD=fold and tile.num_splits > 1,
            PDL=self._pdl,
            num_warps=tile.num_warps,
            **self._launch,
        )


def new_output(x_TD: torch.Tensor, weight_ND: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty((x_TD.shape[0], weight_ND.shape[0]), dtype=out_dtype or x_TD.dtype, device=x_TD.device)
