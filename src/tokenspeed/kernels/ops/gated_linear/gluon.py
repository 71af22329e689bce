# SPDX-License-Identifier: Apache-2.0
"""One launch for Hopper: one warpgroup loads, the others multiply and gate what they have, so that gate and up are
never written.

The launch is the same for the same shapes: as many programs as there are multiprocessors, or as there are tiles. What
its device code does not have (sizes that are no multiple of a tile, float32, rows that are not aligned) goes the way of
the reference, and never pays.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.kernels.ops.gated_linear import ACTIVATIONS
from tokenspeed.kernels.ops.gated_linear.reference import Reference
from tokenspeed.kernels.platform import gluon_on_hopper
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution, Support

PARTS = 2
"""Warpgroups that multiply."""
PART_M = 64
"""Rows of a warpgroup that multiplies."""
TILE_N = 128
"""Outputs of a tile, each by a row of gate and one of up."""
STEP_K = 64
"""Inputs of a load."""
MIN_ROWS = 512
"""Fewest rows for which it is worth being called: three waves of tiles of an 8B decoder."""
TRITON_VERSION = "3.6"
"""The language of the device code changes from version to version."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How tiles are dealt. stages: steps of loads in shared memory. group: row tiles that are gone through together.
    skew: steps that the first warpgroup is ahead of the other when this one begins a tile, so that it multiplies while
    the first gates."""

    stages: int = 4
    group: int = 16
    skew: int = 2


PLAN = Plan()


def supports(ctx: KernelContext) -> Support:
    return gluon_on_hopper(ctx, TRITON_VERSION)


def build(ctx: KernelContext) -> Kernel:
    return Gluon(PLAN)


class Gluon:
    """The op itself."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._otherwise = Reference()

    def __call__(
        self, x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        assert activation in ACTIVATIONS, activation
        if not suits(x_TD, weight_ND):
            return self._otherwise(x_TD, weight_ND, bias_N, activation)
        return launch(self.plan, x_TD, weight_ND, bias_N, activation)

    def pays(self, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> bool:
        return x_TD.shape[0] >= MIN_ROWS and suits(x_TD, weight_ND)


def suits(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> bool:
    """Whether the device code has what the call needs."""
    num_outputs, num_inputs = weight_ND.shape
    is_tiled = num_outputs > 0 and num_outputs % (2 * TILE_N) == 0 and num_inputs > 0 and num_inputs % STEP_K == 0
    is_ours = x_TD.shape[0] > 0 and is_tiled and x_TD.dtype is weight_ND.dtype
    return is_ours and all(_is_loadable(each) for each in (x_TD, weight_ND))


def _is_loadable(matrix: torch.Tensor) -> bool:
    """As the copy engine wants it: 16-bit numbers, rows that begin at a multiple of 16 bytes and do not overlap."""
    is_whole = matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.stride(0) >= matrix.shape[1]
    return matrix.itemsize == 2 and matrix.is_floating_point() and matrix.data_ptr() % 16 == 0 and is_whole


def launch(
    plan: Plan,
    x_TD: torch.Tensor,
    weight_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """A call that suits."""
    from tokenspeed.kernels.ops.gated_linear._gluon import _triton

    out_TF = torch.empty((x_TD.shape[0], weight_ND.shape[0] // 2), dtype=x_TD.dtype, device=x_TD.device)
    num_rows, num_columns = x_TD.shape[0], out_TF.shape[1] // TILE_N
    num_steps = x_TD.shape[1] // STEP_K
    num_tiles = -(-num_rows // (PARTS * PART_M)) * num_columns
    assert num_tiles < 1 << 30, (num_rows, num_columns)
    _triton.product[(min(num_tiles, num_multiprocessors(x_TD.device)),)](
        descriptor(x_TD, PART_M, STEP_K),
        descriptor(weight_ND, TILE_N, STEP_K),
        None if bias_N is None else bias_N.contiguous(),
        descriptor(out_TF, PART_M, TILE_N),
        num_rows,
        NUM_N=num_columns,
        NUM_STEPS=num_steps,
        GROUP=plan.group,
        STAGES=plan.stages,
        SKEW=skew_of(plan, num_steps),
        HAS_BIAS=bias_N is not None,
        GELU=activation == "gelu_tanh",
        num_warps=4,
    )
    return out_TF


def skew_of(plan: Plan, num_steps: int) -> int:
    """None where a tile has fewer steps than there are stages: the first warpgroup could be two tiles ahead of the
    second, which then could not tell whose turn it is."""
    assert 0 <= plan.skew < plan.stages, plan
    return plan.skew if num_steps >= plan.stages else 0


def descriptor(matrix: torch.Tensor, num_rows: int, num_columns: int) -> Any:
    """For copies of so many rows and columns of it."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [num_rows, num_columns]
    dtype = gl.bfloat16 if matrix.dtype is torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


SOLUTION = Solution("gluon", Band.SPECIALISED, supports, build, graph_safe=True)
