# SPDX-License-Identifier: Apache-2.0
"""The op moe_experts: to the bit what the products and the gate are by themselves, and what the contract promises
beyond the cases of the conformance suite."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tokenspeed.kernels.ops.moe_experts import ExpertStack, Gate, MoeExperts
from tokenspeed.kernels.ops.moe_experts.cases import CLAMPED, GELU, SILU, Weights, numbers, packed, routing
from tokenspeed.kernels.ops.packed_linear import PackedMatrix
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok, bind
from tokenspeed.layers.activation import ClampedSwiglu

OP = "moe_experts"
Stacks = tuple[ExpertStack, ExpertStack]

IS_BUILT = isinstance(compiled_cpu(KernelContext("cpu", torch.float32)), Ok)

pytestmark = [
    pytest.mark.usefixtures("cpu_isa", "poisoned_memory"),
    pytest.mark.skipif(not IS_BUILT, reason="the compiled kernels are not built"),
]


def context(dtype: torch.dtype, **overrides: str) -> KernelContext:
    return KernelContext("cpu", dtype, overrides)


def stacks_of(weights: tuple[Weights, Weights], dtype: torch.dtype, solution: str = "cpu") -> Stacks:
    pack = bind("packed_linear", context(dtype, packed_linear=solution)).call

    def stack(each: Weights) -> ExpertStack:
        matrices: Sequence[PackedMatrix] | None = [pack(pieces) for pieces in each.pieces_E] or None
        return ExpertStack(each.weight_END, each.bias_EN, matrices)

    return stack(weights[0]), stack(weights[1])


def prepared(stacks: Stacks, gate: Gate, dtype: torch.dtype, first_expert: int = 0) -> MoeExperts:
    run: MoeExperts | None = bind(OP, context(dtype)).call(*stacks, gate, first_expert)
    assert run is not None
    return run


def drawn(form: str, dtype: torch.dtype, generator: torch.Generator) -> tuple[Weights, Weights]:
    """Of 4 experts, 256 hidden and 96 or 256 between."""
    if form == "numbers":
        return numbers((4, 256, 96), dtype, has_bias=True, generator=generator)
    ff_size = 256 if form.endswith("_k") else 96
    return packed((4, 256, ff_size), (form, "q8_0"), form, dtype, generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("gate", [SILU, GELU, CLAMPED], ids=lambda gate: gate.kind)
@pytest.mark.parametrize("form", ["numbers", "q4_0", "q8_0", "q4_k", "q6_k"])
def test_an_expert_is_what_its_products_and_its_gate_are(form: str, gate: Gate, dtype: torch.dtype) -> None:
    """A token has one expert here, whose weight is one, so nothing is added up."""
    generator = torch.Generator().manual_seed(5)
    stacks = stacks_of(drawn(form, dtype, generator), dtype)
    x_TD = torch.randn(23, 256, generator=generator).to(dtype)
    experts_T = torch.tensor([0] * 3 + [3] * 17 + [1] * 3)[torch.randperm(23, generator=generator)]
    actual_TD = prepared(stacks, gate, dtype)(x_TD, experts_T[:, None], torch.ones(23, 1))
    for expert in (0, 1, 3):
        rows_T = experts_T == expert
        expected_TD = one_by_one(stacks, gate, dtype, expert, x_TD[rows_T])
        assert torch.equal(actual_TD[rows_T], expected_TD.to(dtype)), expert


def one_by_one(stacks: Stacks, gate: Gate, dtype: torch.dtype, expert: int, x_TD: torch.Tensor) -> torch.Tensor:
    """An expert by the ops that compute its parts, in float32."""
    linear = bind("linear", context(dtype)).call

    def product(stack: ExpertStack, x_MD: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        bias_N = None if stack.bias_EN is None else stack.bias_EN[expert]
        if stack.packed is not None:
            return stack.packed[expert](x_MD, bias_N, out_dtype)
        return linear(x_MD, stack.weight_END[expert], bias_N, out_dtype)  # type: ignore[no-any-return]

    both_TF = product(stacks[0], x_TD, dtype)
    if gate.kind == "clamped_swiglu":
        hidden_TF = clamped(stacks[0], gate, expert, x_TD, ClampedSwiglu(gate.alpha, gate.limit)(both_TF))
    else:
        hidden_TF = bind(f"{gate.kind}_mul", context(dtype)).call(both_TF)
    return product(stacks[1], hidden_TF, torch.float32)


def clamped(gate_up: ExpertStack, gate: Gate, expert: int, x_TD: torch.Tensor, torch_TF: torch.Tensor) -> torch.Tensor:
    """What the kernel makes of gate and up: no op gives that to the bit, so it is held to torch's, and is what an
    expert says that passes it on."""
    num_tokens, ff_size = torch_TF.shape
    num_experts, _, hidden_size = gate_up.weight_END.shape
    passes_END = torch.eye(hidden_size, ff_size, dtype=x_TD.dtype).repeat(num_experts, 1, 1)
    run = prepared((gate_up, ExpertStack(passes_END)), gate, x_TD.dtype)
    own_TF = run(x_TD, torch.full((num_tokens, 1), expert), torch.ones(num_tokens, 1))[:, :ff_size].contiguous()
    torch.testing.assert_close(own_TF, torch_TF, rtol=1.0 / 128 if x_TD.dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    return own_TF


@pytest.mark.parametrize("form", ["numbers", "q4_k"])
@pytest.mark.parametrize("gate", [SILU, CLAMPED], ids=lambda gate: gate.kind)
def test_what_is_not_finite_shows_in_its_token_alone(gate: Gate, form: str) -> None:
    generator = torch.Generator().manual_seed(6)
    run = prepared(stacks_of(drawn(form, torch.float32, generator), torch.float32), gate, torch.float32)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for num_tokens in (2, 30):
            x_TD = torch.randn(num_tokens, 256, generator=generator)
            x_TD[1, 77] = bad
            out_TD = run(x_TD, *routing(num_tokens, 4, 2, generator))
            shown = [not bool(row.isfinite().all()) for row in out_TD]
            assert shown == [token == 1 for token in range(num_tokens)]


def test_more_tokens_than_are_computed_at_a_time() -> None:
    """Nearly 200 MiB lie between the products, so there are two parts."""
    generator = torch.Generator().manual_seed(7)
    stacks = stacks_of(numbers((2, 8, 2048), torch.float32, generator=generator), torch.float32)
    run = prepared(stacks, SILU, torch.float32)
    x_TD, (experts_TC, weights_TC) = torch.randn(6000, 8, generator=generator), routing(6000, 2, 2, generator)
    out_TD = run(x_TD, experts_TC, weights_TC)
    for first in (0, 2990, 5990):
        part = slice(first, first + 20)
        assert torch.equal(run(x_TD[part], experts_TC[part], weights_TC[part])[:10], out_TD[part][:10])


def test_weights_that_are_packed_in_another_way_are_refused() -> None:
    generator = torch.Generator().manual_seed(8)
    stacks = stacks_of(drawn("q8_0", torch.float32, generator), torch.float32, "reference")
    assert bind(OP, context(torch.float32)).call(*stacks, SILU) is None


def test_is_bound_to_the_compiled_kernel_where_that_is_built() -> None:
    for is_invariant in (False, True):
        assert bind(OP, KernelContext("cpu", torch.float32, batch_invariant=is_invariant)).solution == "cpu"
