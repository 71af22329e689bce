# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed bench latency` and `bench throughput`: an engine in its own process, asked by token ids, and the floor of
each figure beside it.

Ties the ceilings of the machine, the cost of the model and the phases together. Knows no text and no HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenspeed.bench import report
from tokenspeed.bench.floor import Ceilings, ModelCost
from tokenspeed.bench.phases import Measured, Prompts, Shapes, measure, medians, warm_up
from tokenspeed.bench.streams import Streams
from tokenspeed.checkpoints import ModelSource, open_model
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import CapacityError, ConfigError, StartError
from tokenspeed.core.ipc import EngineInfo
from tokenspeed.engine.process import EngineProcess
from tokenspeed.llm.engine_client import EngineClient, ProgressFn

SHRINK_MAX = 1024
REPS_MAX = 100
HEADER = ("figure", "floor", "measured", "x floor", "rate")
_CEILINGS_WAIT_S = 120.0
_DECODE_FIGURES = ("token_s", "itl_s", "user_token_s")
_ENGINE_FACTS = (
    "model_type",
    "num_parameters",
    "weight_bytes",
    "packed_bytes",
    "device",
    "dtype",
    "block_size",
    "num_kv_blocks",
    "kv_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "load_s",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What it does at most, and whether engines run on a GPU here."""

    is_gpu: bool
    ceilings: Ceilings


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which phases, how often, and by how much all lengths are shrunk."""

    phases: str
    reps: int = 3
    shrink: int = 1
    seed: int | None = None

    def check(self, known: str) -> Wanted:
        """This, or ConfigError when a value is out of its range."""
        if not self.phases or any(phase not in known for phase in self.phases):
            raise ConfigError(f"--phases {self.phases}: use letters of {known}")
        if not 1 <= self.reps <= REPS_MAX:
            raise ConfigError(f"--reps {self.reps}: use 1 to {REPS_MAX}")
        if not 1 <= self.shrink <= SHRINK_MAX:
            raise ConfigError(f"--shrink {self.shrink}: use 1 to {SHRINK_MAX}")
        return self

    @property
    def shapes(self) -> Shapes:
        """Lengths of all phases."""
        return Shapes() if self.shrink == 1 else Shapes().shrunk(self.shrink)


def machine_of(config: EngineConfig) -> Machine:
    """Measured by a process that is gone before an engine starts, so that it takes no memory from one."""
    command = [sys.executable, "-m", "tokenspeed.bench.ceilings", "--device", config.device.device]
    try:
        done = subprocess.run(
            [*command, "--dtype", config.model.dtype],
            capture_output=True,
            text=True,
            timeout=_CEILINGS_WAIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [""]
        raise StartError(f"the machine could not be measured: {lines[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise StartError(f"the machine could not be measured within {_CEILINGS_WAIT_S:.0f} s") from error
    found = json.loads(done.stdout.splitlines()[-1])
    return Machine(bool(found.pop("is_gpu")), Ceilings(**found))


def run(
    config: EngineConfig, machine: Machine, wanted: Wanted, progress: ProgressFn | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Start an engine and measure it. Returns what is kept as JSON; `rows` makes a table of it. Raises StartError."""
    return asyncio.run(_run(config, machine, wanted, progress, say))


def rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows under HEADER: medians over the repetitions beside their floors."""
    for name, repetitions in result["figures"].items():
        median, floors = medians(repetitions), result["floors"].get(name, {})
        for label, figure, rate in _SHOWN[name[0]]:
            if figure not in median:
                continue
            floor, value = floors.get(figure), median[figure]
            shown_rate = "-" if rate is None or rate not in median else f"{median[rate]:.1f} tok/s"
            shown_floor = "-" if floor is None else _time(floor)
            yield f"{name} {label}", shown_floor, _time(value), report.ratio(value, floor), shown_rate


_SHOWN: dict[str, tuple[tuple[str, str, str | None], ...]] = {
    "A": (("decode", "token_s", "decode_tokens_s"), ("first token", "ttft_s", None)),
    "B": (("decode", "token_s", "decode_tokens_s"), ("prompt", "ttft_s", "prefill_tokens_s")),
    "C": (("between tokens", "itl_s", "decode_tokens_s"), ("first tokens, cold", "cold_s", "prefill_tokens_s")),
    "D": (
        ("wall", "wall_s", "out_tokens_s"),
        ("token of a user", "user_token_s", "decode_tokens_s_user"),
        ("first token, turn 1", "ttft_first_s", None),
        ("first token, later turns", "ttft_later_s", None),
    ),
}
"""Of each phase: what a row is called, its figure, and the rate beside it."""


async def _run(
    config: EngineConfig, machine: Machine, wanted: Wanted, progress: ProgressFn | None, say: Callable[[str], None]
) -> dict[str, Any]:
    shapes = wanted.shapes
    source = await asyncio.to_thread(open_model, config.model, progress)
    began_s = time.monotonic()
    client = await EngineClient.start(partial(EngineProcess.spawn, config), config, progress)
    try:
        start_s = time.monotonic() - began_s
        _require_room(client.info, wanted, shapes)
        say(f"{config.model.model} on {machine.ceilings}; started in {start_s:.1f} s")
        figures = await _measure(client, wanted, shapes, say)
    finally:
        await client.stop()
    floors = _floors(source, client.info, machine.ceilings, shapes, figures)
    return {
        **report.origin(),
        "model": config.model.model,
        "ceilings": dataclasses.asdict(machine.ceilings),
        "engine": _described(client.info),
        "start_s": start_s,
        "shapes": dataclasses.asdict(shapes),
        "floors": floors,
        "figures": figures,
    }


async def _measure(
    client: EngineClient, wanted: Wanted, shapes: Shapes, say: Callable[[str], None]
) -> dict[str, list[Measured]]:
    seed = time.time_ns() if wanted.seed is None else wanted.seed
    streams, prompts = Streams(client), Prompts(client.info.vocab_size, seed)
    figures: dict[str, list[Measured]] = {}

    def keep(name: str, measured: Measured) -> None:
        if "prefill_tokens_s" in measured and name.startswith("C"):
            measured["cold_s"] = measured["first_tokens_s"]
        if name == "D":
            measured["user_token_s"] = 1.0 / measured["decode_tokens_s_user"]
        figures.setdefault(name, []).append(measured)
        say(f"{name}: " + ", ".join(f"{figure} {value:.5g}" for figure, value in measured.items()))

    await warm_up(streams, prompts, shapes)
    for phase in wanted.phases:
        await measure(phase, streams, prompts, shapes, reps=wanted.reps, on_figures=keep)
    return figures


def _require_room(info: EngineInfo, wanted: Wanted, shapes: Shapes) -> None:
    capacity = info.num_kv_blocks * info.block_size
    for phase in wanted.phases:
        if shapes.longest(phase) > info.max_model_len:
            raise CapacityError(
                f"phase {phase} has sequences of {shapes.longest(phase)} tokens and the engine takes "
                f"{info.max_model_len}; raise --max-model-len, or divide the lengths with --shrink"
            )
        if shapes.kv_tokens(phase) > capacity:
            raise CapacityError(
                f"phase {phase} needs {shapes.kv_tokens(phase)} tokens of KV at once and the pool has {capacity}; "
                "raise --memory-fraction or --kv-tokens, or divide the lengths with --shrink"
            )


def _described(info: EngineInfo) -> dict[str, Any]:
    kernels = {binding.op: binding.solution for binding in info.kernels}
    return {**{name: getattr(info, name) for name in _ENGINE_FACTS}, "kernels": kernels}


def _floors(
    source: ModelSource, info: EngineInfo, ceilings: Ceilings, shapes: Shapes, figures: dict[str, list[Measured]]
) -> dict[str, dict[str, float]]:
    """Of each figure that has one; none for a model whose configuration does not say what is needed. Packed weights
    are multiplied as bytes, of which nobody has measured how many the machine computes: then only what is read counts,
    and prompts have no floor."""
    kv_bytes_token = info.kv_bytes / (info.num_kv_blocks * info.block_size)
    try:
        cost = ModelCost.of(source.config, info.num_parameters, info.dtype, kv_bytes_token)
    except (KeyError, TypeError, ValueError):
        return {}

    is_packed = info.packed_bytes > 0
    if is_packed:
        itemsize = min(cost.itemsize, info.weight_bytes / info.num_parameters)
        cost = dataclasses.replace(cost, itemsize=itemsize)

    def decode_s(context_len: int, num_out: int, num_rows: int = 1) -> float:
        num_bytes, flop = cost.decode((context_len + num_out // 2,) * num_rows)
        return ceilings.floor_s(num_bytes, 0.0 if is_packed else flop)

    def prefill_s(num_new: int, num_cached: int = 0) -> float:
        return ceilings.floor_s(*cost.prefill(num_new, num_cached))

    floors = {
        "A": {"token_s": decode_s(shapes.short_len, shapes.short_out), "ttft_s": prefill_s(shapes.short_len)},
        "B": {"token_s": decode_s(shapes.long_len, shapes.long_out), "ttft_s": prefill_s(shapes.long_len)},
        "D": {"wall_s": _session_s(shapes, decode_s, prefill_s), "ttft_later_s": _later_s(shapes, prefill_s)},
    }
    floors["D"]["user_token_s"] = decode_s(shapes.batch_len, shapes.turn_out, shapes.sessions)
    num_known = 0
    for size in shapes.batches:
        itl_s = decode_s(shapes.batch_len, shapes.batch_out[-1], size)
        floors[f"C{size}"] = {"itl_s": itl_s, "cold_s": (size - num_known) * prefill_s(shapes.batch_len)}
        num_known = size
    if is_packed:
        floors = {name: {key: each[key] for key in _DECODE_FIGURES if key in each} for name, each in floors.items()}
    return {name: floors[name] for name in figures}


def _session_s(shapes: Shapes, decode_s: Callable[..., float], prefill_s: Callable[..., float]) -> float:
    """All prompts one after the other, then all sessions decoding side by side, turn after turn."""
    total_s, length = 0.0, 0
    for turn in range(shapes.turns):
        num_new = shapes.turn_len if turn else shapes.batch_len
        total_s += shapes.sessions * prefill_s(num_new, length)
        length += num_new
        total_s += shapes.turn_out * decode_s(length, shapes.turn_out, shapes.sessions)
        length += shapes.turn_out
    return total_s


def _later_s(shapes: Shapes, prefill_s: Callable[..., float]) -> float:
    """One turn alone over what the second turn finds."""
    return prefill_s(shapes.turn_len, shapes.batch_len + shapes.turn_out)


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1.0 else f"{seconds * 1e3:.3f} ms"
