# SPDX-License-Identifier: Apache-2.0
"""The op packed_linear: blocks say what the public reference reads in them, and every solution multiplies by just
that.

Activations that are whole steps of a scale lose nothing when they are rounded to bytes, so there results agree closely;
other ones within half a step of each input.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from tokenspeed.kernels.ops.packed_linear import FORMATS, PackedLinear, PackedMatrix, Piece
from tokenspeed.kernels.ops.packed_linear._blocks import numbers
from tokenspeed.kernels.registry import Band, KernelContext, Reason, Solution, bind, solutions_of

OP = "packed_linear"
DTYPES = (torch.float32, torch.bfloat16)
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.0 / 128}
HALVES = {"q4_1": (0, 2), "q5_1": (0, 2), "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2)}
HALVES |= {"q6_k": (208,)}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that an element which a kernel forgets shows."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def drawn(format_name: str, num_outputs: int, num_inputs: int, seed: int = 0) -> Piece:
    """Random blocks whose numbers are about one."""
    rng = np.random.default_rng(seed)
    block_len, num_bytes = FORMATS[format_name]
    blocks = rng.integers(0, 256, (num_outputs, num_inputs // block_len, num_bytes), np.uint8)
    for begin in HALVES.get(format_name, (0,)):
        halves = rng.uniform(-0.1, 0.1, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, begin : begin + 2] = halves.view(np.uint8)
    return Piece(format_name, torch.from_numpy(blocks.reshape(num_outputs, -1)))


def steps(num_rows: int, num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Activations that are whole numbers of steps, up to 127, of a power of two for each 32."""
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(-126, 127, (num_rows, num_inputs // 32, 32), generator=generator)
    codes[:, :, 5] = 127
    sizes = torch.randint(-8, 3, (num_rows, num_inputs // 32, 1), generator=generator)
    return torch.ldexp(codes.float(), sizes).view(num_rows, num_inputs).to(dtype)


def product(x_TD: torch.Tensor, pieces: list[Piece], bias_N: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, and the same of magnitudes."""
    weight_ND = torch.cat([numbers(piece) for piece in pieces]).double()
    bias = torch.zeros(len(weight_ND)).double() if bias_N is None else bias_N.double()
    return x_TD.double() @ weight_ND.t() + bias, x_TD.double().abs() @ weight_ND.t().abs() + bias.abs()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> None:
    """Within rounding of the sum and of the result."""
    error = (actual.double() - expected).abs()
    assert bool((error <= 4e-6 * sizes + RELATIVE[actual.dtype] * expected.abs()).all()), float((error / sizes).max())


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_agrees_with_the_product_of_what_the_blocks_say(
    solution: Solution, format_name: str, dtype: torch.dtype
) -> None:
    prepare = built(solution, dtype)
    for num_rows, num_outputs, num_inputs in ((0, 5, 256), (1, 37, 768), (3, 8, 512), (4, 9, 256), (7, 17, 1024)):
        piece = drawn(format_name, num_outputs, num_inputs, seed=num_rows)
        bias_N = torch.randn(num_outputs).to(dtype) if num_rows % 2 else None
        x_TD = steps(num_rows, num_inputs, dtype)
        matrix = prepare([piece])
        assert (matrix.num_outputs, matrix.num_inputs) == (num_outputs, num_inputs)
        y_TN = matrix(x_TD, bias_N)
        assert y_TN.dtype is dtype
        assert_near(y_TN, *product(x_TD, [piece], bias_N))


@pytest.mark.parametrize("solution", contenders(), ids=lambda each: each.name)
def test_a_weight_takes_no_more_bytes_than_its_blocks(solution: Solution) -> None:
    prepare = built(solution, torch.float32)
    for format_name in FORMATS:
        piece = drawn(format_name, 16, 512)
        assert prepare([piece]).num_bytes == piece.blocks_NB.numel()
        assert prepare([drawn(format_name, 17, 512)]).num_bytes <= piece.blocks_NB.numel() * 3 // 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_pieces_of_several_formats_stand_side_by_side(solution: Solution, dtype: torch.dtype) -> None:
    """More rows than a panel serves, inputs of more than one panel, a remainder of rows, views of wider memory."""
    pieces = [drawn("q4_k", 24, 768), drawn("q6_k", 9, 768), drawn("q8_0", 40, 768), drawn("q4_1", 3, 768)]
    matrix = built(solution, dtype)(pieces)
    for num_rows in (2, 135):
        wide_TD = steps(num_rows, 1024, dtype)
        x_TD = wide_TD[:, 128:896]
        y_TN = matrix(x_TD, None, torch.float32)
        assert y_TN.dtype is torch.float32
        assert_near(y_TN, *product(x_TD, pieces, None))


@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_other_activations_are_off_by_half_a_step_at_most(solution: Solution) -> None:
    piece = drawn("q5_k", 33, 512)
    x_TD = torch.randn(6, 512, generator=torch.Generator().manual_seed(1))
    y_TN = built(solution, torch.float32)([piece])(x_TD, None)
    expected, sizes = product(x_TD, [piece], None)
    half_steps = x_TD.view(6, -1, 32).abs().amax(dim=2, keepdim=True).expand(6, -1, 32).reshape(6, -1) / 254
    bound = half_steps.double() @ numbers(piece).double().abs().t() * 1.001 + 4e-6 * sizes
    assert bool(((y_TN - expected).abs() <= bound).all())
    if solution.band is not Band.REFERENCE:
        assert float((y_TN - expected).std() / expected.std()) < 0.01


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("solution", contenders(), ids=lambda each: each.name)
def test_keeps_its_promise_of_batch_invariance(solution: Solution, format_name: str) -> None:
    if not solution.batch_invariant:
        pytest.skip("promises nothing")
    matrix = built(solution, torch.float32)([drawn(format_name, 21, 1280), drawn("q6_k", 11, 1280)])
    x_TD = torch.randn(139, 1280, generator=torch.Generator().manual_seed(2))
    bias_N = torch.randn(32)
    whole = matrix(x_TD, bias_N)
    assert torch.equal(whole, matrix(x_TD, bias_N))
    for first, last in ((0, 1), (5, 7), (6, 9), (12, 16), (20, 25), (30, 41), (1, 139)):
        assert torch.equal(matrix(x_TD[first:last], bias_N), whole[first:last]), (first, last)


@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_what_is_not_finite_shows_in_its_row_alone(solution: Solution) -> None:
    matrix = built(solution, torch.float32)([drawn("q4_1", 8, 128)])
    for bad in (float("nan"), float("inf"), -float("inf")):
        for num_rows in (2, 9):
            x_TD = torch.randn(num_rows, 128)
            x_TD[1, 77] = bad
            is_finite_T = matrix(x_TD, None).isfinite().all(dim=1)
            assert is_finite_T.tolist() == [row != 1 for row in range(num_rows)]


@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_zeros_give_the_bias(solution: Solution) -> None:
    bias_N = torch.randn(9)
    y_TN = built(solution, torch.float32)([drawn("q6_k", 9, 256)])(torch.zeros(3, 256), bias_N)
    assert torch.equal(y_TN, bias_N.expand(3, 9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("solution", solutions_of(OP), ids=lambda each: each.name)
def test_rows_are_the_numbers_of_the_weight(solution: Solution, format_name: str, dtype: torch.dtype) -> None:
    piece = drawn(format_name, 29, 512)
    matrix: PackedMatrix = built(solution, dtype)([piece])
    row_ids_T = torch.tensor([28, 0, 7, 8, 8])
    rows_TD = matrix.rows(row_ids_T)
    assert rows_TD.dtype is dtype
    torch.testing.assert_close(rows_TD, numbers(piece)[row_ids_T].to(dtype), rtol=RELATIVE[dtype], atol=1e-6)
    assert matrix.rows(row_ids_T[:0]).shape == (0, 512)


def test_is_bound_to_the_compiled_kernel_where_that_is_built() -> None:
    for is_invariant in (False, True):
        ctx = KernelContext("cpu", torch.float32, batch_invariant=is_invariant)
        (solution,) = contenders()
        if isinstance(solution.supports(ctx), Reason):
            pytest.skip("not built")
        assert bind(OP, ctx).solution == "cpu"
