# SPDX-License-Identifier: Apache-2.0
"""The op packed_linear: blocks say what the public reference reads in them, and what the contract promises beyond the
cases of the conformance suite. Activations that are no whole steps of a scale are off by half a step at most."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from tokenspeed.kernels.ops.packed_linear import FORMATS, PackedLinear
from tokenspeed.kernels.ops.packed_linear._blocks import numbers
from tokenspeed.kernels.ops.packed_linear.cases import drawn
from tokenspeed.kernels.registry import Band, KernelContext, Reason, Solution, bind, solutions_of

OP = "packed_linear"
pytestmark = pytest.mark.usefixtures("poisoned_memory")
each_isa = pytest.mark.usefixtures("cpu_isa")


def contenders() -> list[Solution]:
    return [each for each in solutions_of(OP) if each.band is not Band.REFERENCE]


def built(solution: Solution, dtype: torch.dtype) -> PackedLinear:
    ctx = KernelContext("cpu", dtype)
    support = solution.supports(ctx)
    if isinstance(support, Reason):
        pytest.skip(support.text)
    kernel: PackedLinear = solution.build(ctx)
    return kernel


@pytest.mark.parametrize("format_name", FORMATS)
def test_blocks_are_read_as_the_public_reference_reads_them(format_name: str) -> None:
    piece = drawn(format_name, 7, 512)
    expected = quants.dequantize(piece.blocks_NB.numpy(), GGMLQuantizationType[format_name.upper()])
    np.testing.assert_allclose(numbers(piece).numpy(), expected.reshape(7, 512), rtol=1e-6, atol=1e-6)


@each_isa
@pytest.mark.parametrize("solution", contenders(), ids=lambda each: each.name)
def test_a_weight_takes_no_more_bytes_than_its_blocks(solution: Solution) -> None:
    prepare = built(solution, torch.float32)
    for format_name in FORMATS:
        piece = drawn(format_name, 16, 512)
        assert prepare([piece]).num_bytes == piece.blocks_NB.numel()
        assert prepare([drawn(format_name, 17, 512)]).num_bytes <= piece.blocks_NB.numel() * 3 // 2


@each_isa
@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_other_activations_are_off_by_half_a_step_at_most(solution: Solution) -> None:
    piece = drawn("q5_k", 33, 512)
    x_TD = torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    y_TN = built(solution, torch.float32)([piece])(x_TD, None)
    weight_ND = numbers(piece).double()
    expected = x_TD.double() @ weight_ND.t()
    half_steps = x_TD.view(6, -1, 32).abs().amax(dim=2, keepdim=True).expand(6, -1, 32).reshape(6, -1) / 254
    bound = (half_steps.double() * 1.001 + 4e-6 * x_TD.double().abs()) @ weight_ND.abs().t()
    assert bool(((y_TN - expected).abs() <= bound).all())
    if solution.band is not Band.REFERENCE:
        assert float((y_TN - expected).std() / expected.std()) < 0.01


@each_isa
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("place", [0, 77, 95, 511])
@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_an_input_of_many_times_the_others_takes_no_steps_from_them(
    solution: Solution, place: int, format_name: str
) -> None:
    """Half a step of what the block has beside it, in few rows and in many."""
    piece = drawn(format_name, 33, 512)
    for num_rows, size in ((2, 1000.0), (7, -400.0)):
        x_TD = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(1))
        others_TD = x_TD.clone()
        others_TD[:, place] = 0.0
        x_TD[:, place] = size
        y_TN = built(solution, torch.float32)([piece])(x_TD, None)
        weight_ND = numbers(piece).double()
        expected = x_TD.double() @ weight_ND.t()
        blocks = others_TD.view(num_rows, -1, 32).abs().amax(dim=2, keepdim=True)
        half_steps = blocks.expand(-1, -1, 32).reshape(num_rows, -1) / 254
        bound = (half_steps.double() * 1.001 + 4e-6 * x_TD.double().abs()) @ weight_ND.abs().t()
        assert bool(((y_TN - expected).abs() <= bound).all())


@each_isa
@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_what_is_not_finite_shows_in_its_row_alone(solution: Solution) -> None:
    matrix = built(solution, torch.float32)([drawn("q4_1", 8, 128)])
    for bad in (float("nan"), float("inf"), -float("inf")):
        for num_rows in (2, 9):
            x_TD = torch.randn(num_rows, 128)
            x_TD[1, 77] = bad
            is_finite_T = matrix(x_TD, None).isfinite().all(dim=1)
            assert is_finite_T.tolist() == [row != 1 for row in range(num_rows)]


def test_is_bound_to_the_compiled_kernel_where_that_is_built() -> None:
    for is_invariant in (False, True):
        ctx = KernelContext("cpu", torch.float32, batch_invariant=is_invariant)
        (solution,) = contenders()
        if isinstance(solution.supports(ctx), Reason):
            pytest.skip("not built")
        assert bind(OP, ctx).solution == "cpu"
