# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed bench kernel`: every solution of an op at the sizes of a real model, beside the floor of each size.

Goes through the registry, so that a new solution or plugin is measured by existing. Checks a result against the
reference before it is timed. Knows no op by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.bench import report
from tokenspeed.bench.ceilings import measure
from tokenspeed.bench.clock import Call, Clock, clock_of
from tokenspeed.bench.floor import Ceilings
from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels.conformance import BenchCase, Case, Tolerance
from tokenspeed.kernels.registry import Band, KernelContext, Reason, Solution, op_names, solutions_of

OURS = frozenset({"reference", "portable", "cpu", "triton", "gluon", "cuda"})
"""Names of solutions of the project, and what they begin with; one of another name stands for a library, or is a
plugin."""
_COPIES_MAX = 32
_COPIES_BYTES_MAX = 6 << 30
_FLOOR_S_MAX = 0.05
"""Sizes that this machine cannot do faster are left out."""
_NUM_TIMES = 9
_TIME_S_MIN = 2e-3
_CHECK_FLOP_MAX = 2e12
HEADER = ("op", "shape", "solution", "floor µs", "time µs", "x floor", "peer µs", "check")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """seconds: None where the solution failed, and `note` says how. check: the largest difference from the reference
    over what is allowed (at most 1 passes); None where the size is too large for the reference."""

    op: str
    shape: str
    solution: str
    floor_s: float
    seconds: float | None
    check: float | None
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether it failed or differs from the reference."""
        return self.note != ""


@dataclass(frozen=True, slots=True)
class _Size:
    """One size of one op: inputs in turn, and what the reference makes of the first."""

    op: str
    name: str
    floor_s: float
    copies: list[Case]
    expected: list[torch.Tensor] | None
    tolerance: Tolerance


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which ops, solutions and shapes: all where empty. shapes: parts of their names."""

    ops: tuple[str, ...] = ()
    solutions: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()

    def check(self) -> Wanted:
        """This, or ConfigError when nothing has such a name."""
        for op in self.ops:
            if op not in benched_ops():
                raise ConfigError(
                    f"bench kernel {op}: no op of this name has cases; ops are {', '.join(benched_ops())}"
                )
        known = {solution.name for op in self.ops or benched_ops() for solution in solutions_of(op)}
        for name in self.solutions:
            if name not in known:
                raise ConfigError(f"--solution {name}: no such solution; there are {', '.join(sorted(known))}")
        return self

    def takes(self, solution: Solution) -> bool:
        """Whether the solution is to be measured; a reference only where it is asked for."""
        return solution.name in self.solutions if self.solutions else solution.band is not Band.REFERENCE


def is_ours(solution: str) -> bool:
    """Whether the project wrote it, as `triton` or `triton_invariant`."""
    return solution.partition("_")[0] in OURS


def benched_ops() -> tuple[str, ...]:
    """Ops whose cases have sizes to measure."""
    return tuple(op for op in op_names() if _bench_cases(op) is not None)


def run(wanted: Wanted, device: str, dtype: torch.dtype, on_time: Callable[[KernelTime], None]) -> dict[str, Any]:
    """Measure what is wanted, telling each time as it comes. Returns what is kept as JSON. Raises ConfigError."""
    wanted.check()
    ceilings = measure(device, dtype)
    ctx, times = KernelContext(device, dtype), []
    with torch.inference_mode():
        for op in wanted.ops or benched_ops():
            for each in _times_of_op(op, wanted, ctx, ceilings):
                times.append(each)
                on_time(each)
    return {
        **report.origin(),
        "ceilings": dataclasses.asdict(ceilings),
        "dtype": str(dtype).removeprefix("torch."),
        "times": [dataclasses.asdict(each) for each in times],
    }


def rows(times: Sequence[KernelTime]) -> Iterator[tuple[str, ...]]:
    """Rows under HEADER. The peer is the fastest library at that size."""
    peers: dict[tuple[str, str], float] = {}
    for each in times:
        if each.seconds is not None and not is_ours(each.solution):
            key = (each.op, each.shape)
            peers[key] = min(each.seconds, peers.get(key, each.seconds))
    for each in times:
        check = each.note or ("-" if each.check is None else f"{each.check:.2f}")
        floor, seconds = report.microseconds(each.floor_s), report.microseconds(each.seconds)
        peer = report.microseconds(peers.get((each.op, each.shape)))
        yield each.op, each.shape, each.solution, floor, seconds, report.ratio(each.seconds, each.floor_s), peer, check


def _bench_cases(op: str) -> Callable[[torch.dtype, str], Iterator[BenchCase]] | None:
    name = f"tokenspeed.kernels.ops.{op}.cases"
    if importlib.util.find_spec(name) is None:
        return None
    return vars(importlib.import_module(name)).get("bench_cases")


def _times_of_op(op: str, wanted: Wanted, ctx: KernelContext, ceilings: Ceilings) -> Iterator[KernelTime]:
    bench_cases = _bench_cases(op)
    assert bench_cases is not None, op
    tolerance = vars(importlib.import_module(f"tokenspeed.kernels.ops.{op}.cases"))["TOLERANCE"][ctx.dtype]
    solutions = [each for each in solutions_of(op) if wanted.takes(each)]
    solutions = [each for each in solutions if not isinstance(each.supports(ctx), Reason)]
    reference = next(each for each in solutions_of(op) if each.band is Band.REFERENCE)
    for case in bench_cases(ctx.dtype, ctx.device):
        if wanted.shapes and not any(shape in case.name for shape in wanted.shapes):
            continue
        floor_s = ceilings.floor_s(case.cost.bytes, case.cost.flop)
        if floor_s > _FLOOR_S_MAX:
            continue
        copies = _copies(case, ceilings.cache_bytes)
        expected = _expected(reference.build(ctx), case, copies[0])
        size = _Size(op, case.name, floor_s, copies, expected, tolerance)
        for solution in solutions:
            yield _time(solution, size, ctx)
        del copies, expected, size
        if torch.device(ctx.device).type == "cuda":
            torch.cuda.empty_cache()


def _copies(case: BenchCase, cache_bytes: int) -> list[Case]:
    """So many different inputs that a call finds none of its own in the cache, within reason."""
    first = case.make()
    size = max(1, sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(first.args)))
    num_copies = max(1, min(_COPIES_MAX, -(-3 * cache_bytes // size), _COPIES_BYTES_MAX // size))
    return [first, *(case.make() for _ in range(num_copies - 1))]


def _expected(reference: Callable[..., Any], case: BenchCase, inputs: Case) -> list[torch.Tensor] | None:
    """What the reference returns and leaves behind; None where it would take too long or too much memory."""
    if case.cost.flop > _CHECK_FLOP_MAX:
        return None
    try:
        return _results(reference, inputs)
    except torch.OutOfMemoryError:
        return None


def _results(kernel: Callable[..., Any], inputs: Case) -> list[torch.Tensor]:
    """What a call returns, and then what it changes, on inputs that stay as they are."""
    args = [_copied(value) if index in inputs.mutated else value for index, value in enumerate(inputs.args)]
    returned = kernel(*args, **inputs.keywords)
    return [*tensors_in(returned), *(each for index in inputs.mutated for each in tensors_in(args[index]))]


def _copied(value: object) -> object:
    """Keeps strides."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return value.new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())


def _time(solution: Solution, size: _Size, ctx: KernelContext) -> KernelTime:
    try:
        kernel = solution.build(ctx)
        check = None
        if size.expected is not None:
            check = _difference(_results(kernel, size.copies[0]), size.expected, size.tolerance)
        seconds = seconds_of_call(kernel, size.copies, ctx.device, solution.graph_safe)
    except Exception as error:  # noqa: BLE001 - one that fails at one size is told, and the others are still measured
        note = f"{type(error).__name__}: {error}".splitlines()[0][:72]
        return KernelTime(size.op, size.name, solution.name, size.floor_s, None, None, note)
    note = "" if check is None or check <= 1.0 else f"WRONG {check:.1f}"
    return KernelTime(size.op, size.name, solution.name, size.floor_s, seconds, check, note)


def _difference(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: Tolerance) -> float:
    """The largest difference over what is allowed; of ids, the share that differs (draws that are nearly equal may fall
    the other way)."""
    assert len(actual) == len(expected), (len(actual), len(expected))
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        if not theirs.is_floating_point():
            worst = max(worst, float((ours != theirs).float().mean()) * 2.0 if theirs.numel() else 0.0)
            continue
        allowed = tolerance.absolute + tolerance.relative * theirs.float().abs()
        difference = (ours.float() - theirs.float()).abs()
        off = torch.where(difference == 0.0, 0.0, difference / allowed).nan_to_num(nan=float("inf"))
        worst = max(worst, float(off.max()) if off.numel() else 0.0)
    return worst


def seconds_of_call(kernel: Callable[..., Any], copies: list[Case], device: str, graph_safe: bool) -> float:
    """The median time of a call, over inputs in turn: of a replayed graph where the kernel may be captured."""

    def turn() -> None:
        for inputs in copies:
            kernel(*inputs.args, **inputs.keywords)

    if torch.device(device).type != "cuda":
        turn()
        return _median_s(turn, clock_of(device)) / len(copies)
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        turn()
        turn()
    torch.cuda.synchronize()
    if not graph_safe:
        return _median_s(turn, clock_of(device)) / len(copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turn()
    return _median_s(graph.replay, clock_of(device)) / len(copies)


def _median_s(turn: Call, clock: Clock) -> float:
    """Of turns that take long enough to be timed, several in a row where one does not."""
    once_s = max(1e-7, min(clock(turn), clock(turn)))
    in_a_row = max(1, min(100, int(_TIME_S_MIN / once_s)))

    def turns() -> None:
        for _ in range(in_a_row):
            turn()

    num_times = _NUM_TIMES if once_s < 0.5 else 3
    return statistics.median(clock(turns) for _ in range(num_times)) / in_a_row


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors of a structure of tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for item in dataclasses.fields(value) for tensor in tensors_in(getattr(value, item.name))]
    return []
