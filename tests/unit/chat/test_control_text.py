# SPDX-License-Identifier: Apache-2.0
"""Control text in data is marked wherever data stands, and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.chat.control_text import _MARKS, ControlTexts, mark_data

CONTROLS = ControlTexts(("<|im_end|>", "<|im_start|>", "</think>", "<tool_call>"))
MARK = _MARKS[0]
BROKEN = f"<{MARK}|im_end|>"


def test_nothing_is_changed_where_data_holds_none() -> None:
    assert mark_data([{"role": "user", "content": "a < b | <|im_| x"}], None, CONTROLS) is None
    assert mark_data([{"role": "assistant", "content": "a</think>b<tool_call>"}], None, CONTROLS) is None


def test_data_is_marked_in_every_place_and_the_assistant_in_none() -> None:
    messages = [
        {"role": "system", "content": "never say <|im_end|>"},
        {"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]},
        {
            "role": "assistant",
            "content": "x</think><|im_end|>",
            "tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_end|>"]}}}],
        },
        {"role": "tool", "content": "a<|im_end|><|im_end|>b"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "ends with <|im_end|>"}}]
    marked = mark_data(messages, tools, CONTROLS)
    assert marked is not None and marked.mark == MARK
    assert [message["role"] for message in marked.messages] == [message["role"] for message in messages]
    assert marked.messages[0]["content"] == f"never say {BROKEN}"
    assert marked.messages[1]["content"] == [{"type": "text", "text": BROKEN}]
    assert marked.messages[2]["content"] == "x</think><|im_end|>"
    calls = marked.messages[2]["tool_calls"]
    assert calls == [{"function": {"name": "f", "arguments": {BROKEN: [BROKEN]}}}]
    assert marked.messages[3]["content"] == f"a{BROKEN}{BROKEN}b"
    assert marked.tools == [{"type": "function", "function": {"name": "f", "description": f"ends with {BROKEN}"}}]
    assert messages[0]["content"] == "never say <|im_end|>"


def test_a_mark_that_the_text_has_is_not_taken() -> None:
    marked = mark_data([{"role": "user", "content": f"{MARK}<|im_end|>"}], None, CONTROLS)
    assert marked is not None and marked.mark == _MARKS[1]


TEXTS = ("<|a|>", "<|a|>b", "<|", "|a", "aa", "[x]", "]^", "\\d", "<b>")


@settings(deadline=None)
@given(st.lists(st.sampled_from((*TEXTS, *"<|a>b[]x^\\d ")), max_size=20).map("".join))
def test_exactly_the_control_texts_that_are_there_are_found(text: str) -> None:
    controls = ControlTexts(TEXTS)
    assert controls.held_by(text) == {control for control in TEXTS if control in text}
    for place in range(len(text)):
        standing = [control for control in TEXTS if text.startswith(control, place)]
        assert controls.at(text, place) == max(standing, key=len, default=None)
        gapped = text[: place + 1] + MARK + text[place + 1 :]
        assert controls.at(gapped, place, gap=1) == controls.at(text, place)


def test_without_control_texts_nothing_is_found() -> None:
    assert ControlTexts(()).held_by("<|im_end|>") == set()
    assert mark_data([{"role": "user", "content": "x"}], None, ControlTexts(())) is None
