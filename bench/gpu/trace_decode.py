# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes on a GPU: kernels by their share, and the gaps in which none runs.

The engine runs on a thread of this process, so that one trace sees all of its kernels; it serves real requests
meanwhile. Shares are of the traced window, and add up to all of it. The trace itself costs a little, mostly in the
gaps: compare shares with shares, and times with `tokenspeed bench`.

    python bench/gpu/trace_decode.py bench/gpu/qwen3-8b --batch 16 --context 8192
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.bench import report
from tokenspeed.bench.phases import Prompts
from tokenspeed.bench.streams import Streams, Timing
from tokenspeed.core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.llm.engine_client import EngineClient

_WARM_S = 0.4
_SPLIT_US = 20_000.0


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device, in µs of the trace."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Shares:
    """window_us: from the first kernel to the end of the last. busy_us: when at least one ran. kernels: (name, calls,
    µs, added µs) by the last, which is what they ran on after all before had ended: kernels overlap, waiting for each
    other. gaps: (kernel before, kernel after, number, µs) by time."""

    window_us: float
    busy_us: float
    num_kernels: int
    kernels: tuple[tuple[str, int, float, float], ...]
    gaps: tuple[tuple[str, str, int, float], ...]


def shares_of(spans: Sequence[Span]) -> Shares:
    """Of the longest run of kernels without a pause of 20 ms, as the start of a trace makes one."""
    assert spans, "the trace holds no kernel"
    runs: list[list[Span]] = []
    end = float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin - end > _SPLIT_US:
            runs.append([])
        runs[-1].append(span)
        end = max(end, span.end)
    run = max(runs, key=len)
    kernels: dict[str, list[tuple[float, float]]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    last, busy_us = run[0], 0.0
    end = run[0].begin
    for span in run:
        added = max(0.0, span.end - max(span.begin, end))
        kernels[span.name].append((span.end - span.begin, added))
        if span.begin > end and span is not run[0]:
            gaps[last.name, span.name].append(span.begin - end)
        busy_us += added
        if span.end > end:
            last, end = span, span.end
    sums = ((name, len(times), *(sum(each) for each in zip(*times, strict=True))) for name, times in kernels.items())
    by_time = sorted(sums, key=lambda each: -each[3])
    pauses = sorted(((*names, len(times), sum(times)) for names, times in gaps.items()), key=lambda each: -each[3])
    return Shares(end - run[0].begin, busy_us, len(run), tuple(by_time), tuple(pauses))


def spans_in(path: Path) -> list[Span]:
    """Kernels and copies of a trace file."""
    events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [event for event in events if event.get("cat") in kinds]
    return [Span(float(each["ts"]), float(each["ts"]) + float(each["dur"]), str(each["name"])) for each in found]


async def traced(options: argparse.Namespace) -> tuple[Shares, float]:
    """The shares of a window in which all requests decode, and µs of a step before it."""
    config = EngineConfig(
        model=ModelConfig(
            model=options.model, load_format=options.load_format, max_model_len=options.context + options.tokens + 64
        ),
        cache=CacheConfig(memory_fraction=0.85, kv_dtype=options.kv_cache_dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=8192),
        device=DeviceConfig(kernel_overrides=tuple(tuple(each.split("=", 1)) for each in options.kernel)),
    ).validate()
    client = await EngineClient.start(InProcessEngine, config)
    try:
        streams, prompts = Streams(client), Prompts(client.info.vocab_size, 0)
        requests = [prompts.take(options.context) for _ in range(options.batch)]
        temperature = 0.0 if options.batch == 1 else 1.0
        await asyncio.gather(*(streams.run(prompt, 8, temperature) for prompt in requests))
        with new_profiler():
            torch.cuda.synchronize()  # the first trace of a process takes seconds to begin, in which a reply could end
        running = [asyncio.create_task(streams.run(prompt, options.tokens, temperature)) for prompt in requests]
        await asyncio.sleep(_WARM_S)
        profiler = new_profiler()
        begin_s = time.perf_counter()
        profiler.start()
        await asyncio.sleep(options.milliseconds / 1e3)
        torch.cuda.synchronize()
        profiler.stop()
        timings = await asyncio.gather(*running)
    finally:
        await client.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return shares_of(spans_in(path)), step_us(timings, begin_s)


def new_profiler() -> torch.profiler.profile:
    """Of kernels and copies, whichever thread launches them."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def step_us(timings: Sequence[Timing], until_s: float) -> float:
    """The median time between two tokens of a stream before the trace began."""
    gaps = []
    for timing in timings:
        arrivals = [arrival.at_s for arrival in timing.arrivals[4:] if arrival.at_s < until_s]
        gaps += [after - before for before, after in itertools.pairwise(arrivals)]
    return statistics.median(gaps) * 1e6


def show(shares: Shares, untraced_us: float, num_rows: int) -> None:
    """Print the tables."""
    steps = shares.window_us / untraced_us
    print(
        f"window {shares.window_us / 1e3:.1f} ms, about {steps:.1f} steps of {untraced_us / 1e3:.3f} ms (untraced); "
        f"busy {shares.busy_us / shares.window_us:.1%}; {shares.num_kernels / steps:.0f} kernels a step"
    )
    rows = [
        (
            name[:90],
            f"{added / shares.window_us:.1%}",
            f"{calls / steps:.1f}",
            f"{added / calls:.2f}",
            f"{micros / calls:.2f}",
        )
        for name, calls, micros, added in shares.kernels[:num_rows]
    ]
    print(report.table(("kernel", "adds", "a step", "each adds µs", "each µs"), rows))
    gap_rows = [
        (
            f"{before[:42]} → {after[:42]}",
            f"{micros / shares.window_us:.1%}",
            f"{number / steps:.1f}",
            f"{micros / number:.2f}",
        )
        for before, after, number, micros in shares.gaps[:num_rows]
    ]
    print(report.table(("gap", "share", "a step", "each µs"), gap_rows))


def main() -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, alias or hub id")
    parser.add_argument("--load-format", default="dummy", help="how the model is stored (default: dummy)")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, bf16 or fp8 (default: auto)")
    parser.add_argument("--batch", type=int, default=1, help="requests at once (default: 1)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt (default: 1024)")
    parser.add_argument("--kernel", action="append", default=[], help="OP=SOLUTION, as of tokenspeed serve")
    parser.add_argument("--tokens", type=int, default=600, help="tokens of each reply (default: 600)")
    parser.add_argument("--milliseconds", type=int, default=200, help="length of the trace (default: 200)")
    parser.add_argument("--rows", type=int, default=20, help="rows of each table (default: 20)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible to torch")
    show(*asyncio.run(traced(options)), options.rows)


if __name__ == "__main__":
    main()
