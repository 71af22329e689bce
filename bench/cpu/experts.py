# SPDX-License-Identifier: Apache-2.0
"""A layer of experts on a CPU: all of them as one op beside one by one, and what a call must read and multiply.

Each call routes anew, so that a small call meets weights that no cache has. Times are of the processor, all threads
together, and of the clock; the least of many counts. Prints a line a size and ends with one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tokenspeed.kernels.ops.packed_linear import FORMATS
from tokenspeed.kernels.ops.packed_linear.cases import drawn
from tokenspeed.kernels.platform import require_cpu_module
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.moe import Experts, ExpertsSpec, Routing

_ROUTINGS = 16


def main() -> None:
    """Each size, in turn one by one and as one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", choices=("float32", "bfloat16", *FORMATS), default="q4_k")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ff", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    options = parser.parse_args()
    require_cpu_module().set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        print(json.dumps({**vars(options), "sizes": measure(options)}))


def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds of each size."""
    layers = {"alone": layer_of(options, {"moe_experts": "reference"}), "as_one": layer_of(options, {})}
    layers["alone"].gate_up, layers["alone"].down = layers["as_one"].gate_up, layers["as_one"].down  # the same memory
    sizes = []
    for num_tokens in options.tokens:
        x_TD = torch.randn(num_tokens, options.hidden, dtype=dtype_of(options))
        routings = itertools.cycle([routing(options, num_tokens) for _ in range(_ROUTINGS)])
        result: dict[str, float] = {"tokens": num_tokens}
        for name, layer in layers.items():
            took = least(functools.partial(_call, layer, x_TD, routings), options.seconds)
            result |= {f"{name}_cpu_ms": took[0], f"{name}_wall_ms": took[1]}
        sizes.append(result)
        ratio = result["alone_cpu_ms"] / result["as_one_cpu_ms"]
        print("  ".join(f"{name} {value:.3f}" for name, value in result.items()), f" {ratio:.2f}x", flush=True)
    return sizes


def _call(layer: Experts, x_TD: torch.Tensor, routings: Iterator[Routing]) -> None:
    layer(x_TD, next(routings))


def layer_of(options: argparse.Namespace, overrides: dict[str, str]) -> Experts:
    ctx = BuildContext("cpu", dtype_of(options), overrides)
    layer = Experts(ctx, options.hidden, ExpertsSpec(options.experts, options.ff))
    if overrides:
        return layer
    for stack in (layer.gate_up, layer.down):
        num_experts, num_outputs, num_inputs = stack.weight.shape
        if options.weights in FORMATS:
            pieces = [drawn(options.weights, num_outputs, num_inputs, seed) for seed in range(num_experts)]
            stack.pack(pieces)
        else:
            stack.weight.data.normal_(std=num_inputs**-0.5)
    return layer


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if options.weights == "bfloat16" else torch.float32


def routing(options: argparse.Namespace, num_tokens: int) -> Routing:
    experts_TC = torch.rand(num_tokens, options.experts).topk(options.top_k, dim=1).indices
    return Routing(experts_TC, torch.full((num_tokens, options.top_k), 1.0 / options.top_k))


def least(call: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """Milliseconds of the processor and of the clock."""
    call()
    until = time.perf_counter() + seconds
    processor: list[float] = []
    clock: list[float] = []
    while len(clock) < 3 or time.perf_counter() < until:
        began = time.process_time(), time.perf_counter()
        call()
        processor.append(time.process_time() - began[0])
        clock.append(time.perf_counter() - began[1])
    return min(processor) * 1e3, min(clock) * 1e3


if __name__ == "__main__":
    main()
