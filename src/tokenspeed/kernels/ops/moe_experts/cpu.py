# SPDX-License-Identifier: Apache-2.0
"""One call of the compiled CPU module (csrc/cpu/experts_body.h): rows sorted by expert, and a loop of all experts for
each of both products.

Knows how a layer is described there. Does not know what is computed.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenspeed.kernels.ops.moe_experts import GATES, ExpertStack, Gate, MoeExperts, Prepare
from tokenspeed.kernels.platform import CPU_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, KernelContext, Solution

_MATRICES = [
    ("weight", np.uint64),
    ("pieces", np.uint64),
    ("bias", np.uint64),
    ("num_pieces", np.int64),
    ("num_outputs", np.int64),
    ("num_inputs", np.int64),
]
_LAYER = np.dtype(
    [
        ("gate_up", _MATRICES),
        ("down", _MATRICES),
        ("first_expert", np.int64),
        ("num_experts", np.int64),
        ("gate", np.int64),
        ("alpha", np.float32),
        ("limit", np.float32),
        ("dtype", np.int64),
    ]
)
"""ExpertMatrices and ExpertLayer of csrc/cpu/kernels.h."""


class _Experts:
    def __init__(self, gate_up: ExpertStack, down: ExpertStack, gate: Gate, first_expert: int, dtype: torch.dtype):
        module = require_cpu_module()
        assert module.experts_size() == _LAYER.itemsize, module.experts_size()
        num_experts, hidden_size, ff_size = down.weight_END.shape
        assert gate_up.weight_END.shape == (num_experts, 2 * ff_size, hidden_size), gate_up.weight_END.shape
        self._kernel, self._dtype, self._hidden_size = module.experts, dtype, hidden_size
        self._stacks = gate_up, down  # which the description points into
        self._tables = [_pieces(stack) for stack in self._stacks]
        matrices = [_matrices(stack, table, dtype) for stack, table in zip(self._stacks, self._tables, strict=True)]
        kind = GATES.index(gate.kind)
        described = (*matrices, first_expert, num_experts, kind, gate.alpha, gate.limit, CPU_DTYPES[dtype])
        self._described = np.array(described, dtype=_LAYER)

    def __call__(self, x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
        num_tokens, num_chosen = experts_TC.shape
        assert x_TD.shape == (num_tokens, self._hidden_size), (x_TD.shape, experts_TC.shape)
        assert x_TD.dtype is self._dtype, x_TD.dtype
        assert x_TD.stride(1) == 1, x_TD.stride()
        assert (experts_TC.dtype, weights_TC.dtype) == (torch.int64, torch.float32), (experts_TC, weights_TC)
        assert weights_TC.shape == experts_TC.shape, (weights_TC.shape, experts_TC.shape)
        experts_TC, weights_TC = experts_TC.contiguous(), weights_TC.contiguous()
        out_TD = torch.empty((num_tokens, self._hidden_size), dtype=self._dtype)
        self._kernel(
            self._described.ctypes.data,
            x_TD.data_ptr(),
            experts_TC.data_ptr(),
            weights_TC.data_ptr(),
            out_TD.data_ptr(),
            num_tokens,
            num_chosen,
            x_TD.stride(0),
        )
        return out_TD


def _pieces(stack: ExpertStack) -> torch.Tensor | None:
    """(E, P, 3), as PackedMatrix has them of each."""
    if stack.packed is None:
        return None
    return torch.stack([matrix.cpu_pieces_P3 for matrix in stack.packed if matrix.cpu_pieces_P3 is not None])


def _matrices(stack: ExpertStack, pieces_EP3: torch.Tensor | None, dtype: torch.dtype) -> tuple[int, ...]:
    bias_EN, (_, num_outputs, num_inputs) = stack.bias_EN, stack.weight_END.shape
    assert all(each.dtype is dtype for each in (stack.weight_END, bias_EN) if each is not None), stack
    assert bias_EN is None or bias_EN.is_contiguous(), bias_EN
    bias = 0 if bias_EN is None else bias_EN.data_ptr()
    if pieces_EP3 is not None:
        return 0, pieces_EP3.data_ptr(), bias, pieces_EP3.shape[1], num_outputs, num_inputs
    assert stack.weight_END.is_contiguous(), stack.weight_END.stride()
    return stack.weight_END.data_ptr(), 0, bias, 0, num_outputs, num_inputs


def _is_known(stack: ExpertStack) -> bool:
    """Whether matrices that are packed lie as the compiled kernels have them, all in as many pieces."""
    tables = [matrix.cpu_pieces_P3 for matrix in stack.packed or ()]
    sizes = {None if table is None else len(table) for table in tables}
    return None not in sizes and len(sizes) <= 1


def build(ctx: KernelContext) -> Prepare:
    def prepare(gate_up: ExpertStack, down: ExpertStack, gate: Gate, first_expert: int = 0) -> MoeExperts | None:
        if not (_is_known(gate_up) and _is_known(down)):
            return None
        return _Experts(gate_up, down, gate, first_expert, ctx.dtype)

    return prepare


SOLUTION = Solution("cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True)
