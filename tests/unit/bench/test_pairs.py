# SPDX-License-Identifier: Apache-2.0
"""Engines take turns, ratios are those of pairs, and the last line is one JSON object."""

from __future__ import annotations

import json

import pytest

from tokenspeed.bench.pairs import (
    HEADER,
    Cell,
    Pair,
    Side,
    Summary,
    Turn,
    alternate,
    cells_of,
    chosen,
    decode_window,
    result_line,
)
from tokenspeed.bench.streams import Arrival, Timing
from tokenspeed.core.errors import ConfigError


def pair(ours: float, peer: float, others: float = 0.0) -> Pair:
    """Of these speeds."""
    return Pair(Turn(1.0 / ours, 1, (1,)), Turn(1.0 / peer, 1, (1,)), others)


def test_each_engine_begins_every_second_pair_and_never_runs_twice_in_one() -> None:
    calls: list[tuple[Side, int]] = []

    def take(side: Side, index: int) -> Turn:
        calls.append((side, index))
        return Turn(1.0, 1)

    assert len(list(alternate(3, take, lambda: 0.0))) == 3
    assert calls == [("ours", 0), ("peer", 0), ("peer", 1), ("ours", 1), ("ours", 2), ("peer", 2)]


def test_turns_are_told_apart_whoever_begins() -> None:
    pairs = list(alternate(2, lambda side, _: Turn(1.0, 30 if side == "ours" else 10), lambda: 0.0))
    assert [each.ratio for each in pairs] == [3.0, 3.0]


def test_what_others_did_is_counted_over_the_pair_alone() -> None:
    events: list[str] = []

    def busy() -> float:
        events.append("busy")
        return float(len(events))

    def take(side: Side, _index: int) -> Turn:
        events.append(side)
        return Turn(1.0, 1)

    found = list(alternate(2, take, busy))
    assert events == ["busy", "ours", "peer", "busy", "busy", "peer", "ours", "busy"]
    assert [each.others for each in found] == [4.0, 8.0]


def test_the_ratio_is_the_median_of_ratios_and_not_the_ratio_of_medians() -> None:
    # The machine is slow during the second pair: both engines are, and the ratio is not.
    summary = Summary.of([pair(8, 10), pair(3, 1), pair(20, 10)], 60.0)
    assert summary.ratio == pytest.approx(2.0)
    assert (summary.ours, summary.peer) == (pytest.approx(8.0), pytest.approx(10.0))
    assert (summary.ratio_low, summary.ratio_high) == (pytest.approx(0.8), pytest.approx(3.0))
    assert summary.num_pairs == 3


def test_agreement_counts_prompts() -> None:
    pairs = [Pair(Turn(1, 1, (5, 6)), Turn(1, 1, (5, 7))), Pair(Turn(1, 1, (8, 9)), Turn(1, 1, (8, 9)))]
    summary = Summary.of(pairs, None)
    assert (summary.agreeing, summary.num_prompts) == (3, 4)


def test_engines_that_answer_for_different_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError):
        Summary.of([Pair(Turn(1, 1, (5, 6)), Turn(1, 1, (5,)))], None)


def test_rows_fit_the_header() -> None:
    with_floor = Summary.of([pair(30, 10, 0.25)], 60.0).row("decode_128")
    assert with_floor == ("decode_128", "30.0", "10.0", "3.00", "3.00", "3.00", "60.0", "50%", "0.25")
    assert len(Summary.of([pair(30, 10)], None).row("decode_128")) == len(HEADER) == len(with_floor)


def test_the_last_line_is_one_object_with_a_ratio_of_each_model_and_figure() -> None:
    summaries = {"prompt_512": Summary.of([pair(30, 10)], None), "decode_128": Summary.of([pair(21, 10)], 100.0)}
    line = result_line({"tiny": summaries}, {"threads": 2})
    assert "\n" not in line
    found = json.loads(line)
    assert found["ratio"] == {"tiny": {"prompt_512": 3.0, "decode_128": 2.1}}
    assert found["threads"] == 2
    assert found["figures"]["tiny"]["decode_128"]["floor"] == 100.0
    assert found["figures"]["tiny"]["prompt_512"]["floor"] is None


def test_cells_are_named_by_what_is_not_usual() -> None:
    names = [cell.name for cell in cells_of((1, 8), (512, 4096), (0, 4096), 128)]
    assert names == [
        "prompt_512",
        "prompt_4096",
        "decode_128",
        "decode_128_at_4096",
        "prompt_512_batch_8",
        "prompt_4096_batch_8",
        "decode_128_batch_8",
        "decode_128_at_4096_batch_8",
    ]


def test_cells_are_chosen_by_name() -> None:
    cells = cells_of((1,), (512,), (0,), 128)
    assert chosen(cells, []) == cells
    assert chosen(cells, ["decode_128"]) == (Cell(1, 128, 1),)
    with pytest.raises(ConfigError, match=r"decode_64.*prompt_512, decode_128"):
        chosen(cells, ["decode_64"])


def timing(*at: float) -> Timing:
    """A token at each time."""
    return Timing(0.0, tuple(Arrival(each, 1) for each in at), tuple(range(len(at))), 0)


def test_a_window_of_one_stream_begins_after_its_first_token() -> None:
    assert decode_window([timing(1.0, 2.0, 3.0)]) == (2, 2.0)


def test_in_the_window_all_streams_decode() -> None:
    assert decode_window([timing(1.0, 2.0, 3.0, 4.0), timing(2.0, 3.0, 4.0, 5.0)]) == (4, 2.0)
