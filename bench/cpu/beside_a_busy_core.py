# SPDX-License-Identifier: Apache-2.0
"""Decode speed of one stream while another process keeps one core busy, beside that without it, in turn.

The loops of the kernels are shared out item by item, so a thread whose core is taken holds up one item at most. Prints
a line a round and ends with one JSON object; `kept` is the median over the rounds of busy over idle. Run it where
nothing else runs: whatever keeps the other cores busy counts as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenspeed.bench.workers import Worker

HERE = Path(__file__).resolve().parent
_SETTLE_S = 0.3
"""Until the scheduler has taken note of the busy process."""


def main() -> None:
    """Rounds of idle and busy, after one that warms all up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the one that is kept busy")
    options = parser.parse_args()
    context_len = options.prompt_len + options.num_tokens + 16
    sizes = ["--threads", str(options.threads), "--num-seqs", "1", "--context", str(context_len)]
    log = HERE.parents[1] / "build" / "bench-cpu" / "busy.log"
    worker = Worker("ours", [sys.executable, str(HERE / "ours.py"), options.model, *sizes], log)
    try:
        decode_rate(worker, options)
        kept = [one_round(worker, options) for _ in range(options.rounds)]
    finally:
        worker.close()
    print(json.dumps({"model": options.model, "threads": options.threads, "kept": statistics.median(kept)}))


def one_round(worker: Worker, options: argparse.Namespace) -> float:
    """The share of its speed that decoding keeps."""
    idle = decode_rate(worker, options)
    with busy(options.core):
        shared = decode_rate(worker, options)
    print(f"alone {idle:6.1f} tokens/s, beside a busy process {shared:6.1f}: {shared / idle:.0%}", flush=True)
    return shared / idle


@contextmanager
def busy(core: int) -> Iterator[None]:
    """A process that does nothing else than keep one core busy."""
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def decode_rate(worker: Worker, options: argparse.Namespace) -> float:
    """Tokens a second after a prompt that nobody has seen yet."""
    prompt = [random.randrange(1000, 30000) for _ in range(options.prompt_len)]
    answer = worker.ask({"do": "decode", "prompts": [prompt], "num_tokens": options.num_tokens})
    return float(answer["num_tokens"] / answer["seconds"])


if __name__ == "__main__":
    main()
