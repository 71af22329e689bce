# SPDX-License-Identifier: Apache-2.0
"""What is remembered of sessions: sums, times, branches; and that it stays bounded."""

from __future__ import annotations

import msgspec

from tokenspeed.llm.input_processor import ChatPrompt
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.server.session_book import SessionBook
from tokenspeed.server.session_list import SessionCard


class Clock:
    """Unix time by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def chat(*texts: str) -> ChatPrompt:
    roles = ("user", "assistant")
    return ChatPrompt([{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)])


def summary(*reasons: str, num_prompt: int = 100, num_cached: int = 60, num_generated: int = 21) -> RequestSummary:
    return RequestSummary("r", num_prompt, num_cached, num_generated, 0.2, 0.5, 0.9, reasons)


def only(book: SessionBook, *, any_held: bool = True) -> SessionCard:
    (card,) = book.listing(any_held=any_held).data
    return card


def test_sums_and_the_last_reply() -> None:
    book = SessionBook(clock := Clock())
    book.compare("s", chat("hi"))
    book.began("s")
    assert (only(book).requests, only(book).running, only(book).turns) == (1, 1, 0)
    book.ended("s", summary("tool_calls"), None)
    clock.now += 5
    book.began("s")
    book.ended("s", summary("stop", num_prompt=200, num_cached=112, num_generated=11), None)
    card = only(book)
    assert (card.requests, card.running, card.turns) == (2, 0, 2)
    assert (card.prompt_tokens, card.cached_tokens, card.generated_tokens) == (300, 172, 32)
    assert (card.context_tokens, card.output_tokens_per_s, card.finish_reason) == (211, 20.0, "stop")
    assert (card.first_seen, card.last_seen) == (1000.0, 1005.0)


def test_a_session_that_is_being_answered_shows_its_prompt() -> None:
    book = SessionBook(Clock())
    book.began("s")
    book.answering("s", 90)
    assert (only(book).context_tokens, only(book).prompt_tokens, only(book).running) == (90, 0, 1)


def test_what_broke_off_is_no_turn_and_nothing_is_held_of_it() -> None:
    book = SessionBook(Clock())
    book.began("s")
    book.ended("s", summary("abort"), 300.0)
    book.began("s")
    book.refused("s")
    card = only(book)
    assert (card.requests, card.turns, card.running) == (2, 0, 0)
    assert (card.held_until, card.finish_reason) == (None, "refused")


def test_pages_are_held_until_they_are_not() -> None:
    book = SessionBook(clock := Clock())

    def turn() -> None:
        book.began("s")
        book.ended("s", summary("stop"), 300.0)

    turn()
    assert only(book).held_until == 1300.0
    assert only(book, any_held=False).held_until is None, "the engine holds nothing at all"
    clock.now = 1301.0
    assert only(book).held_until is None, "the time is over"
    turn()
    book.released("s")
    assert only(book).held_until is None
    turn()
    book.began("s")
    assert only(book).held_until is None, "the next turn runs on them"


def test_a_session_says_where_its_prompt_departed() -> None:
    book = SessionBook(Clock())
    assert book.compare("s", chat("a")) is None
    assert book.compare("s", chat("a", "b", "c")) is None
    told = book.compare("s", chat("a", "X", "c"))
    assert told == "prefix-diverged: message 1, edited"
    assert book.compare("other", chat("a", "Y", "c")) is None
    assert {card.session: card.prefix for card in book.listing(any_held=False).data} == {"s": told, "other": None}


def test_several_conversations_under_one_key_go_on_side_by_side() -> None:
    book = SessionBook(Clock())
    assert book.compare("s", chat("task", "one")) is None
    assert book.compare("s", chat("name this session")) is None, "unlike the first"
    assert book.compare("s", chat("task", "two")) is not None, "the first time it forks"
    for turn in range(3):
        for branch in ("one", "two"):
            assert book.compare("s", chat("task", branch, *"abcdef"[: turn + 1])) is None


def test_the_session_silent_for_longest_is_forgotten_first() -> None:
    book = SessionBook(Clock(), num_sessions_max=3)
    for key in ("a", "b", "c"):
        book.began(key)
    book.began("a")
    book.began("d")
    assert [card.session for card in book.listing(any_held=False).data] == ["d", "a", "c"]


def test_hashes_are_bounded_too() -> None:
    book = SessionBook(Clock(), num_hashes_max=500)
    for number in range(50):
        book.compare(f"s{number}", chat(*(f"{number}-{index}" for index in range(40))))
    assert 5 <= len(book) <= 12
    book.compare("long", chat(*map(str, range(2000))))
    assert [card.session for card in book.listing(any_held=False).data] == ["long"], "the newest always stays"


def test_a_session_that_comes_again_and_again_is_counted_once() -> None:
    book = SessionBook(Clock(), num_hashes_max=500)
    book.compare("other", chat("a"))
    for number in range(100):
        book.compare("s", chat(*(str(index) for index in range(10 + number))))
    assert len(book) == 2


def test_the_answer_is_json_of_the_struct() -> None:
    book = SessionBook(Clock())
    book.began("s")
    (card,) = msgspec.json.decode(msgspec.json.encode(book.listing(any_held=False)))["data"]
    assert tuple(card) == SessionCard.__struct_fields__
