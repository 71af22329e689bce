# SPDX-License-Identifier: Apache-2.0
"""What is measured of an engine: one request at a time (A, B), many at once (C), and sessions of agents (D).

Knows shapes and streams. Knows no floor and prints nothing.

A  batch 1 after 1K tokens: decode, and time to the first token
B  batch 1 after 32K tokens: decode, and tokens of the prompt a second
C  16 and 64 requests after 8K tokens each: the window in which all of them decode
D  16 sessions of four turns: 8K tokens, then 1K more each turn, 150 tokens out
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tokenspeed.bench.streams import Streams, Timing

PHASES = "ABCD"
Measured = dict[str, float]
"""Figures of one repetition, by name; seconds, or counts a second."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Lengths in tokens. turn_len: what comes back from a tool between two turns."""

    short_len: int = 1024
    short_out: int = 257
    long_len: int = 32768
    long_out: int = 129
    batch_len: int = 8192
    batch_out: tuple[int, int] = (320, 256)
    batches: tuple[int, ...] = (16, 64)
    sessions: int = 16
    turns: int = 4
    turn_len: int = 1024
    turn_out: int = 150

    def shrunk(self, factor: int) -> Shapes:
        """All lengths over `factor`, for small machines and models."""

        def over(length: int, least: int = 4) -> int:
            return max(least, length // factor)

        return Shapes(
            over(self.short_len),
            over(self.short_out),
            over(self.long_len),
            over(self.long_out),
            over(self.batch_len),
            (over(self.batch_out[0], 8), over(self.batch_out[1], 8)),
            self.batches,
            self.sessions,
            self.turns,
            over(self.turn_len),
            over(self.turn_out),
        )

    def kv_tokens(self, phase: str) -> int:
        """Tokens in the cache that a phase needs at once."""
        return {
            "A": self.short_len + self.short_out,
            "B": self.long_len + self.long_out,
            "C": max(self.batches) * (self.batch_len + max(self.batch_out)),
            "D": self.sessions * self.session_len,
        }[phase]

    def longest(self, phase: str) -> int:
        """Tokens of the longest sequence of a phase."""
        return self.kv_tokens(phase) // {"A": 1, "B": 1, "C": max(self.batches), "D": self.sessions}[phase]

    @property
    def session_len(self) -> int:
        """Tokens of a session after its last turn."""
        return self.batch_len + self.turns * self.turn_out + (self.turns - 1) * self.turn_len


class Prompts:
    """Random token ids, new ones each time: ids from a middle part of the vocabulary, where it is large."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._low, self._high = min(1000, vocab_size // 2), min(100_000, vocab_size)

    def take(self, length: int) -> list[int]:
        """A prompt."""
        ids: list[int] = self._rng.integers(self._low, self._high, length).tolist()
        return ids


async def warm_up(streams: Streams, prompts: Prompts, shapes: Shapes) -> None:
    """All sizes once, so that no measured request pays for what is set up lazily."""
    await streams.run(prompts.take(min(64, shapes.short_len)), 16)
    await streams.run(prompts.take(shapes.batch_len), 8, 0.0)
    for num_requests, length in ((16, 300), (64, 100)):
        prompt_len = min(length, shapes.batch_len)
        await asyncio.gather(*(streams.run(prompts.take(prompt_len), 24) for _ in range(num_requests)))


async def alone(streams: Streams, prompts: Prompts, prompt_len: int, num_tokens: int) -> Measured:
    """Phases A and B: one greedy request."""
    timing = await streams.run(prompts.take(prompt_len), num_tokens, 0.0)
    return {
        "decode_tokens_s": timing.decode_tokens_s,
        "token_s": 1.0 / timing.decode_tokens_s,
        "ttft_s": timing.ttft_s,
        "prefill_tokens_s": prompt_len / timing.ttft_s,
    }


async def batch(streams: Streams, prompts: Sequence[list[int]], num_tokens: int) -> Measured:
    """Phase C: all at once, drawn at temperature 1; what counts is the window in which all decode."""
    timings = await asyncio.gather(*(streams.run(prompt, num_tokens) for prompt in prompts))
    begin_s = max(timing.arrivals[0].at_s for timing in timings)
    end_s = max(timing.end_s for timing in timings)
    num_in_window = sum(
        arrival.num_tokens for timing in timings for arrival in timing.arrivals if begin_s < arrival.at_s <= end_s
    )
    gaps = [gap for timing in timings for gap in _gaps(timing, begin_s, end_s)]
    return {
        "decode_tokens_s": num_in_window / (end_s - begin_s),
        "itl_s": statistics.median(gaps),
        "window_s": end_s - begin_s,
        "first_tokens_s": begin_s - min(timing.submitted_s for timing in timings),
        "num_tokens": num_in_window,
        "num_cached": sum(timing.cached_len for timing in timings),
    }


async def agents(streams: Streams, prompts: Prompts, shapes: Shapes) -> Measured:
    """Phase D: each session's next turn holds all of the last, its reply, and what a tool said."""
    turns: list[tuple[int, Timing]] = []

    async def session(prompt: list[int]) -> None:
        for turn in range(shapes.turns):
            timing = await streams.run(prompt, shapes.turn_out)
            turns.append((turn, timing))
            prompt = [*prompt, *timing.token_ids, *prompts.take(shapes.turn_len)]

    begins = [prompts.take(shapes.batch_len) for _ in range(shapes.sessions)]
    await asyncio.gather(*(session(prompt) for prompt in begins))
    wall_s = max(timing.end_s for _, timing in turns) - min(timing.submitted_s for _, timing in turns)
    num_out = shapes.sessions * shapes.turns * shapes.turn_out
    num_in = shapes.sessions * (shapes.batch_len + (shapes.turns - 1) * shapes.turn_len)
    later = [timing for turn, timing in turns if turn > 0]
    return {
        "wall_s": wall_s,
        "out_tokens_s": num_out / wall_s,
        "new_tokens_s": (num_in + num_out) / wall_s,
        "decode_tokens_s_user": statistics.median(timing.decode_tokens_s for _, timing in turns),
        "tokens_s_user": statistics.median(
            shapes.turn_out / (timing.end_s - timing.submitted_s) for _, timing in turns
        ),
        "ttft_first_s": statistics.median(timing.ttft_s for turn, timing in turns if turn == 0),
        "ttft_later_s": statistics.median(timing.ttft_s for timing in later),
        "num_cached_later": statistics.median(timing.cached_len for timing in later),
    }


async def measure(
    phase: str,
    streams: Streams,
    prompts: Prompts,
    shapes: Shapes,
    *,
    reps: int,
    on_figures: Callable[[str, Measured], None],
) -> None:
    """Run one phase, telling the figures of each repetition under a name such as "C16"."""
    match phase:
        case "A":
            for _ in range(reps):
                on_figures("A", await alone(streams, prompts, shapes.short_len, shapes.short_out))
        case "B":
            for _ in range(reps):
                on_figures("B", await alone(streams, prompts, shapes.long_len, shapes.long_out))
        case "C":
            known: list[list[int]] = []
            for size in shapes.batches:
                num_new = size - len(known)
                known += [prompts.take(shapes.batch_len) for _ in range(num_new)]
                for rep in range(reps):
                    figures = await batch(streams, known, shapes.batch_out[min(rep, 1)])
                    if rep == 0:  # later ones find their prompts in the prefix cache
                        figures["prefill_tokens_s"] = num_new * shapes.batch_len / figures["first_tokens_s"]
                    on_figures(f"C{size}", figures)
        case "D":
            for _ in range(reps):
                on_figures("D", await agents(streams, prompts, shapes))


def medians(repetitions: Sequence[Measured]) -> Measured:
    """Of each figure, over the repetitions that have it."""
    names = dict.fromkeys(itertools.chain.from_iterable(repetitions))
    return {name: statistics.median(rep[name] for rep in repetitions if name in rep) for name in names}


def _gaps(timing: Timing, begin_s: float, end_s: float) -> Iterator[float]:
    for before, after in itertools.pairwise(timing.arrivals):
        if before.at_s >= begin_s and after.at_s <= end_s:
            yield after.at_s - before.at_s
