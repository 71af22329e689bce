# SPDX-License-Identifier: Apache-2.0
"""What planning costs: the native benchmark (its path is the argument), then the same steady decode through Python.

The last line is one JSON object: the native one, and the times through Python.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import numpy as np

from tokenspeed.control import ControlPlane
from tokenspeed.core.plan import CacheGroup, GroupKind, RequestKey, RowKind, StepPlan, StepResult

NUM_REQUESTS = 128
CONTEXT = 32_768
NUM_STEPS = 5_000
WARM_UP = 600


def new_plane() -> ControlPlane:
    """The groups of the native benchmark."""
    tokens_each = CONTEXT + NUM_STEPS + 8192
    blocks = {size: NUM_REQUESTS * (tokens_each // size + 8) for size in (16, 64, 256)}
    groups = (
        CacheGroup(GroupKind.FULL, 16, blocks[16]),
        CacheGroup(GroupKind.FULL, 64, blocks[64]),
        CacheGroup(GroupKind.WINDOW, 16, blocks[16], window=4096),
        CacheGroup(GroupKind.RECURRENT, 256, blocks[256]),
    )
    return ControlPlane(
        groups=groups, max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=8192, max_model_len=tokens_each
    )


def result_of(plan: StepPlan, token_ids: np.ndarray) -> StepResult:
    samples = plan.rows[:, 1] != RowKind.PREFILL
    offsets = np.zeros(len(plan.rows) + 1, np.int32)
    np.cumsum(samples, out=offsets[1:])
    return StepResult(plan.step_id, offsets, token_ids[: offsets[-1]], np.zeros(len(plan.rows), np.int32))


def decode_times_us() -> list[float]:
    """Time of next_plan and advance in each step, one step in flight."""
    plane = new_plane()
    rng = np.random.default_rng(0)
    for index in range(NUM_REQUESTS):
        prompt = rng.integers(2, 50_000, CONTEXT - 2 * index, dtype=np.int32)
        plane.submit(RequestKey(index, 0), prompt, max_new_tokens=NUM_STEPS + 8000)
    plane.apply()
    in_flight: list[StepResult] = []
    times: list[float] = []
    token_ids = rng.integers(2, 50_000, (64, NUM_REQUESTS), dtype=np.int32)
    steady = 0
    while steady < WARM_UP + NUM_STEPS:
        start = time.perf_counter()
        plan = plane.next_plan()
        spent = time.perf_counter() - start
        if plan is not None:
            in_flight.append(result_of(plan, token_ids[steady % 64]))
        if len(in_flight) > 1 or plan is None:
            result = in_flight.pop(0)
            start = time.perf_counter()
            plane.advance(result)
            spent += time.perf_counter() - start
        plane.take_events()
        is_steady = plan is not None and len(plan.rows) == NUM_REQUESTS and bool((plan.rows[:, 1] == 2).all())
        steady += is_steady
        if is_steady and steady > WARM_UP:
            times.append(spent * 1e6)
    return times


def main() -> None:
    native = subprocess.run(sys.argv[1:], check=True, stdout=subprocess.PIPE, text=True).stdout.rstrip().splitlines()
    print("\n".join(native[:-1]), flush=True)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times = sorted(decode_times_us())
    median, late = statistics.median(times), times[int(0.999 * len(times))]
    print(f"through Python: {median:.1f} µs median, {late:.1f} µs at the 99.9th percentile, {times[-1]:.1f} µs worst")
    through_python = {
        "python_plan_advance_us_median": round(median, 3),
        "python_plan_advance_us_p999": round(late, 3),
        "python_plan_advance_us_worst": round(times[-1], 3),
    }
    print(json.dumps(json.loads(native[-1]) | through_python))


if __name__ == "__main__":
    main()
