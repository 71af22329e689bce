# SPDX-License-Identifier: Apache-2.0
"""How long a call takes: on a GPU by events, on a CPU by the clock of the machine. Knows nothing of what is called."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
Clock = Callable[[Call], float]


def clock_of(device: str) -> Clock:
    """The clock for calls that run on a device."""
    return _device_s if torch.device(device).type == "cuda" else _wall_s


def _device_s(call: Call) -> float:
    begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3


def _wall_s(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
