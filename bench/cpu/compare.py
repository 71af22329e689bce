# SPDX-License-Identifier: Apache-2.0
"""Ours and llama.cpp on the CPU: the same GGUF file, the same prompts as token ids, as many threads, in turn.

Each engine stays loaded in a process of its own and waits while the other one works. Of each figure the ratio is taken
pair by pair, beside the least time that the machine allows. Prints tables and ends with one JSON object:
{"ratio": {model: {figure: ours over llama.cpp}}, ...}. `make bench-cpu` builds llama.cpp first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenspeed.bench import report
from tokenspeed.bench.packed_floor import Floors, Peaks
from tokenspeed.bench.pairs import (
    HEADER,
    PAIRS_MAX,
    Cell,
    Pair,
    Side,
    Summary,
    Turn,
    alternate,
    cells_of,
    chosen,
    result_line,
)
from tokenspeed.bench.workers import BusyMeter, Worker, WorkerError
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import ConfigError, StartError
from tokenspeed.llm.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "bench-cpu"
_ROOM = 256
"""Tokens of a sequence beyond the longest prompt: what is decoded, and a few."""
_PAGE_LEN = 64
"""No engine has longer pages by default."""
_PAUSE_S = 0.05
"""Before each turn, so that threads of the other engine have gone to sleep."""


class Texts:
    """Prompts that no run has seen yet: pieces of the documentation, each from another place."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
        self._lead = tokenizer.encode("")
        self._ids = tokenizer.encode(text, add_special_tokens=False)
        self._begins = list(range(len(self._ids)))
        random.Random(seed).shuffle(self._begins)

    def take(self, length: int, batch: int) -> list[list[int]]:
        """`batch` prompts of `length` tokens."""
        return [self._one(self._begins.pop(), length) for _ in range(batch)]

    def _one(self, begin: int, length: int) -> list[int]:
        turned = self._ids[begin:] + self._ids[:begin]
        while len(turned) < length:
            turned = turned + turned
        return [*self._lead, *turned][:length]


class Bench:
    """One model file and what is measured of it."""

    def __init__(self, model: str, options: argparse.Namespace, peaks: Peaks) -> None:
        self._model, self._options = model, options
        source = open_model(ModelConfig(model=model))
        if source.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer to make prompts with")
        self._path = source.path
        self._floors = Floors.of(source, peaks)
        self._tokenizer = Tokenizer.from_source(source.tokenizer)
        self.summaries: dict[str, Summary] = {}
        self.pairs: dict[str, list[Pair]] = {}
        self.memory: dict[str, Any] = {}
        self.load: dict[str, Any] = {}
        self.describes: dict[str, str] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Loading first, then batch size by batch size, with engines that have room for no more."""
        if not self._options.no_load:
            self.load = self._measure_load(room_of(cells))
            print(f"{self._model}: load {_shown_load(self.load)}", flush=True)
        for batch in sorted({cell.batch for cell in cells}):
            own = [cell for cell in cells if cell.batch == batch]
            with self._started(batch, room_of(own)) as workers:
                for cell in own:
                    self._measure(cell, workers)
                memory = {side: worker.ask({"do": "memory"}) for side, worker in workers.items()}
            self.memory[f"batch_{batch}"] = _with_ratios(memory)
            print(f"{self._model}: memory at batch {batch}: {_shown_memory(memory)}", flush=True)
        print(report.table(HEADER, [summary.row(name) for name, summary in self.summaries.items()]), flush=True)

    def _commands(self, batch: int, context_len: int) -> dict[Side, list[str]]:
        sizes = ["--threads", str(self._options.threads), "--num-seqs", str(batch), "--context", str(context_len)]
        weights = ["--weights", self._options.weights]
        return {
            "ours": [sys.executable, str(HERE / "ours.py"), str(self._path), *sizes, *weights],
            "peer": [str(self._options.peer), str(HERE / "peer.py"), str(self._path), *sizes],
        }

    @contextmanager
    def _started(self, batch: int, context_len: int) -> Iterator[dict[Side, Worker]]:
        workers: dict[Side, Worker] = {}
        try:
            for side, command in self._commands(batch, context_len).items():
                workers[side] = Worker(side, command, BUILT / f"{side}.log")
                self.describes[side] = workers[side].hello["describes"]
            yield workers
        finally:
            for worker in workers.values():
                worker.close()

    def _measure(self, cell: Cell, workers: dict[Side, Worker]) -> None:
        texts = Texts(self._tokenizer, seed=cell.batch * 100_000 + cell.sequence_len)
        known = texts.take(cell.length, cell.batch)
        if cell.num_tokens:
            for worker in workers.values():
                worker.ask({"do": "prepare", "prompts": known})
        fresh: list[list[list[int]]] = []

        def request(index: int, num_tokens: int, length: int) -> dict[str, Any]:
            if cell.num_tokens:
                return {"do": "decode", "prompts": known, "num_tokens": num_tokens}
            while len(fresh) <= index:
                fresh.append(texts.take(length, cell.batch))
            return {"do": "prompt", "prompts": fresh[index]}

        for worker in workers.values():  # whatever is set up lazily, at a small size
            worker.ask(request(0, 8, min(64, cell.length)))
        fresh.clear()

        def take(side: Side, index: int) -> Turn:
            asked = request(index, cell.num_tokens, cell.length)
            time.sleep(_PAUSE_S)
            found = workers[side].ask(asked)
            return Turn(found["seconds"], found["num_tokens"], tuple(found["first_token_ids"]))

        meter = BusyMeter([pid for worker in workers.values() for pid in worker.hello["pids"]] + [os.getpid()])
        pairs: list[Pair] = []
        for pair in alternate(self._options.pairs, take, meter.others):
            pairs.append(pair)
            print(f"{self._model} {cell.name} {len(pairs)}: {_shown_pair(pair)}", flush=True)
        self.pairs[cell.name] = pairs
        self.summaries[cell.name] = Summary.of(pairs, self._floors.tokens_s(cell))

    def _measure_load(self, context_len: int) -> dict[str, Any]:
        """In fresh processes that have imported what they need, the file in the cache of the system."""
        times: dict[Side, list[dict[str, float]]] = {"ours": [], "peer": []}
        self._path.read_bytes()
        for index in range(self._options.pairs):
            commands = list(self._commands(1, context_len).items())
            for side, command in commands if index % 2 == 0 else commands[::-1]:
                times[side].append(_load_times(side, command))
        ours, peer = (_medians(times[side]) for side in times)
        ratio = (ours["weights_s"] + ours["tokenizer_s"]) / peer["weights_s"]
        best = min(each["weights_s"] + each["tokenizer_s"] for each in times["ours"])
        return {"ours": ours, "peer": peer, "ratio": ratio, "ours_best_s": best, "num_pairs": self._options.pairs}


def room_of(cells: Sequence[Cell]) -> int:
    """Tokens that each sequence may have: whole pages."""
    room = max(cell.length for cell in cells) + _ROOM
    return -(-room // _PAGE_LEN) * _PAGE_LEN


def _medians(every: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in every) for name in every[0]}


def _load_times(side: Side, command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run([*command, "--load-only"], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise WorkerError(f"{side} could not load the model: {lines[-1]}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def _with_ratios(memory: dict[Side, dict[str, Any]]) -> dict[str, Any]:
    """In bytes. peak: the most that the process ever held. held: what it holds after all of it, without what importing
    took: weights, KV and scratch."""
    ours, peer = memory["ours"], memory["peer"]
    ours_held, peer_held = (each["rss_bytes"] - each["base_bytes"] for each in (ours, peer))
    return {
        "ours": ours,
        "peer": peer,
        "ratio_peak": ours["peak_bytes"] / peer["peak_bytes"],
        "ratio_held": ours_held / max(1, peer_held),
    }


def _shown_pair(pair: Pair) -> str:
    speeds = f"ours {pair.ours.tokens_s:.1f} tok/s, peer {pair.peer.tokens_s:.1f} tok/s"
    return f"{speeds}, ratio {pair.ratio:.2f}, others {pair.others:.2f} processors"


def _shown_load(load: dict[str, Any]) -> str:
    ours, peer = load["ours"], load["peer"]
    took = f"weights {ours['weights_s']:.2f} s, tokenizer {ours['tokenizer_s']:.2f} s, ready {ours['ready_s']:.2f} s"
    took += f" (weights and tokenizer at best {load['ours_best_s']:.2f} s)"
    return f"ours {took}; peer weights {peer['weights_s']:.2f} s, ready {peer['ready_s']:.2f} s"


def _shown_memory(memory: dict[Side, dict[str, Any]]) -> str:
    return "; ".join(
        f"{side} peak {each['peak_bytes'] >> 20} MiB, now {each['rss_bytes'] >> 20}, imports {each['base_bytes'] >> 20}"
        for side, each in memory.items()
    )


def measure_all(options: argparse.Namespace, make: Callable[..., Bench] = Bench) -> str:
    """Measure every model. Returns the JSON line. Raises StartError or WorkerError."""
    cells = chosen(
        cells_of(options.batches, options.lengths, (0, max(options.lengths)), options.num_tokens), options.cell
    )
    peaks = Peaks.measure(BUILT / "peaks", options.threads)
    print(f"{peaks}; load average {os.getloadavg()[0]:.2f}", flush=True)
    benches: dict[str, Bench] = {}
    for model in options.models:
        benches[model] = bench = make(model, options, peaks)
        bench.run(cells)
        if options.json is not None:
            report.write_json(options.json, _kept(benches, peaks))
    more = {
        "memory": {model: _memory_ratios(bench.memory) for model, bench in benches.items()},
        "load_s": {model: bench.load for model, bench in benches.items()},
        "peaks": peaks.as_json(),
        "threads": options.threads,
        "load_average": round(os.getloadavg()[0], 2),
        "commit": report.origin()["commit"],
    }
    return result_line({model: bench.summaries for model, bench in benches.items()}, more)


def _memory_ratios(memory: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        batch: {name: round(each[name], 3) for name in ("ratio_peak", "ratio_held")} for batch, each in memory.items()
    }


def _kept(benches: dict[str, Bench], peaks: Peaks) -> dict[str, Any]:
    """Every pair, for a file."""
    models = {
        model: {
            "pairs": {name: [_raw(pair) for pair in pairs] for name, pairs in bench.pairs.items()},
            "memory": bench.memory,
            "load": bench.load,
            "engines": bench.describes,
        }
        for model, bench in benches.items()
    }
    return {**report.origin(), "peaks": peaks.as_json(), "models": models}


def _raw(pair: Pair) -> dict[str, float]:
    return {"ours_tokens_s": pair.ours.tokens_s, "peer_tokens_s": pair.peer.tokens_s, "others": pair.others}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags. Raises ConfigError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"GGUF files or aliases ({', '.join(MODELS)})")
    parser.add_argument("--pairs", type=int, default=7, help="of each figure; ratios are medians over them")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--weights", choices=("exact", "packed"), default="packed", help="ours")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096], help="tokens of prompts and contexts")
    parser.add_argument("--num-tokens", type=int, default=128, help="decoded")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="sequences at once")
    parser.add_argument("--cell", action="append", default=[], metavar="NAME", help="only this figure, e.g. decode_128")
    parser.add_argument("--no-load", action="store_true", help="leave out how long loading takes")
    parser.add_argument("--json", metavar="FILE", help="also write every pair to this file")
    parser.add_argument("--peer", type=Path, default=BUILT / "venv" / "bin" / "python", help="Python with llama.cpp")
    options = parser.parse_args(arguments)
    if not 1 <= options.pairs <= PAIRS_MAX:
        raise ConfigError(f"--pairs {options.pairs}: use 1 to {PAIRS_MAX}")
    if not 1 <= options.num_tokens <= _ROOM - 16:
        raise ConfigError(f"--num-tokens {options.num_tokens}: use 1 to {_ROOM - 16}")
    if min(*options.lengths, *options.batches, options.threads) < 1:
        raise ConfigError("--lengths, --batches and --threads: give 1 or more")
    report.check_writable(options.json)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 where it was asked for what cannot be, 1 where an engine failed."""
    try:
        options = parse(arguments)
        if not options.peer.exists():
            raise ConfigError(f"there is no {options.peer}: `make bench-cpu` builds llama.cpp, once")
        print(measure_all(options))
    except (ConfigError, StartError, WorkerError) as error:
        print(f"bench-cpu: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
