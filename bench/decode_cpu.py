# SPDX-License-Identifier: Apache-2.0
"""Decode speed of one stream on the CPU, ours (exact weights in float32 and in bfloat16) beside transformers bf16: same
file, same threads, same run.

Prints a line a round and ends with one JSON object. The floor is the bytes of all weights over the read bandwidth that
this run measures; the engines take turns, so a noisy machine harms all alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.generation.streamers import BaseStreamer

from tokenspeed import AsyncLLM, SamplingParams
from tokenspeed.core.config import CacheConfig, DeviceConfig, DType, EngineConfig, ModelConfig
from tokenspeed.llm.input_processor import TokensPrompt


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token arrives; the first call carries the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def read_bandwidth() -> float:
    """Bytes a second that this machine reads from memory with the threads in use, best of five."""
    data = torch.ones(256 * 1024 * 1024 // 4)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 4 / (time.perf_counter() - start))
    return best


def peer_round(model: torch.nn.Module, token_ids: list[int], num_tokens: int) -> float:
    clock = _Clock()
    model.generate(  # type: ignore[operator]
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        streamer=clock,
    )
    return (num_tokens - 1) / (clock.times[-1] - clock.times[1])


async def our_round(llm: AsyncLLM, token_ids: list[int], num_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    times: list[float] = []
    async for output in llm.generate(TokensPrompt(tuple(token_ids)), params):
        times += [time.perf_counter()] * len(output.outputs[0].token_ids)
    return (len(times) - 1) / (times[-1] - times[0])


async def start(args: argparse.Namespace, dtype: DType) -> AsyncLLM:
    model = ModelConfig(model=args.model, dtype=dtype, weights="exact")
    cache = CacheConfig(kv_tokens=2 * (args.prompt_len + args.num_tokens))
    return await AsyncLLM.start(EngineConfig(model=model, cache=cache, device=DeviceConfig(num_threads=args.threads)))


def load_peer(path: Path) -> torch.nn.Module:
    """Dense bf16 weights, as from a safetensors checkpoint."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval()


async def compare(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    engines = {"float32": await start(args, "float32"), "bfloat16": await start(args, "bfloat16")}
    llm = engines["float32"]
    peer = load_peer(Path(llm.source.path))
    text = "The history of computing is a history of people who count. " * 40
    token_ids = llm.tokenizer.encode(text)[: args.prompt_len]
    rates: dict[str, list[float]] = {"float32": [], "bfloat16": [], "peer": []}
    for index in range(args.rounds + 1):
        row = {name: await our_round(engine, token_ids, args.num_tokens) for name, engine in engines.items()}
        row["peer"] = await asyncio.to_thread(peer_round, peer, token_ids, args.num_tokens)
        if index > 0:  # the first round warms all up
            for name, rate in row.items():
                rates[name].append(rate)
            print(
                f"round {index}: tokenspeed float32 {row['float32']:6.1f} tok/s, bfloat16 {row['bfloat16']:6.1f} tok/s"
                f"   transformers bf16 {row['peer']:6.1f} tok/s",
                flush=True,
            )
    num_parameters = llm.info.num_parameters
    for engine in engines.values():
        await engine.shutdown()
    return report(args, rates, num_parameters)


def report(args: argparse.Namespace, rates: dict[str, list[float]], num_parameters: int) -> dict[str, object]:
    """The medians, the floors and where they were measured."""
    median = {name: statistics.median(values) for name, values in rates.items()}
    bandwidth = read_bandwidth()
    return {
        "benchmark": "decode_cpu",
        "model": args.model,
        "prompt_len": args.prompt_len,
        "num_tokens": args.num_tokens,
        "threads": args.threads,
        "tokenspeed_float32_tok_s": round(median["float32"], 1),
        "tokenspeed_bfloat16_tok_s": round(median["bfloat16"], 1),
        "transformers_bf16_tok_s": round(median["peer"], 1),
        "ratio_float32": round(median["float32"] / median["peer"], 2),
        "ratio_bfloat16": round(median["bfloat16"] / median["peer"], 2),
        "floor_float32_tok_s": round(bandwidth / (4 * num_parameters), 1),
        "floor_bfloat16_tok_s": round(bandwidth / (2 * num_parameters), 1),
        "read_gb_s": round(bandwidth / 1e9, 1),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    print(json.dumps(asyncio.run(compare(parser.parse_args()))))


if __name__ == "__main__":
    main()
