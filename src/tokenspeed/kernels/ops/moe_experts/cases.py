# SPDX-License-Identifier: Apache-2.0
"""Inputs of moe_experts: no, one, a few and many tokens, experts with no rows, with one and with several tiles of
them, experts of other ranks, biases, every gate, sizes that no tile has, strided rows; matrices that stay packed, in
one format or in a format for gate and another for up.

What lies between both products of packed matrices is rounded to bytes, so results may be off by more than sums are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.kernels.conformance import Case, Row, Tolerance
from tokenspeed.kernels.ops.moe_experts import ExpertStack, Gate, Prepare
from tokenspeed.kernels.ops.moe_experts.reference import prepare as reference
from tokenspeed.kernels.registry import Kernel, KernelContext, bind

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 1e-2)}
_PACKED = {torch.float32: Tolerance(0.0, 0.03), torch.bfloat16: Tolerance(1.0 / 128, 0.03)}
_INPUT_SIZE = 1 / 4

SILU, GELU, CLAMPED = Gate("silu"), Gate("gelu_tanh"), Gate("clamped_swiglu", 1.702, 1.5)

_FORMATS = {"q4_0": (32, 18, (0,), 4.6), "q8_0": (32, 34, (0,), 74.0), "q4_k": (256, 144, (0, 2), 320.0)}
_FORMATS |= {"q6_k": (256, 210, (208,), 1370.0)}
"""Of some that packed_linear has: inputs and bytes of a block, where it has float16 numbers, and the root mean square
of what these are multiplied by in random blocks."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix for packed_linear, as its Piece."""

    format: str
    blocks_NB: torch.Tensor

    @property
    def num_outputs(self) -> int:
        return self.blocks_NB.shape[0]

    @property
    def num_inputs(self) -> int:
        num_inputs, num_bytes, *_ = _FORMATS[self.format]
        return self.blocks_NB.shape[1] // num_bytes * num_inputs


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a stack: numbers (E, N, D), or the pieces of each expert's matrix; and biases (E, N)."""

    weight_END: torch.Tensor
    bias_EN: torch.Tensor | None = None
    pieces_E: tuple[tuple[Blocks, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """What is prepared."""

    gate_up: Weights
    down: Weights
    gate: Gate
    first_expert: int = 0


def as_function(prepare: Prepare) -> Kernel:
    """The op as a function of tensors. The reference multiplies by the numbers that blocks stand for."""
    overrides = {"packed_linear": "reference"} if prepare is reference else {}

    def stack(weights: Weights) -> ExpertStack:
        if not weights.pieces_E:
            return ExpertStack(weights.weight_END, weights.bias_EN)
        pack = bind("packed_linear", KernelContext("cpu", weights.weight_END.dtype, overrides)).call
        return ExpertStack(weights.weight_END, weights.bias_EN, [pack(pieces) for pieces in weights.pieces_E])

    def moe_experts(
        x_TD: torch.Tensor, experts_TC: torch.Tensor, weights_TC: torch.Tensor, layer: Layer
    ) -> torch.Tensor:
        run = prepare(stack(layer.gate_up), stack(layer.down), layer.gate, layer.first_expert)
        assert run is not None, "refused"
        return run(x_TD, experts_TC, weights_TC)

    return moe_experts


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    made = functools.partial(torch.randn, generator=generator)
    gates = (SILU, GELU, CLAMPED)
    # (T, E, C, D, F)
    shapes = ((0, 3, 2, 8, 8), (1, 4, 2, 64, 40), (3, 1, 1, 13, 7), (6, 40, 6, 33, 130), (40, 5, 3, 20, 24))
    for number, (num_tokens, num_experts, num_chosen, hidden_size, ff_size) in enumerate(shapes):
        sizes = (num_experts, hidden_size, ff_size)
        weights = numbers(sizes, dtype, has_bias=number % 2 == 1, generator=generator)
        x_TD = made(num_tokens, hidden_size).to(dtype)
        routed = routing(num_tokens, num_experts, num_chosen, generator)
        args = (x_TD, *routed, Layer(*weights, gates[number % 3]))
        yield _in_parts(Case(f"{num_tokens}x{num_experts}x{hidden_size}x{ff_size}", args))
    weights = numbers((4, 24, 16), dtype, has_bias=True, generator=generator)
    x_TD = made(18, 60).to(dtype)[::2, 7:31]
    elsewhere = routing(9, 12, 5, generator)
    yield _in_parts(Case("some-of-the-experts", (x_TD, *elsewhere, Layer(*weights, CLAMPED, 4))))
    yield Case("none-of-the-experts", (x_TD, elsewhere[0] % 4, elsewhere[1], Layer(*weights, SILU, 4)))
    # All rows in one expert: more than a panel, and more than a block of a product of numbers.
    alone = (torch.full((150, 1), 2), torch.rand(150, 1, generator=generator))
    yield _in_parts(Case("one-expert", (made(150, 24).to(dtype), *alone, Layer(*weights, SILU))))
    yield from _packed_cases(dtype, generator)


def _packed_cases(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Case]:
    def made(num_tokens: int, hidden_size: int) -> torch.Tensor:
        return (torch.randn(num_tokens, hidden_size, generator=generator) * _INPUT_SIZE).to(dtype)

    for name, up_name in zip(_FORMATS, ("q4_0", "q4_0", "q6_k", "q6_k"), strict=True):
        weights = packed((5, 256, 256), (name, up_name), name, dtype)
        for num_tokens in (1, 3, 24):
            x_TD = made(num_tokens, 256)
            args = (x_TD, *routing(num_tokens, 5, 2, generator), Layer(*weights, SILU))
            yield _in_parts(Case(f"{name}-{num_tokens}", args, tolerance=_PACKED[dtype]))
    weights = packed((3, 288, 96), ("q8_0", "q4_0"), "q4_0", dtype, generator)
    x_TD = made(146, 320)[:, 32:]
    args = (x_TD, *routing(146, 6, 4, generator), Layer(*weights, GELU, 2))
    yield _in_parts(Case("packed-biases-strided", args, tolerance=_PACKED[dtype]))
    weights = (numbers((3, 64, 64), dtype, generator=generator)[0], packed((3, 64, 64), ("q8_0",), "q8_0", dtype)[1])
    args = (made(7, 64), *routing(7, 3, 2, generator), Layer(*weights, SILU))
    yield Case("packed-down-only", args, tolerance=Tolerance(1.0 / 128, 0.002))  # of a twentieth of the size


def numbers(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Weights, Weights]:
    """gate_up and down of (E, D, F), such that every product is of size 1."""
    num_experts, hidden_size, ff_size = sizes

    def made(num_outputs: int, num_inputs: int) -> Weights:
        weight_END = torch.randn(num_experts, num_outputs, num_inputs, generator=generator) * num_inputs**-0.5
        bias_EN = torch.randn(num_experts, num_outputs, generator=generator).to(dtype) if has_bias else None
        return Weights(weight_END.to(dtype), bias_EN)

    return made(2 * ff_size, hidden_size), made(hidden_size, ff_size)


def packed(
    sizes: tuple[int, int, int],
    gate_up: tuple[str, ...],
    down: str,
    dtype: torch.dtype,
    generator: torch.Generator | None = None,
) -> tuple[Weights, Weights]:
    """Random blocks, gate and up in a format each or in one together; with biases where there is a generator."""
    num_experts, hidden_size, ff_size = sizes

    def made(formats: tuple[str, ...], num_outputs: int, num_inputs: int) -> Weights:
        rows = num_outputs // len(formats)
        pieces_E = tuple(
            tuple(_drawn(name, (rows, num_inputs), 9 * expert + place) for place, name in enumerate(formats))
            for expert in range(num_experts)
        )
        shape = (num_experts, num_outputs)
        bias_EN = None if generator is None else torch.randn(shape, generator=generator).to(dtype)
        return Weights(torch.empty(1, dtype=dtype).expand(*shape, num_inputs), bias_EN, pieces_E)

    return made(gate_up, 2 * ff_size, hidden_size), made((down,), hidden_size, ff_size)


def _drawn(name: str, shape: tuple[int, int], seed: int) -> Blocks:
    """Random blocks whose numbers have a root mean square of an eighth."""
    rng = np.random.default_rng(seed)
    num_inputs, num_bytes, halves, size = _FORMATS[name]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // num_inputs, num_bytes), np.uint8)
    for begin in halves:
        values = rng.uniform(-(3**0.5) / 8 / size, 3**0.5 / 8 / size, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, begin : begin + 2] = values.view(np.uint8)
    return Blocks(name, torch.from_numpy(blocks.reshape(shape[0], -1)))


def routing(
    num_tokens: int, num_experts: int, num_chosen: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts, some of them of many tokens and some of none, and weights that sum to one."""
    logits_TE = torch.randn(num_tokens, num_experts, generator=generator) + torch.linspace(2.0, 0.0, num_experts)
    weights_TC, experts_TC = logits_TE.softmax(dim=1).topk(num_chosen, dim=1)
    return experts_TC, weights_TC / weights_TC.sum(dim=1, keepdim=True)


def _in_parts(case: Case) -> Case:
    """The case with some of its tokens alone: one, and runs."""
    *by_token, layer = case.args
    num_tokens = min(len(each) for each in by_token if isinstance(each, torch.Tensor))
    parts = []
    for first, last in ((0, 1), (2, 3), (1, 6), (3, num_tokens)):
        if first < last <= num_tokens:
            own = [each[first:last] for each in by_token if isinstance(each, torch.Tensor)]
            parts.append(Row((*own, layer), {}, functools.partial(_part, first, last)))
    return Case(case.name, case.args, rows=tuple(parts), tolerance=case.tolerance)


def _part(first: int, last: int, out_TD: torch.Tensor) -> torch.Tensor:
    return out_TD[first:last]
