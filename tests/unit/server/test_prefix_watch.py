# SPDX-License-Identifier: Apache-2.0
"""Where a conversation departs from an earlier one, and why; nothing is said of one that goes on."""

from __future__ import annotations

import pytest

from tokenspeed.llm.input_processor import ChatPrompt
from tokenspeed.server.prefix_watch import Fingerprint, divergence

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def prompt(*messages: str, tools: str = "AB", **kwargs: object) -> Fingerprint:
    """Messages such as `u1`: a role's letter and a text. tools: one letter each."""
    rendered = [{"role": ROLES[message[0]], "content": message[1:]} for message in messages]
    return Fingerprint.of(ChatPrompt(rendered, [{"name": name} for name in tools] or None, template_kwargs=kwargs))


EARLIER = ("s0", "u1", "a2", "t3", "a4", "u5")


@pytest.mark.parametrize(
    "later",
    [EARLIER, (*EARLIER, "a6"), (*EARLIER, "a6", "t7", "s8"), EARLIER[:3], EARLIER[:1]],
    ids=["again", "reply", "more", "back", "far back"],
)
def test_nothing_is_said_of_what_goes_on(later: tuple[str, ...]) -> None:
    assert divergence(prompt(*later), prompt(*EARLIER)) is None


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (("s0", "u1", "a2", "tX", "a4", "u5", "a6"), "message 3, edited"),
        (("s0", "u1", "a2", "t3", "a4", "uX"), "message 5, edited"),
        (("s0", "uX"), "message 1, edited, 4 dropped after it"),
        (("sX", "u1", "a2", "t3", "a4", "u5"), "message 0, system message changed"),
        (("u1", "a2", "t3", "a4", "u5"), "message 0, removed (compaction)"),
        (("s0", "u1", "a4", "u5", "a6"), "message 2, removed (compaction)"),
        (("s0", "s9", "u1", "a2", "t3", "a4", "u5"), "message 1, inserted"),
        (("s0", "u1", "a2", "s9", "a4", "u5"), "message 3, system message changed"),
        (("s0", "a1", "a2", "t3", "a4", "u5"), "message 1, edited"),
        (("s0", "a2", "u1", "t3", "a4", "u5"), "message 1, edited"),
    ],
)
def test_the_message_and_what_became_of_it(later: tuple[str, ...], told: str) -> None:
    assert divergence(prompt(*later), prompt(*EARLIER)) == f"prefix-diverged: {told}"


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ("ABC", "1 added"),
        ("A", "1 removed"),
        ("", "2 removed"),
        ("BA", "reordered"),
        ("AX", "1 added, 1 removed"),
    ],
)
def test_tools_change_at_the_first_new_message(tools: str, told: str) -> None:
    later = prompt(*EARLIER, "a6", "t7", tools=tools)
    assert divergence(later, prompt(*EARLIER)) == f"prefix-diverged: message 6, tool list changed ({told})"


def test_all_reasons_are_said_in_one_line() -> None:
    later = prompt("s0", "uX", "a2", tools="A", enable_thinking=False)
    assert divergence(later, prompt(*EARLIER)) == (
        "prefix-diverged: message 1, tool list changed (1 removed), template kwargs changed, edited, 3 dropped after it"
    )


def test_the_order_of_template_kwargs_is_no_difference() -> None:
    assert divergence(prompt("u1", a=1, b=2), prompt("u1", b=2, a=1)) is None
    assert divergence(prompt("u1", a=1), prompt("u1", a=2)) == "prefix-diverged: message 1, template kwargs changed"


def test_an_unlike_conversation_is_not_related() -> None:
    earlier = prompt(*EARLIER)
    assert prompt("s0", "uX", tools="C").is_related(earlier), "it begins alike"
    assert prompt("u9").is_related(earlier), "the same tools"
    assert not prompt("s9", "u8", "u1", tools="").is_related(earlier)
    assert not prompt("s9", "u8", tools="").is_related(prompt("s0", "u1", tools=""))


def test_only_hashes_are_kept() -> None:
    secret = "a very secret text"
    fingerprint = prompt(f"u{secret}", tools="AB", note=secret)
    assert secret not in repr(fingerprint)
    assert all(isinstance(part, int) for part in (*fingerprint.messages, *fingerprint.tools, fingerprint.kwargs))
