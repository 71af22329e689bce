# SPDX-License-Identifier: Apache-2.0
"""A solution of the op `silu_mul` that lives outside the project. Its contract: tokenspeed/kernels/ops/silu_mul."""

from __future__ import annotations

import torch

from tokenspeed.kernels.registry import PLUGIN_API_VERSION, Band, Kernel, KernelContext, Ok, Plugin, Solution, Support


def supports(ctx: KernelContext) -> Support:
    """Runs wherever torch does; return a Reason where a kernel does not."""
    del ctx
    return Ok()


def build(ctx: KernelContext) -> Kernel:
    """Called once, when a model is built: compile or load here, never in the call."""
    del ctx
    return silu_mul


def silu_mul(x_TF: torch.Tensor) -> torch.Tensor:
    """(T, 2 F) to a new (T, F): computed in float32 and rounded once, as the contract asks."""
    gate_TF, up_TF = x_TF.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate_TF) * up_TF).to(x_TF.dtype)


SOLUTION = Solution("gated", Band.PLUGIN, supports, build, graph_safe=True, batch_invariant=True)
PLUGIN = Plugin(PLUGIN_API_VERSION, {"silu_mul": (SOLUTION,)})
