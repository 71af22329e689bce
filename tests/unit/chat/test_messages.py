# SPDX-License-Identifier: Apache-2.0
"""Messages that mean the same become the same."""

from __future__ import annotations

import pytest

from tokenspeed.chat.messages import malformed_calls_as_text, normalise_messages
from tokenspeed.core.errors import InvalidRequestError


def call(arguments: object) -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": "run_it", "arguments": arguments}}


def arguments_of(message: dict[str, object]) -> list[object]:
    return [c["function"]["arguments"] for c in message["tool_calls"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "hi"}], "hi"),
        (
            [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                {"type": "input_text", "text": "b"},
            ],
            "a\nb",
        ),
        ([{"type": "output_text", "text": "o"}, {"type": "refusal", "refusal": "no"}], "o\nno"),
        ([], ""),
        (None, ""),
    ],
)
def test_text_content_is_one_string(content: object, text: str) -> None:
    assert normalise_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": "ü"}', {"b": 1, "a": "ü"}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ('{"cmd": ', '{"cmd": '),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_an_object_when_they_parse_and_text_when_not(arguments: object, expected: object) -> None:
    (message,) = normalise_messages([{"role": "assistant", "content": None, "tool_calls": [call(arguments)]}])
    assert arguments_of(message) == [expected]
    if isinstance(expected, dict):
        assert list(arguments_of(message)[0]) == list(expected)  # type: ignore[call-overload]


def test_null_fields_and_empty_tool_calls_are_absent() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [], "name": None, "function_call": None}
    assert normalise_messages([message]) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_all_names_that_templates_read(field: str) -> None:
    (message,) = normalise_messages([{"role": "assistant", "content": "x", field: "why"}])
    assert (message["reasoning_content"], message["thinking"]) == ("why", "why")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        (
            [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content[0]",
        ),
    ],
)
def test_what_is_no_text_is_refused_by_place(messages: list[dict[str, object]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages(messages)
    assert caught.value.param == param


def test_malformed_calls_move_into_the_content_and_good_ones_stay() -> None:
    message = {"role": "assistant", "content": "Look:", "tool_calls": [call('{"cmd": '), call({"ok": 1})]}
    mended = malformed_calls_as_text([{"role": "user", "content": "x"}, message])
    assert mended is not None
    assert mended[1]["content"] == 'Look:\nrun_it {"cmd": '
    assert arguments_of(mended[1]) == [{"ok": 1}]
    assert malformed_calls_as_text([{"role": "assistant", "tool_calls": [call({})]}]) is None


def test_the_callers_messages_are_left_alone() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}
    normalise_messages([message])
    assert message == {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')]}
