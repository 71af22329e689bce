# SPDX-License-Identifier: Apache-2.0
"""Every solution of every op agrees with the op's reference; a new file in an op's folder joins by existing.

Triton's run on a CUDA device where there is one, else in Triton's interpreter; the compiled CPU kernels on each
instruction set that the machine runs. The reference always runs on the CPU. Ops of several ranks or of a whole model
have conformance tests of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu_isas import isas
from tokenspeed.kernels.conformance import Case, Tolerance
from tokenspeed.kernels.registry import Band, KernelContext, Reason, Solution, bind, op_names, solutions_of

DTYPES = (torch.float32, torch.bfloat16)
ELSEWHERE = {
    "collective": {"gloo": "unit/kernels/test_collective.py", "nccl": "unit/kernels/test_collective.py"},
    "decode_step": {
        "cpu": "unit/kernels/test_decode_step_cpu.py",
        "cuda": "gpu/kernels/test_decode_step.py",
        "triton": "unit/kernels/test_decode_step.py",
    },
}
"""Ops without cases, and where each of their solutions is held to the reference."""
INTERPRETED_PRODUCTS = {"linear", "paged_attention"}  # by numpy, where a row's bits depend on its place in a tile


def cases_module(op: str) -> Any:
    return importlib.import_module(f"tokenspeed.kernels.ops.{op}.cases")


def cases_of(op: str, solution: Solution, dtype: torch.dtype) -> list[Case]:
    """Those that ask for nothing by name which the solution lacks."""
    return [case for case in cases_module(op).cases(dtype) if case.features <= solution.features]


def held_to_reference(op: str) -> list[Solution]:
    return [solution for solution in solutions_of(op) if solution.band is not Band.REFERENCE]


def contenders() -> list[Any]:
    """(op, solution, dtype, instruction set or None) for all but references."""
    found = []
    for op in sorted(set(op_names()) - set(ELSEWHERE)):
        for solution in held_to_reference(op):
            for isa in isas() if solution.name == "cpu" else [None]:
                for dtype in DTYPES:
                    words = (op, solution.name, isa, str(dtype).removeprefix("torch."))
                    found.append(pytest.param(op, solution, dtype, isa, id="-".join(word for word in words if word)))
    return found


pytestmark = pytest.mark.usefixtures("poisoned_memory")
each_contender = pytest.mark.parametrize(("op", "solution", "dtype", "cpu_isa"), contenders(), indirect=["cpu_isa"])


def as_function(op: str, kernel: Any) -> Any:
    """What a solution builds, as a function of tensors."""
    convert = vars(cases_module(op)).get("as_function")
    return kernel if convert is None else convert(kernel)


def reference_of(op: str, dtype: torch.dtype) -> Any:
    return as_function(op, bind(op, KernelContext("cpu", dtype, {op: "reference"})).call)


def built(op: str, solution: Solution, dtype: torch.dtype) -> Any:
    """The kernel, taking tensors of the CPU and giving such."""
    return as_function(op, _built(solution, dtype))


def _built(solution: Solution, dtype: torch.dtype) -> Any:
    on_cpu = KernelContext("cpu", dtype)
    support = solution.supports(on_cpu)
    if not isinstance(support, Reason):
        return solution.build(on_cpu)
    if torch.cuda.is_available() and not isinstance(solution.supports(KernelContext("cuda", dtype)), Reason):
        return on_cuda(solution.build(KernelContext("cuda", dtype)))
    if is_interpreted(solution) and importlib.util.find_spec("triton"):
        return solution.build(on_cpu)
    pytest.skip(support.text)


def is_interpreted(solution: Solution) -> bool:
    return solution.name.startswith("triton") and not torch.cuda.is_available()


def on_cuda(kernel: Any) -> Any:
    """The kernel with its arguments taken to the device, and what it returns and changes brought back."""

    def run(*args: Any, **keywords: Any) -> Any:
        theirs = [moved(value, "cuda") for value in args]
        result = moved(kernel(*theirs, **{name: moved(value, "cuda") for name, value in keywords.items()}), "cpu")
        for ours, changed in zip(args, theirs, strict=True):
            if isinstance(ours, torch.Tensor):
                ours.untyped_storage().copy_(changed.untyped_storage())
        return result

    return run


def moved(value: object, device: str) -> Any:
    """A copy on a device that keeps strides, offset and what lies between the elements."""
    if isinstance(value, torch.Tensor):
        storage = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        storage.copy_(value.untyped_storage())
        empty = torch.empty(0, dtype=value.dtype, device=device)
        return empty.set_(storage, value.storage_offset(), value.size(), value.stride())
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {item.name: moved(getattr(value, item.name), device) for item in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)
    return value


def copied(value: object) -> Any:
    return moved(value, "cpu")


def tensors_in(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for item in dataclasses.fields(value) for tensor in tensors_in(getattr(value, item.name))]
    return []


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that a view lies in."""
    return tensor.new_empty(0).set_(
        tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes() // tensor.itemsize,)
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> None:
    assert actual.dtype is expected.dtype
    if actual.dtype is torch.float8_e4m3fn:
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, rtol=tolerance.relative, atol=tolerance.absolute, equal_nan=True)


def check(case: Case, kernel: Any, reference: Any, tolerance: Tolerance) -> Any:
    theirs, ours = copied_args(case), copied_args(case)
    expected, actual = reference(*theirs, **case.keywords), kernel(*ours, **case.keywords)
    expected_tensors, actual_tensors = tensors_in(expected), tensors_in(actual)
    assert len(expected_tensors) == len(actual_tensors)
    for ours_result, theirs_result in zip(actual_tensors, expected_tensors, strict=True):
        assert_close(ours_result, theirs_result, tolerance)
    for index, before in enumerate(case.args):
        if isinstance(before, torch.Tensor):
            after = theirs[index] if index in case.mutated else copied(before)
            if index in case.scratch:
                for tensor in (ours[index], after):
                    tensor.zero_()
            assert_close(whole(ours[index]), whole(after), tolerance if index in case.mutated else Tolerance(0.0, 0.0))
    return actual


def copied_args(case: Case) -> list[Any]:
    return [copied(value) for value in case.args]


@each_contender
def test_agrees_with_the_reference(op: str, solution: Solution, dtype: torch.dtype, cpu_isa: str | None) -> None:
    kernel = built(op, solution, dtype)
    module = cases_module(op)
    reference = reference_of(op, dtype)
    for case in cases_of(op, solution, dtype):
        try:
            check(case, kernel, reference, case.tolerance or module.TOLERANCE[dtype])
        except AssertionError as error:
            raise AssertionError(f"{op}/{solution.name} {cpu_isa or ''} on {case.name}: {error}") from error


@each_contender
def test_keeps_its_promises_of_determinism_and_batch_invariance(
    op: str, solution: Solution, dtype: torch.dtype, cpu_isa: str | None
) -> None:
    kernel = built(op, solution, dtype)
    for case in cases_of(op, solution, dtype):
        result = tensors_in(kernel(*copied_args(case), **case.keywords))
        again = tensors_in(kernel(*copied_args(case), **case.keywords))
        if solution.deterministic:
            assert all(torch.equal(a, b) for a, b in zip(result, again, strict=True)), case.name
        is_promised = solution.batch_invariant and not (op in INTERPRETED_PRODUCTS and is_interpreted(solution))
        for row in case.rows if is_promised else ():
            alone = tensors_in(kernel(*row.args, **row.keywords))
            assert torch.equal(alone[0], row.select(result[0])), f"{case.name}: a row depends on its batch"


@pytest.mark.parametrize("op", sorted({param.values[0] for param in contenders()}))
def test_reference_has_cases_and_finite_answers(op: str) -> None:
    module = cases_module(op)
    for dtype in DTYPES:
        reference = reference_of(op, dtype)
        names = [case.name for case in module.cases(dtype)]
        assert len(names) == len(set(names)) >= 3
        for case in module.cases(dtype):
            for tensor in tensors_in(reference(*copied_args(case), **case.keywords)):
                assert math.isfinite(float(tensor.double().sum())), case.name


@pytest.mark.parametrize("op", op_names())
def test_every_solution_is_held_to_its_reference(op: str) -> None:
    """By cases of the op, or by name in another file."""
    has_cases = importlib.util.find_spec(f"tokenspeed.kernels.ops.{op}.cases") is not None
    assert has_cases != (op in ELSEWHERE), f"{op}: give it cases.py, or say in ELSEWHERE which tests stand for it"
    if not has_cases:
        files = ELSEWHERE[op]
        assert set(files) == {solution.name for solution in held_to_reference(op)}
        for name, file in files.items():
            text = (Path(__file__).parents[2] / file).read_text()
            assert f'"{name}"' in text, f"{file} does not run {op}/{name}"
