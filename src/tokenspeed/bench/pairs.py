# SPDX-License-Identifier: Apache-2.0
"""Two engines that take turns at the same work, and the ratios of their speeds, pair by pair.

A machine that others use slows both down alike, but not for long: what lies seconds apart is comparable, and what lies
minutes apart is not. So a ratio is taken of each pair, and the median of ratios is what counts. Knows neither engine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed.bench.streams import Timing
from tokenspeed.core.errors import ConfigError

PAIRS_MAX = 100
HEADER = ("figure", "ours tok/s", "peer tok/s", "ratio", "lowest", "highest", "floor tok/s", "of floor", "others")


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of work. length: tokens of each prompt, or of each context that is there before decoding begins; at
    least one. num_tokens: decoded after it, 0 where the prompt is what is measured. batch: sequences at once."""

    length: int
    num_tokens: int
    batch: int

    @property
    def name(self) -> str:
        """As it is called in results, such as decode_128_at_4096_batch_8."""
        at = f"_at_{self.length}" if self.num_tokens and self.length > 1 else ""
        batch = f"_batch_{self.batch}" if self.batch > 1 else ""
        return f"decode_{self.num_tokens}{at}{batch}" if self.num_tokens else f"prompt_{self.length}{batch}"

    @property
    def sequence_len(self) -> int:
        """Tokens of a sequence at its end."""
        return self.length + self.num_tokens


def cells_of(
    batches: Sequence[int], prompt_lens: Sequence[int], context_lens: Sequence[int], num_tokens: int
) -> tuple[Cell, ...]:
    """Each batch size: prompts and decodes of each length. A context of 0 is one of a single token."""
    return tuple(
        cell
        for batch in batches
        for cell in (
            *(Cell(length, 0, batch) for length in prompt_lens),
            *(Cell(max(1, length), num_tokens, batch) for length in context_lens),
        )
    )


def chosen(cells: Sequence[Cell], names: Sequence[str]) -> tuple[Cell, ...]:
    """Those of these names; all where none is given. Raises ConfigError."""
    known = {cell.name: cell for cell in cells}
    for name in names:
        if name not in known:
            raise ConfigError(f"--cell {name}: use one of {', '.join(known)}")
    return tuple(cell for cell in cells if not names or cell.name in names)


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's part of a pair. first_token_ids: the most likely token after each prompt."""

    seconds: float
    num_tokens: int
    first_token_ids: tuple[int, ...] = ()

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """others: processors that other processes kept busy meanwhile, in the mean."""

    ours: Turn
    peer: Turn
    others: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        return self.ours.tokens_s / self.peer.tokens_s


Side = Literal["ours", "peer"]


def order(index: int) -> tuple[Side, Side]:
    """Who begins a pair: in turn, so that neither is always the one that finds a cold or a warm machine."""
    return ("ours", "peer") if index % 2 == 0 else ("peer", "ours")


def alternate(num_pairs: int, take: Callable[[Side, int], Turn], busy: Callable[[], float]) -> Iterator[Pair]:
    """Pairs as they are measured. take: lets one engine do the work of pair number `index`. busy: processor seconds
    over the wall clock's that others have had since it was last asked."""
    for index in range(num_pairs):
        busy()
        turns = {side: take(side, index) for side in order(index)}
        yield Pair(turns["ours"], turns["peer"], busy())


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one cell. Speeds are medians in tokens a second, ratio the median of the pairs' ratios; floor: tokens a second
    that the machine allows, None where that is unknown. agreeing: of the prompts, those after which both engines hold
    the same token to be the most likely one."""

    ours: float
    peer: float
    ratio: float
    ratio_low: float
    ratio_high: float
    others: float
    num_pairs: int
    floor: float | None
    agreeing: int
    num_prompts: int

    @classmethod
    def of(cls, pairs: Sequence[Pair], floor: float | None) -> Summary:
        """pairs: at least one."""
        ratios = [pair.ratio for pair in pairs]
        both = [ids for pair in pairs for ids in _both_first(pair)]
        return cls(
            ours=statistics.median(pair.ours.tokens_s for pair in pairs),
            peer=statistics.median(pair.peer.tokens_s for pair in pairs),
            ratio=statistics.median(ratios),
            ratio_low=min(ratios),
            ratio_high=max(ratios),
            others=statistics.median(pair.others for pair in pairs),
            num_pairs=len(pairs),
            floor=floor,
            agreeing=sum(our_id == peer_id for our_id, peer_id in both),
            num_prompts=len(both),
        )

    def row(self, name: str) -> tuple[str, ...]:
        """Under HEADER."""
        floor = ("-", "-") if self.floor is None else (f"{self.floor:.1f}", f"{self.ours / self.floor:.0%}")
        speeds = (f"{self.ours:.1f}", f"{self.peer:.1f}")
        ratios = (f"{ratio:.2f}" for ratio in (self.ratio, self.ratio_low, self.ratio_high))
        return (name, *speeds, *ratios, *floor, f"{self.others:.2f}")


def result_line(models: Mapping[str, Mapping[str, Summary]], more: Mapping[str, Any]) -> str:
    """One JSON object in one line: under `ratio` what counts, of each model and cell; under `figures` all of it."""
    ratios = {model: {name: round(each.ratio, 3) for name, each in cells.items()} for model, cells in models.items()}
    figures = {model: {name: _rounded(each) for name, each in cells.items()} for model, cells in models.items()}
    return json.dumps({"ratio": ratios, "figures": figures, **more})


def decode_window(timings: Iterable[Timing]) -> tuple[int, float]:
    """(tokens, seconds) of the time in which all of these decode: from the last of their first tokens to the first of
    their last ones."""
    every = list(timings)
    begin_s = max(timing.arrivals[0].at_s for timing in every)
    end_s = min(timing.end_s for timing in every)
    arrivals = [arrival for timing in every for arrival in timing.arrivals]
    return sum(each.num_tokens for each in arrivals if begin_s < each.at_s <= end_s), end_s - begin_s


def _both_first(pair: Pair) -> Iterator[tuple[int, int]]:
    return zip(pair.ours.first_token_ids, pair.peer.first_token_ids, strict=True)


def _rounded(summary: Summary) -> dict[str, float | int | None]:
    """Four digits are more than repeat."""
    found = {name: getattr(summary, name) for name in Summary.__slots__}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()}
