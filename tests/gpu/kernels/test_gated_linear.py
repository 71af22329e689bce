# SPDX-License-Identifier: Apache-2.0
"""gated_linear on a Hopper GPU at the sizes of real models: agreement with float32, every element written, edges of
tiles, and the same bits again, from a graph too."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tokenspeed.kernels.ops.gated_linear import ACTIVATIONS, gluon
from tokenspeed.kernels.ops.gated_linear.cases import TOLERANCE, drawn
from tokenspeed.kernels.registry import KernelContext, Reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = (1, 127, 128, 129, 512, 1000, 2048, 8192)
SIZES = {"one-step": (128, 64), "three-steps": (384, 192), "8b": (12288, 4096)}
PLANS = {"plain": gluon.PLAN, "abreast": dataclasses.replace(gluon.PLAN, skew=0)}


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, so that an element which a kernel forgets shows."""
    empty = torch.empty

    def poisoned(*args: Any, **keywords: Any) -> torch.Tensor:
        out = empty(*args, **keywords)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def built(plan: gluon.Plan = gluon.PLAN, dtype: torch.dtype = torch.bfloat16) -> gluon.Gluon:
    support = gluon.supports(KernelContext("cuda", dtype))
    return pytest.skip(support.text) if isinstance(support, Reason) else gluon.Gluon(plan)


def expected(x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None, activation: str) -> torch.Tensor:
    """In float32, all rows at once."""
    gate_TF, up_TF = torch.nn.functional.linear(
        x_TD.float(), weight_ND.float(), None if bias_N is None else bias_N.float()
    ).chunk(2, dim=1)
    if activation == "silu":
        return torch.nn.functional.silu(gate_TF) * up_TF
    return torch.nn.functional.gelu(gate_TF, approximate="tanh") * up_TF


def assert_close(actual_TF: torch.Tensor, expected_TF: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual_TF.dtype]
    torch.testing.assert_close(actual_TF.float(), expected_TF, rtol=tolerance.relative, atol=tolerance.absolute)
    assert (actual_TF.float() - expected_TF).norm() <= 4e-3 * expected_TF.norm()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_agrees_with_the_reference(num_rows: int, size: tuple[int, int], plan: gluon.Plan) -> None:
    torch.manual_seed(num_rows)
    args = drawn((num_rows, *size), torch.bfloat16, device="cuda")
    assert gluon.suits(*args[:2])
    assert_close(built(plan)(*args, "silu"), expected(*args, "silu"))


@pytest.mark.parametrize(
    ("has_bias", "activation", "dtype"),
    [(False, "silu", torch.float16), (True, "silu", torch.bfloat16), (True, "gelu_tanh", torch.float16)],
)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_activations_biases_and_types(plan: gluon.Plan, has_bias: bool, activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    args = drawn((1000, 1280, 576), dtype, has_bias, device="cuda")
    assert_close(built(plan, dtype)(*args, activation), expected(*args, activation))


def test_reads_rows_that_lie_apart_and_touches_nothing_between() -> None:
    torch.manual_seed(0)
    kernel = built()
    _, wide_ND, _ = drawn((1, 384, 640), torch.bfloat16, device="cuda")
    wide_TD = torch.full((700, 1024), float("nan"), dtype=torch.bfloat16, device="cuda")
    x_TD, weight_ND = wide_TD[::2, 64:256], wide_ND[:, 128:320]
    x_TD.normal_()
    before = wide_TD.clone()
    assert gluon.suits(x_TD, weight_ND)
    assert_close(kernel(x_TD, weight_ND, None, "silu"), expected(x_TD, weight_ND, None, "silu"))
    assert torch.equal(wide_TD.nan_to_num(9.0), before.nan_to_num(9.0))


def test_writes_nothing_past_its_rows() -> None:
    """Into memory that a captured graph's pool has given out: what lies behind the output stays."""
    kernel = built()
    torch.manual_seed(0)
    x_TD, weight_ND, _ = drawn((129, 384, 192), torch.bfloat16, device="cuda")
    room = torch.full((400, 384), 7.0, dtype=torch.bfloat16, device="cuda")
    given = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: room[100:229])
        kernel(x_TD, weight_ND, None, "silu")
    assert torch.empty is given
    assert bool((room[:100] == 7.0).all())
    assert bool((room[229:] == 7.0).all())
    assert_close(room[100:229], expected(x_TD, weight_ND, None, "silu"))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_extremes_are_as_the_reference_has_them(plan: gluon.Plan) -> None:
    kernel = built(plan)
    gates_F = torch.linspace(-300.0, 300.0, 128, device="cuda")
    weight_ND = torch.zeros(256, 64, device="cuda")
    weight_ND[:128, 0], weight_ND[128:, 0] = gates_F, 1.0
    x_TD = torch.eye(5, 64, device="cuda")
    args = (x_TD.bfloat16(), weight_ND.bfloat16(), None)
    for activation in ACTIVATIONS:
        assert_close(kernel(*args, activation), expected(*args, activation))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gives_the_same_bits_again_and_from_a_graph(plan: gluon.Plan) -> None:
    kernel = built(plan)
    torch.manual_seed(0)
    x_TD, weight_ND, _ = drawn((2048, 12288, 4096), torch.bfloat16, device="cuda")
    first_TF = kernel(x_TD, weight_ND, None, "silu")
    for _ in range(5):
        assert torch.equal(kernel(x_TD, weight_ND, None, "silu"), first_TF)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TF = kernel(x_TD, weight_ND, None, "silu")
    other_TD = torch.randn_like(x_TD)
    others_TF = kernel(other_TD, weight_ND, None, "silu")
    kept_TD = x_TD.clone()
    for source_TD, wanted_TF in ((other_TD, others_TF), (kept_TD, first_TF), (other_TD, others_TF)):
        x_TD.copy_(source_TD)
        out_TF.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out_TF, wanted_TF)


def test_outputs_past_two_to_the_31_numbers() -> None:
    kernel = built()
    torch.manual_seed(0)
    x_TD, weight_ND, _ = drawn((180_000, 12288, 64), torch.bfloat16, device="cuda")
    out_TF = kernel(x_TD, weight_ND, None, "silu")
    assert out_TF.numel() > 2**31
    for rows in (slice(0, 300), slice(90_000, 90_300), slice(179_700, 180_000)):
        assert_close(out_TF[rows], expected(x_TD[rows], weight_ND, None, "silu"))
