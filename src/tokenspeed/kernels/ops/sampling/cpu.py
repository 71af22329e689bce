# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernel (csrc/cpu): a few looks at the logits, no sort. Knows how a call is described there."""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.kernels.ops.sampling import Draws, Edits, Masks, Penalties, Sampled, SampleFn, SamplingInputs
from tokenspeed.kernels.platform import compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, KernelContext, Solution

_FIELDS = (
    *("logits", "token_ids", "is_faulty", "num_rows", "size", "stride"),
    *("temperatures", "seeds", "positions", "top_ks", "top_ps", "min_ps"),
    *("edited", "penalty_rows", "output_counts", "prompt_masks", "presences", "frequencies", "repetitions"),
    *("num_penalties", "counts_stride", "prompt_stride"),
    *("edit_rows", "edit_ids", "edit_values", "num_edits"),
    *("mask_rows", "mask_bits", "num_masks", "mask_stride"),
)
"""SamplingArgs of csrc/cpu/kernels.h, in order: addresses and numbers of eight bytes."""


class _Sampling:
    """Most calls of steps that decode are of the tensors of the call before, whose places are known."""

    def __init__(self) -> None:
        module = require_cpu_module()
        assert module.sampling_size() == 8 * len(_FIELDS), module.sampling_size()
        self._kernel = module.sampling
        self._last: _Call | None = None

    def __call__(self, logits_SV: torch.Tensor, inputs: SamplingInputs, into: Sampled | None = None) -> Sampled:
        call = self._last
        if call is None or call.logits_SV is not logits_SV or call.inputs is not inputs or call.sampled is not into:
            call = _described(logits_SV, inputs, into or Sampled.empty(len(logits_SV), logits_SV.device))
            self._last = call if into is not None and not call.has_copies else None
        self._kernel(call.address)
        return call.sampled


class _Call:
    """Where the tensors of a call lie. has_copies: some were made for this one call."""

    def __init__(self, logits_SV: torch.Tensor, inputs: SamplingInputs, sampled: Sampled) -> None:
        self.logits_SV, self.inputs, self.sampled = logits_SV, inputs, sampled
        self.fields = np.zeros(len(_FIELDS), dtype=np.int64)
        self.address = self.fields.ctypes.data
        self.has_copies = False
        self._tensors: list[torch.Tensor] = []

    def number(self, **numbers: int) -> None:
        for name, number in numbers.items():
            self.fields[_FIELDS.index(name)] = number

    def columns(self, dtype: torch.dtype, length: int, **columns: torch.Tensor) -> None:
        """A number a row, side by side."""
        for name, column in columns.items():
            assert (column.dtype, tuple(column.shape)) == (dtype, (length,)), (name, column.dtype, column.shape)
            self.at(name, column, is_placed=column.is_contiguous())

    def table(self, name: str, stride: str, dtype: torch.dtype, table: torch.Tensor) -> None:
        """Rows whose numbers lie side by side."""
        assert table.dtype is dtype, (name, table.dtype)
        placed = self.at(name, table, is_placed=table.stride(1) == 1)
        self.number(**{stride: placed.stride(0)})

    def at(self, name: str, tensor: torch.Tensor, *, is_placed: bool) -> torch.Tensor:
        """What the kernel reads: the tensor, or where its numbers are not in their places a copy."""
        assert tensor.device.type == "cpu", (name, tensor.device)
        if not is_placed:
            tensor, self.has_copies = tensor.contiguous(), True
        self._tensors.append(tensor)
        self.fields[_FIELDS.index(name)] = tensor.data_ptr()
        return tensor

    def working_copy(self, num_rows: int, size: int) -> None:
        """Memory for the logits of rows that are edited."""
        edited_SV = torch.empty(num_rows, size, dtype=torch.float32)
        self.at("edited", edited_SV, is_placed=True)
        self.has_copies = True


def _described(logits_SV: torch.Tensor, inputs: SamplingInputs, sampled: Sampled) -> _Call:
    call, (num_rows, size) = _Call(logits_SV, inputs, sampled), logits_SV.shape
    assert size < 1 << 31, size
    outputs = sampled.token_ids_S, sampled.is_faulty_S
    assert all(output.is_contiguous() for output in outputs), [output.stride() for output in outputs]
    call.number(num_rows=num_rows, size=size)
    call.table("logits", "stride", torch.float32, logits_SV)
    call.columns(torch.int64, num_rows, token_ids=sampled.token_ids_S)
    call.columns(torch.bool, num_rows, is_faulty=sampled.is_faulty_S)
    if inputs.draws is not None:
        _describe_draws(call, inputs.draws, num_rows)
    if inputs.penalties is not None or inputs.edits is not None or inputs.masks is not None:
        call.working_copy(num_rows, size)
    if inputs.penalties is not None:
        _describe_penalties(call, inputs.penalties)
    if inputs.edits is not None:
        _describe_edits(call, inputs.edits)
    if inputs.masks is not None:
        _describe_masks(call, inputs.masks)
    return call


def _describe_draws(call: _Call, draws: Draws, num_rows: int) -> None:
    call.columns(torch.float32, num_rows, temperatures=draws.temperature_S)
    call.columns(torch.int64, num_rows, seeds=draws.seed_S, positions=draws.position_S)
    if draws.filters is not None:
        filters = draws.filters
        call.columns(torch.int64, num_rows, top_ks=filters.top_k_S)
        call.columns(torch.float32, num_rows, top_ps=filters.top_p_S, min_ps=filters.min_p_S)


def _describe_penalties(call: _Call, penalties: Penalties) -> None:
    num = len(penalties.rows_P)
    call.number(num_penalties=num)
    call.columns(torch.int64, num, penalty_rows=penalties.rows_P)
    call.table("output_counts", "counts_stride", torch.int32, penalties.output_counts_PV)
    if penalties.prompt_mask_PV is not None:
        call.table("prompt_masks", "prompt_stride", torch.bool, penalties.prompt_mask_PV)
    factors = {"presences": penalties.presence_P, "frequencies": penalties.frequency_P}
    call.columns(torch.float32, num, **factors, repetitions=penalties.repetition_P)


def _describe_edits(call: _Call, edits: Edits) -> None:
    num = len(edits.rows_N)
    call.number(num_edits=num)
    call.columns(torch.int64, num, edit_rows=edits.rows_N, edit_ids=edits.token_ids_N)
    call.columns(torch.float32, num, edit_values=edits.values_N)


def _describe_masks(call: _Call, masks: Masks) -> None:
    num = len(masks.rows_G)
    call.number(num_masks=num)
    call.columns(torch.int64, num, mask_rows=masks.rows_G)
    call.table("mask_bits", "mask_stride", torch.int32, masks.bits_GW)


def _build(_ctx: KernelContext) -> SampleFn:
    return _Sampling()


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, _build, deterministic=True, batch_invariant=True)
