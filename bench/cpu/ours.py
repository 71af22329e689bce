# SPDX-License-Identifier: Apache-2.0
"""Our engine as one of two that take turns: told what to run by lines of JSON, answers with lines of JSON.

The engine runs in a process of its own, as when it serves; requests are token ids and so are replies. Times are those
of the client, the way between the processes included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenspeed.bench.pairs import decode_window
from tokenspeed.bench.streams import Streams, Timing
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    child_environment,
)
from tokenspeed.engine.process import EngineProcess
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.tokenizer import Tokenizer

_EXTRA_STEPS = 8
"""Beyond what is counted, where several sequences decode: they do not begin in the same step."""
_IMPORTED = """
import tokenspeed.engine.worker, tokenspeed.execution
words = open("/proc/self/status").read().split()
print(int(words[words.index("VmRSS:") + 1]) * 1024)
"""


def main() -> None:
    """Serve standard input until it ends; with --load-only say how long loading takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="alias, folder or file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--num-seqs", type=int, required=True, help="sequences at once")
    parser.add_argument("--context", type=int, required=True, help="tokens that each of them may have")
    parser.add_argument("--weights", choices=("exact", "packed"), default="packed")
    parser.add_argument("--load-only", action="store_true")
    options = parser.parse_args()
    config = config_of(options)
    if options.load_only:
        print(json.dumps(load_times(config)), flush=True)
    else:
        asyncio.run(serve(config))


def config_of(options: argparse.Namespace) -> EngineConfig:
    """As `tokenspeed serve` would be told: with room for these sequences, and nothing else set."""
    return EngineConfig(
        model=ModelConfig(model=options.model, weights=options.weights, max_model_len=options.context),
        cache=CacheConfig(kv_tokens=options.num_seqs * options.context),
        scheduler=SchedulerConfig(max_num_seqs=options.num_seqs),
        device=DeviceConfig(device="cpu", num_threads=options.threads),
    ).validate()


async def serve(config: EngineConfig) -> None:
    """Answer line after line."""
    began = time.perf_counter()
    engine: list[EngineProcess] = []

    def launch() -> EngineProcess:
        engine.append(EngineProcess.spawn(config))
        return engine[-1]

    client = await EngineClient.start(launch, config)
    try:
        hello: dict[str, Any] = {"ready_s": time.perf_counter() - began}
        kernels = ", ".join(f"{each.op} {each.solution}" for each in client.info.kernels)
        hello |= {"pids": [engine[0].pid, os.getpid()], "describes": f"{config.model.weights} weights | {kernels}"}
        print(json.dumps(hello), flush=True)
        answers = Answers(client, engine[0].pid)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answers.answer(json.loads(line))), flush=True)
    finally:
        await client.stop()


class Answers:
    """What a started engine is asked."""

    def __init__(self, client: EngineClient, engine_pid: int) -> None:
        self._client, self._streams, self._engine_pid = client, Streams(client), engine_pid

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a line says."""
        match request["do"]:
            case "prompt":
                return await self._prompt(request["prompts"])
            case "prepare":
                await self._run(request["prompts"], 1)
                return {}
            case "decode":
                return await self._decode(request["prompts"], request["num_tokens"])
            case _:
                return self._memory()

    async def _prompt(self, prompts: list[list[int]]) -> dict[str, Any]:
        """All of them at once, to the most likely token after each."""
        timings = await self._run(prompts, 1)
        seconds = max(each.end_s for each in timings) - min(each.submitted_s for each in timings)
        assert not any(each.cached_len for each in timings), "a prompt was in the prefix cache"
        return {"seconds": seconds, "num_tokens": sum(map(len, prompts)), "first_token_ids": _first(timings)}

    async def _decode(self, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        """num_tokens greedy ones after each of the prompts, which are in the prefix cache but for their end."""
        extra = 1 if len(prompts) == 1 else 1 + _EXTRA_STEPS
        timings = await self._run(prompts, num_tokens + extra)
        num_found, seconds = decode_window(timings)
        return {"seconds": seconds, "num_tokens": num_found, "first_token_ids": _first(timings)}

    async def _run(self, prompts: list[list[int]], num_tokens: int) -> list[Timing]:
        return await asyncio.gather(*(self._streams.run(prompt, num_tokens, 0.0) for prompt in prompts))

    def _memory(self) -> dict[str, Any]:
        """Of the engine's process; base_bytes: one that has imported what it has, and nothing more. own_bytes: of this
        process, which in its place would be the server."""
        pid, imports = self._engine_pid, [sys.executable, "-c", _IMPORTED]
        base = subprocess.run(imports, capture_output=True, text=True, check=True, env=child_environment(2)).stdout
        return {
            "base_bytes": int(base),
            "rss_bytes": resident_bytes(pid, "VmRSS"),
            "peak_bytes": resident_bytes(pid, "VmHWM"),
            "own_bytes": resident_bytes(os.getpid(), "VmHWM"),
            "parts": {"KV": self._client.info.kv_bytes},
        }


def load_times(config: EngineConfig) -> dict[str, float]:
    """Seconds from the call, with everything imported: until the weights are in place, until the tokenizer is, and
    until the first request could be taken, both one after the other. The first run of a model packs, others map."""
    from tokenspeed.execution import ModelRunner

    source = open_model(config.model)  # imports what it needs
    assert source.tokenizer is not None, f"{config.model.model} has no tokenizer"
    done: dict[str, float] = {}
    began = time.perf_counter()

    def progress(stage: str, num_done: int, num_all: int, unit: str) -> None:
        del unit
        if stage == "load" and num_done == num_all:
            done["weights_s"] = time.perf_counter() - began

    source = open_model(config.model)
    runner = ModelRunner.create(config, source, progress)
    created = time.perf_counter()
    assert source.tokenizer is not None
    Tokenizer.from_source(source.tokenizer)
    done["tokenizer_s"], done["ready_s"] = time.perf_counter() - created, time.perf_counter() - began
    runner.close(keeps=True)  # so that later runs find what the first one packed
    return done


def _first(timings: Sequence[Timing]) -> list[int]:
    return [each.token_ids[0] for each in timings]


def resident_bytes(pid: int, field: str) -> int:
    """VmRSS (now) or VmHWM (at most so far) of a process."""
    words = Path(f"/proc/{pid}/status").read_text().split()
    return int(words[words.index(f"{field}:") + 1]) * 1024


if __name__ == "__main__":
    main()
