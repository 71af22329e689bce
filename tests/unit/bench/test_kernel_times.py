# SPDX-License-Identifier: Apache-2.0
"""Times of kernels: each solution is checked before it is timed, and every name that is asked for must be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tokenspeed.bench import kernel
from tokenspeed.bench.floor import Ceilings
from tokenspeed.bench.kernel import KernelTime, Wanted
from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels import registry
from tokenspeed.kernels.conformance import BenchCase, Case, Cost
from tokenspeed.kernels.ops.kv_write import cases as kv_write_cases
from tokenspeed.kernels.ops.silu_mul import cases
from tokenspeed.kernels.registry import Band, Ok, Plugin, Solution

CEILINGS = Ceilings("a machine", read_bytes_s=1e9, flop_s=1e9, cache_bytes=1 << 16)


def small_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    for num_rows in (1, 33):

        def make(num_rows: int = num_rows) -> Case:
            return Case("bench", (torch.randn(num_rows, 64, dtype=dtype, device=device),))

        yield BenchCase(f"{num_rows}-rows", make, Cost(10, 3 * num_rows * 32 * dtype.itemsize))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[KernelTime]]:
    monkeypatch.setattr(cases, "bench_cases", small_cases)
    monkeypatch.setattr(kernel, "measure", lambda device, dtype: CEILINGS)
    monkeypatch.setattr(kernel, "_NUM_TIMES", 1)
    monkeypatch.setattr(kernel, "_TIME_S_MIN", 0.0)

    def run(*solutions: str, shapes: tuple[str, ...] = ()) -> list[KernelTime]:
        times: list[KernelTime] = []
        result = kernel.run(Wanted(("silu_mul",), solutions, shapes), "cpu", torch.float32, times.append)
        assert len(result["times"]) == len(times)
        return times

    return run


def add_plugin(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]) -> None:
    theirs = Solution("theirs", Band.PLUGIN, lambda _ctx: Ok(), lambda _ctx: call)
    monkeypatch.setattr(registry, "_plugins", lambda: {"them": Plugin(1, {"silu_mul": (theirs,)})})


def silu_mul(x_TF: torch.Tensor) -> torch.Tensor:
    gate, up = x_TF.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def test_all_that_run_here_are_measured_but_the_reference(small: Callable[..., list[KernelTime]]) -> None:
    times = small()
    assert {each.solution for each in times} == {"cpu"}
    assert [each.shape for each in times] == ["1-rows", "33-rows"]
    for each in times:
        assert each.seconds is not None
        assert each.seconds > 0
        assert not each.is_wrong
        assert each.check is not None
        assert each.check <= 1.0
    assert times[1].floor_s == pytest.approx(3 * 33 * 32 * 4 / 1e9)
    assert {each.solution for each in small("reference", shapes=("33",))} == {"reference"}


def test_a_plugin_is_measured_and_stands_as_the_peer(
    small: Callable[..., list[KernelTime]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(monkeypatch, silu_mul)
    times = small(shapes=("33",))
    assert [each.solution for each in times] == ["theirs", "cpu"]
    cells = list(kernel.rows(times))
    assert cells[0][4] == cells[0][6] == cells[1][6]
    assert cells[1][5] == f"{times[1].seconds / times[1].floor_s:.2f}"  # type: ignore[operator]


def test_a_wrong_result_and_a_failure_are_told(
    small: Callable[..., list[KernelTime]], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_plugin(monkeypatch, lambda x_TF: silu_mul(x_TF) + 0.01)
    (wrong,) = small("theirs", shapes=("33",))
    assert wrong.note.startswith("WRONG")
    add_plugin(monkeypatch, lambda x_TF: silu_mul(x_TF) * float("nan"))
    assert small("theirs", shapes=("33",))[0].note == "WRONG inf"

    def fail(x_TF: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no kernel for {x_TF.shape[0]} rows\nand more")

    add_plugin(monkeypatch, fail)
    (failed,) = small("theirs", shapes=("33",))
    assert failed.seconds is None
    assert failed.note == "ValueError: no kernel for 33 rows"


def test_what_a_call_changes_is_checked_and_inputs_stay() -> None:
    case = next(case for case in kv_write_cases.cases(torch.float32) if case.name == "9x3x20")
    before = [value.clone() for value in case.args if isinstance(value, torch.Tensor)]

    def write(*args: torch.Tensor) -> None:
        args[2].fill_(1.0)

    results = kernel._results(write, case)
    assert len(results) == 2
    assert bool((results[0] == 1.0).all())
    for value, known in zip(case.args, before, strict=True):
        torch.testing.assert_close(value, known, equal_nan=True, rtol=0, atol=0)


def test_ids_may_differ_in_less_than_half_of_the_rows() -> None:
    tolerance = cases.TOLERANCE[torch.float32]
    ids = torch.arange(8)
    assert kernel._difference([ids], [ids], tolerance) == 0.0
    assert kernel._difference([torch.cat((ids[:5], ids[:3]))], [ids], tolerance) == pytest.approx(0.75)
    assert kernel._difference([ids + 1], [ids], tolerance) > 1.0


def test_libraries_are_peers_and_forms_of_our_own_are_not() -> None:
    assert [kernel.is_ours(name) for name in ("triton", "triton_invariant", "cpu", "cublas", "flash")] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (Wanted(("nothing",)), "bench kernel nothing: no op"),
        (Wanted(("collective",)), "bench kernel collective: no op"),
        (Wanted((), ("nobody",)), "--solution nobody: no such solution"),
        (Wanted(("silu_mul",), ("portable",)), "--solution portable"),
    ],
)
def test_unknown_names_are_refused(wanted: Wanted, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wanted.check()


@pytest.mark.parametrize("op", kernel.benched_ops())
def test_sizes_have_names_costs_and_inputs_that_fit_the_op(op: str) -> None:
    bench_cases = kernel._bench_cases(op)
    assert bench_cases is not None
    found = list(bench_cases(torch.bfloat16, "meta"))
    assert len({case.name for case in found}) == len(found) >= 1
    for case in found:
        assert case.cost.bytes > 0
        assert kernel.tensors_in(case.make().args)
