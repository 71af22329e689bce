# SPDX-License-Identifier: Apache-2.0
"""Shares of a trace: what overlaps counts once, and a gap lies between the kernel that ended last and the next."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tokenspeed.bench.streams import Arrival, Timing

SCRIPT = Path(__file__).resolve().parents[3] / "bench" / "gpu" / "trace_decode.py"


@pytest.fixture(scope="module")
def trace_decode() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_decode", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_decode"] = module
    spec.loader.exec_module(module)
    return module


def test_shares_and_gaps(trace_decode: ModuleType) -> None:
    spans = [
        (30_100.0, 5.0, "a"),
        (30_103.0, 7.0, "b"),
        (30_115.0, 5.0, "a"),
        (30_125.0, 5.0, "c"),
        (0.0, 9.0, "set-up"),
    ]
    shares = trace_decode.shares_of([trace_decode.Span(begin, begin + length, name) for begin, length, name in spans])
    assert shares.num_kernels == 4
    assert shares.window_us == 30.0
    assert shares.busy_us == 20.0
    assert shares.kernels == (("a", 2, 10.0, 10.0), ("b", 1, 7.0, 5.0), ("c", 1, 5.0, 5.0))
    assert set(shares.gaps) == {("b", "a", 1, 5.0), ("a", "c", 1, 5.0)}


def test_a_kernel_within_a_longer_one_ends_no_gap(trace_decode: ModuleType) -> None:
    spans = [
        trace_decode.Span(0.0, 10.0, "long"),
        trace_decode.Span(2.0, 3.0, "short"),
        trace_decode.Span(12.0, 13.0, "next"),
    ]
    shares = trace_decode.shares_of(spans)
    assert shares.gaps == (("long", "next", 1, 2.0),)
    assert shares.busy_us == 11.0


def test_only_work_of_the_device_is_read(trace_decode: ModuleType, tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "ts": 5, "dur": 2, "name": "k"},
        {"cat": "cuda_runtime", "ts": 1, "dur": 9, "name": "launch"},
        {"cat": "gpu_memcpy", "ts": 8, "dur": 1, "name": "copy"},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert [(span.name, span.begin, span.end) for span in trace_decode.spans_in(path)] == [("k", 5, 7), ("copy", 8, 9)]


def test_a_step_is_timed_before_the_trace(trace_decode: ModuleType) -> None:
    times = (0.0, 1.0, 1.1, 1.2, 2.0, 2.5, 3.0, 3.5, 9.0, 19.0)
    timing = Timing(0.0, tuple(Arrival(at_s, 1) for at_s in times), tuple(range(len(times))), 0)
    assert trace_decode.step_us([timing], 4.0) == 500_000.0
