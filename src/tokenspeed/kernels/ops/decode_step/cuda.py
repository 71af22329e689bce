# SPDX-License-Identifier: Apache-2.0
"""A decode step of one row as one persistent kernel, in CUDA C++; steps of more rows, and models that it cannot run, go
by the chain of Triton kernels.

Knows where the kernel runs and puts it together with its compiler. What it computes is in _persistent.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels import platform
from tokenspeed.kernels.ops.decode_step import DecodeBatch, DecodeStep, DenseModel, Prepare, _program
from tokenspeed.kernels.ops.decode_step import triton as chain
from tokenspeed.kernels.ops.decode_step._persistent import PersistentStep, constants_of, refusal, source
from tokenspeed.kernels.registry import Band, KernelContext, Ok, Reason, Solution, Support

_SHARED_MEMORY = 227 << 10  # bytes, all that a block may have where it runs


class _Step:
    """By the number of rows."""

    def __init__(self, single: PersistentStep, several: DecodeStep) -> None:
        self._single, self._several = single, several

    def __call__(self, batch: DecodeBatch) -> torch.Tensor:
        return self._single(batch) if len(batch.token_ids_R) == 1 else self._several(batch)


def persistent(model: DenseModel, slot: int | None = None) -> PersistentStep | Reason:
    """The step of one row. slot: bytes that are copied at once, chosen by the model's sizes where it is None."""
    num_blocks = torch.cuda.get_device_properties(model.embed.device).multi_processor_count
    why_not = refusal(model, num_blocks)
    if why_not is not None:
        return Reason(f"has no {why_not}")
    constants = constants_of(model, num_blocks, _SHARED_MEMORY, slot)
    with torch.cuda.device(model.embed.device):
        try:
            binary = _program.compiled(source(), constants.macros(), "sm_90a")
            program = _program.Program(binary, "decode_step", constants.memory)
            return PersistentStep(model, constants, program, _program.token_map)
        except _program.ProgramError as error:
            return Reason(f"has no kernel for this model: {error}")


def _supports(ctx: KernelContext) -> Support:
    support = platform.triton_on_cuda(ctx)
    if isinstance(support, Reason):
        return support
    if ctx.dtype is not torch.bfloat16:
        return Reason(f"{ctx.dtype} is not bfloat16")
    if torch.cuda.get_device_capability(ctx.device) != (9, 0):
        return Reason("runs on devices of compute capability 9.0 alone")
    if _program.compiler_version() is None:
        return Reason("NVRTC, which compiles it, is not installed")
    return Ok()


def _build(ctx: KernelContext) -> Prepare:
    prepare_chain: Prepare = chain.SOLUTION.build(ctx)

    def prepare(model: DenseModel, max_rows: int) -> DecodeStep | Reason:
        several = prepare_chain(model, max_rows)
        if isinstance(several, Reason):
            return several
        single = persistent(model)
        return several if isinstance(single, Reason) else _Step(single, several)

    return prepare


SOLUTION = Solution("cuda", Band.SPECIALISED, _supports, _build, graph_safe=True)
