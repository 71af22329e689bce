# SPDX-License-Identifier: Apache-2.0
"""What a decode step of one sequence costs beside its kernels, part by part: processor time of each thread, a step.

API, engine loop and runner are threads of this process, as LLM has them, which asks for whole replies: no token of them
is told before the end. The kernels are the one call of the op decode_step, of which only the calling thread counts.
Processor time is what each part takes from the other threads; the machine may be shared, so the least of several rounds
counts. `wall` is by the clock.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from tokenspeed import LLM, SamplingParams
from tokenspeed.kernels.platform import require_cpu_module

PARTS = ("wall", "kernels", "runner", "engine", "api")
_THREADS = {"runner": "model-runner", "engine": "tokenspeed-engine", "api": "tokenspeed-llm"}
_SETTLING_STEPS = 8
"""Decode steps before those that are seen; as many and more come after them."""
_PROMPT = "The history of computing is a history of people who count."


class Kernels:
    """The call of a step, and what its part of the time is. A round is seen from its first marked call to its last."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.seconds, self.num_calls = 0.0, 0
        self.marks: dict[int, dict[str, float]] = {}
        self._call = call

    def __call__(self, *args: Any) -> Any:
        if self.num_calls in self.marks:
            self.marks[self.num_calls] = _now(self)
        self.num_calls += 1
        began = time.thread_time()
        try:
            return self._call(*args)
        finally:
            self.seconds += time.thread_time() - began


def main() -> None:
    """Print a line a round, and one JSON object: microseconds a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", choices=("exact", "packed"), default="packed")
    parser.add_argument("--packed-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    print(json.dumps(measure(parser.parse_args())))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds a step, by part."""
    module: Any = require_cpu_module()
    kernels = Kernels(module.decode_step)
    module.decode_step = kernels  # before a model is prepared, which keeps it
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=options.num_steps + 3 * _SETTLING_STEPS,
        ignore_eos=True,
        seed=7,
    )
    with LLM(
        options.model,
        weights=options.weights,
        packed_cache=options.packed_cache,
        device="cpu",
        num_threads=options.threads,
        max_num_seqs=max(options.batch, 4),
        max_model_len=1024,
        kv_tokens=1024 * max(options.batch, 4),
    ) as llm:
        prompts = [f"{index} {_PROMPT}" for index in range(options.batch)]
        rounds = []
        for index in range(options.rounds + 1):
            first = kernels.num_calls + _SETTLING_STEPS
            last = first + options.num_steps
            kernels.marks = {first: {}, last: {}}
            llm.generate(prompts, params)
            began, ended = kernels.marks[first], kernels.marks[last]
            took = {part: (ended[part] - began[part]) / options.num_steps * 1e6 for part in PARTS}
            took["runner"] -= took["kernels"]
            if index > 0:  # the first one warms all up
                rounds.append(took)
                print("  ".join(f"{part} {took[part]:7.0f}" for part in PARTS), flush=True)
    least = {part: round(min(each[part] for each in rounds)) for part in PARTS}
    beside = sum(least[part] for part in _THREADS)
    return {**vars(options), "us_a_step": least, "beside_kernels": beside}


def _now(kernels: Kernels) -> dict[str, float]:
    """Seconds so far: the clock, and the processor time of each part."""
    clocks = {thread.name: time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident}
    spent = {part: time.clock_gettime(clocks[name]) for part, name in _THREADS.items()}
    return {"wall": time.perf_counter(), "kernels": kernels.seconds, **spent}


if __name__ == "__main__":
    main()
