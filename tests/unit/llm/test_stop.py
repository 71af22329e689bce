# SPDX-License-Identifier: Apache-2.0
"""Stop strings: no part of one is ever sent, and a near miss is sent as soon as it is one."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.llm.stop import StopScanner


def run(scanner: StopScanner, chunks: list[str]) -> tuple[str, str | None]:
    sent = ""
    for chunk in chunks:
        text, matched = scanner.feed(chunk)
        sent += text
        if matched is not None:
            return sent, matched
    return sent + scanner.flush(), None


def by_rule(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Cut at the first character where a stop string is complete; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def cut(text: str, rng: random.Random) -> list[str]:
    chunks = []
    while text:
        size = rng.randrange(0, 5)
        chunks.append(text[:size])
        text = text[size:]
    return chunks


STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@settings(deadline=None)
@given(st.text(alphabet="abcd", max_size=40), STOPS, st.booleans(), st.randoms(use_true_random=False))
def test_any_split_gives_what_the_rule_gives(
    text: str, stop: tuple[str, ...], include: bool, rng: random.Random
) -> None:
    expected = by_rule(text, stop, include)
    assert run(StopScanner(stop, include), [text]) == expected
    assert run(StopScanner(stop, include), list(text)) == expected
    assert run(StopScanner(stop, include), cut(text, rng)) == expected


@settings(deadline=None)
@given(st.text(alphabet="abc", max_size=30), STOPS)
def test_held_text_is_exactly_the_longest_end_that_begins_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    scanner = StopScanner(stop)
    sent = ""
    for place, character in enumerate(text, start=1):
        piece, matched = scanner.feed(character)
        if matched is not None:
            return
        sent += piece
        ends = [text[:place][start:] for start in range(place + 1)]
        assert text[len(sent) : place] == next(end for end in ends if any(s.startswith(end) for s in stop))


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_the_reported_case(size: int) -> None:
    text = '"alpha-DEFGHIJ-omega"'
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert run(StopScanner(("DEFGHIJ",)), chunks) == ('"alpha-', "DEFGHIJ")
    assert run(StopScanner(("DEFGHIJ",), include=True), chunks) == ('"alpha-DEFGHIJ', "DEFGHIJ")


def test_a_near_miss_is_flushed_at_once() -> None:
    scanner = StopScanner(("DEFGHIJ",))
    assert scanner.feed("alpha-DEFGHI") == ("alpha-", None)
    assert scanner.feed("X") == ("DEFGHIX", None)
    assert scanner.feed("-D") == ("-", None)
    assert scanner.flush() == "D"


def test_the_first_complete_one_wins_whatever_the_order_of_the_list() -> None:
    assert run(StopScanner(("zz", "b")), ["abzz"]) == ("a", "b")
    assert run(StopScanner(("ab", "abc")), ["xabc"]) == ("x", "ab")
    assert run(StopScanner(("c", "abc")), ["xabc"]) == ("x", "abc")


def test_after_a_match_nothing_more_is_sent() -> None:
    scanner = StopScanner(("END",))
    assert scanner.feed("oneENDtwo") == ("one", "END")
    assert scanner.feed("three") == ("", "END")
    assert scanner.flush() == ""
    assert scanner.matched == "END"


def test_without_stop_strings_text_passes() -> None:
    assert run(StopScanner(()), ["a", "b"]) == ("ab", None)


def test_an_empty_stop_string_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError):
        StopScanner(("",))


def test_cost_is_linear_for_the_worst_pattern() -> None:
    scanner = StopScanner(("a" * 2000 + "b",))
    start = time.perf_counter()
    run(scanner, ["a" * 1000] * 200)
    assert time.perf_counter() - start < 5.0
