# SPDX-License-Identifier: Apache-2.0
"""What a parser says at once is what it would have said if it had been fed."""

from __future__ import annotations

import random

import pytest

from tokenspeed.chat.parsers import ContentDelta, Context, Delta, ReasoningDelta, joined, resolve

PIECES = ["word", " and", " ", "\n", "\n\n", "x = 1", "<", "tool_call", "<tool", "`", "```", "</think>", "é", "{", "}"]


def spoken(pieces: list[str], context: Context, *, at_once: bool) -> tuple[list[Delta], int]:
    parser, deltas, num_at_once = resolve("hermes")(context), [], 0
    for piece in pieces:
        delta = parser.at_once(piece) if at_once else None
        num_at_once += delta is not None
        deltas += parser.feed(piece) if delta is None else [delta]
    return joined([*deltas, *parser.finish()]), num_at_once


@pytest.mark.parametrize("tools", [{}, {"ls": {}}])
@pytest.mark.parametrize("thinks", [False, True])
def test_it_is_what_the_whole_text_says(tools: dict[str, dict[str, object]], thinks: bool) -> None:
    context, rng, num_at_once = Context(tools=tools, starts_in_reasoning=thinks), random.Random(3), 0
    for _ in range(300):
        pieces = rng.choices(PIECES, weights=[6, 6, 3, 3, 1, 4, 1, 1, 1, 1, 1, 1, 2, 1, 1], k=rng.randint(1, 30))
        whole, _ = spoken(["".join(pieces)], context, at_once=False)
        said, count = spoken(pieces, context, at_once=True)
        assert said == whole, pieces
        num_at_once += count
    assert num_at_once > 500, "most text needs no reading"


def test_it_says_nothing_where_it_would_have_to_remember() -> None:
    parser = resolve("hermes")(Context(tools={"ls": {}}))
    assert parser.at_once("a") is None, "before the first text: it may be reasoning or a call"
    parser.feed("So,\n")
    assert parser.at_once("a") is None, "a line break is withheld"
    parser.feed("it")
    assert parser.at_once(" is") == ContentDelta(" is")
    assert [parser.at_once(text) for text in ("", "<", "a ", "```")] == [None] * 4
    thinking = resolve("hermes")(Context(starts_in_reasoning=True))
    thinking.feed("Well, let")
    assert thinking.at_once(" me") == ReasoningDelta(" me")
