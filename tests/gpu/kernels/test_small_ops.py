# SPDX-License-Identifier: Apache-2.0
"""Small ops on a CUDA device at the sizes of a real model: they agree with the reference, a captured graph computes
what a call does, and addresses reach past 2 ** 31 numbers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Tolerance
from tokenspeed.kernels.registry import Band, KernelContext, Solution, bind, solutions_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OPS = (
    "gelu_tanh_mul",
    "kv_write",
    "linear",
    "page_table_update",
    "rms_norm",
    "rotary",
    "rotary_kv_write",
    "silu_mul",
)
BF16 = KernelContext("cuda", torch.bfloat16)


def measured() -> Iterator[Any]:
    """(op, solution, case) of CUDA solutions, but for prefill."""
    for op in OPS:
        cases: list[BenchCase] = list(
            importlib.import_module(f"tokenspeed.kernels.ops.{op}.cases").bench_cases(torch.bfloat16, "cuda")
        )
        for solution in solutions_of(op):
            if solution.band is Band.REFERENCE or solution.name == "cpu":
                continue
            for case in cases:
                if "8192" not in case.name:
                    yield pytest.param(op, solution, case, id=f"{op}-{solution.name}-{case.name}")


def copied(value: Any) -> Any:
    """A copy of all that a view lies in."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()
    return value.new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())


def called(kernel: Any, case: Case) -> list[torch.Tensor]:
    """What a call gives and changes, on copies of its arguments."""
    args = [copied(value) for value in case.args]
    return outcome(case, args, kernel(*args, **case.keywords))


def outcome(case: Case, args: list[Any], result: Any) -> list[torch.Tensor]:
    changed = [args[index] for index in case.mutated if isinstance(args[index], torch.Tensor)]
    returned = result if isinstance(result, tuple) else (result,)
    return [*(tensor.clone() for tensor in (*returned, *changed) if tensor is not None)]


def replayed(kernel: Any, case: Case) -> list[torch.Tensor]:
    """The same of the second replay of a graph whose arguments are written anew before each."""
    args = [copied(value) for value in case.args]
    graph = torch.cuda.CUDAGraph()
    kernel(*args, **case.keywords)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = kernel(*args, **case.keywords)
    for _ in range(2):
        for ours, given in zip(args, case.args, strict=True):
            if isinstance(ours, torch.Tensor):
                ours.untyped_storage().copy_(given.untyped_storage())  # type: ignore[attr-defined]
        graph.replay()
    torch.cuda.synchronize()
    return outcome(case, args, result)


@pytest.mark.parametrize(("op", "solution", "bench_case"), measured() if torch.cuda.is_available() else [])
def test_real_sizes_agree_with_the_reference_and_with_a_graph(
    op: str, solution: Solution, bench_case: BenchCase
) -> None:
    torch.manual_seed(0)
    case, kernel = bench_case.make(), solution.build(BF16)
    reference = bind(op, KernelContext("cuda", torch.bfloat16, {op: "reference"})).call
    tolerance: Tolerance = importlib.import_module(f"tokenspeed.kernels.ops.{op}.cases").TOLERANCE[torch.bfloat16]
    expected, actual, from_graph = called(reference, case), called(kernel, case), replayed(kernel, case)
    for ours, theirs, again in zip(actual, expected, from_graph, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance.relative, atol=tolerance.absolute)
        if solution.deterministic:
            assert torch.equal(ours, again)


@pytest.mark.parametrize("num_outputs", [1000, 9000], ids=["in-parts", "whole"])
@pytest.mark.parametrize("num_rows", [1, 17, 64, 65, 300])
def test_rows_of_the_invariant_product_do_not_feel_each_other(num_rows: int, num_outputs: int) -> None:
    kernel = bind("linear", KernelContext("cuda", torch.bfloat16, {"linear": "triton_invariant"})).call
    torch.manual_seed(0)
    x_TD = torch.randn(2000, 4096, dtype=torch.bfloat16, device="cuda")
    weight_ND = torch.randn(num_outputs, 4096, dtype=torch.bfloat16, device="cuda")
    whole_TN = kernel(x_TD, weight_ND, None)
    for first in (0, 63, 1001):
        part_TN = kernel(x_TD[first : first + num_rows], weight_ND, None)
        assert torch.equal(part_TN, whole_TN[first : first + num_rows])


def test_pages_past_two_to_the_31_numbers() -> None:
    num_pages = (1 << 31) // (64 * 8 * 128) + 100
    pages = [torch.zeros(num_pages, 8, 64, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in "kv"]
    k_TGK, v_TGK = torch.randn(2, 3, 8, 128, dtype=torch.bfloat16, device="cuda")
    last = num_pages * 64 - 1
    slots_T = torch.tensor([last, 64, last - 700], device="cuda")
    bind("kv_write", BF16).call(k_TGK, v_TGK, *pages, slots_T)
    for source_TGK, tensor in zip((k_TGK, v_TGK), pages, strict=True):
        assert torch.equal(tensor[slots_T // 64, slots_T % 64], source_TGK)
        tensor.zero_()
    q_THK = torch.randn(3, 32, 128, dtype=torch.bfloat16, device="cuda")
    bind("rotary_kv_write", BF16).call(
        q_THK, k_TGK, v_TGK, *pages, slots_T=slots_T, positions_T=torch.arange(3, device="cuda"), table_PR=None
    )
    for source_TGK, tensor in zip((k_TGK, v_TGK), pages, strict=True):
        assert torch.equal(tensor[slots_T // 64, slots_T % 64], source_TGK)


def test_rows_past_two_to_the_31_numbers() -> None:
    num_rows = (1 << 31) // 8192 + 10
    x_TD = torch.zeros(num_rows, 8192, dtype=torch.bfloat16, device="cuda")
    x_TD[-2:] = torch.randn(2, 8192, device="cuda")
    weight_D = torch.randn(8192, dtype=torch.bfloat16, device="cuda")
    normed_TD, _ = bind("rms_norm", BF16).call(x_TD, weight_D, None, eps=1e-6, weight_offset=0.0)
    alone_TD, _ = bind("rms_norm", BF16).call(x_TD[-2:].clone(), weight_D, None, eps=1e-6, weight_offset=0.0)
    assert torch.equal(normed_TD[-2:], alone_TD)
    gated_TF = bind("silu_mul", BF16).call(x_TD)
    assert torch.equal(gated_TF[-2:], bind("silu_mul", BF16).call(x_TD[-2:].clone()))
