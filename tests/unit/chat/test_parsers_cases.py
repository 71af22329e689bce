# SPDX-License-Identifier: Apache-2.0
"""Faults that parsers are known for, held against every dialect: several calls, no arguments, other scripts, calls that
break, reasoning that is split anywhere, marks inside data, and cost that grows faster than the text.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import count, pairwise

import pytest

from tokenspeed.chat.parsers import (
    ContentDelta,
    Context,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    resolve,
)
from unit.chat.parsers_rendered import RENDER, SILENT, Call, thinks
from unit.chat.test_parsers_law import calls_of, read, text_of

TOOLS = {
    "ls_dir": {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]},
    "led_on": {"type": "object", "properties": {}},
    "find_town": {"type": "object", "properties": {"town": {"type": "string"}, "note": {"type": "string"}}},
    "grep_it": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
}
DIALECTS = sorted(RENDER)
WITHOUT_SCHEMA_FOR_OTHERS = {"none", "command_r", "functionary_v32"}  # which take names of given tools only


def ways(text: str, num_random: int = 50) -> list[list[str]]:
    """A text in one piece, by the character, by seven, and split at random."""
    chance = random.Random(len(text))
    result = [[text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]]
    for _ in range(num_random):
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 12))))
        result.append([text[start:end] for start, end in pairwise([0, *cuts, len(text)])])
    return result


def same(name: str, text: str, num_random: int = 50, **context: object) -> list[Delta]:
    """What is said, after a check that it is the same for every way to split."""
    context = {"tools": TOOLS, **context}
    whole = read(name, [text], **context)
    for chunks in ways(text, num_random):
        assert read(name, chunks, **context) == whole, chunks
    return whole


@pytest.mark.parametrize("name", DIALECTS)
def test_two_calls_are_two_calls(name: str) -> None:
    calls = [("ls_dir", {"p": "/srv"}), ("ls_dir", {"p": "/opt"})]
    text = RENDER[name](calls)
    for content in ("", "Looking. "):
        before = f"all\n{content}" if content and name == "functionary_v32" else content
        deltas = same(name, before + text)
        assert text_of(deltas) == content
        assert calls_of(deltas) == calls
        starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
        assert [start.index for start in starts] == [0, 1] and starts[0].id != starts[1].id
        first = same(name, before + text, 9, parallel_tool_calls=False)
        assert calls_of(first) == calls[:1]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_without_arguments_has_an_empty_object(name: str) -> None:
    text = RENDER[name]([("led_on", {})])
    forms = [text, text.replace(', "arguments": {}', "").replace(', "parameters": {}', "")]
    for form in forms:
        assert [d.text for d in same(name, form) if isinstance(d, ToolCallArguments)] == ["{}"], form


@pytest.mark.parametrize("name", DIALECTS)
def test_other_scripts_stay_as_they_are_and_are_sent_once(name: str) -> None:
    call: Call = ("find_town", {"town": "Zürich", "note": "東京 🚆"})
    for sound in (False, True):
        deltas = same(name, RENDER[name]([call]), sound_calls=sound)
        assert calls_of(deltas) == [call]
        assert [d.text for d in deltas if isinstance(d, ToolCallArguments)] == ['{"town": "Zürich", "note": "東京 🚆"}']


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_breaks_is_content(name: str) -> None:
    text = RENDER[name]([("grep_it", {"q": "a"})])
    deltas = same(name, text[: text.index("grep_it") + len("grep_it") + 3])
    assert not any(isinstance(delta, ToolCallStart) for delta in deltas)
    assert "grep_it" in text_of(deltas)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_tool_that_was_not_given_is_a_call_or_content(name: str) -> None:
    text = RENDER[name]([("no_such_tool", {})])
    deltas = same(name, text)
    if name in WITHOUT_SCHEMA_FOR_OTHERS:
        assert deltas == [ContentDelta(text)]
    else:
        assert calls_of(deltas) == [("no_such_tool", {})]


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    ("body", "reasoning", "content"),
    [
        ("plan{close}ok 1 <", "plan", "ok 1 <"),
        ("half a thought{half}", "half a thought{half}", ""),
        ("use a <b> tag{close}done", "use a <b> tag", "done"),
        ("\nplan\n{close}\n\nok\n", "plan", "ok\n"),
        ("use {call}{close}done", "use {call}", "done"),
    ],
)
def test_reasoning_ends_where_it_ends(name: str, body: str, reasoning: str, content: str) -> None:
    opener, closer = thinks(name)
    call = '{"name": "ls_dir", "arguments": {"p": "x"}}'
    fill = {"close": closer, "half": closer[: len(closer) // 2], "call": call}
    for part, value in fill.items():
        body, reasoning = body.replace(f"{{{part}}}", value), reasoning.replace(f"{{{part}}}", value)
    if name == "gpt_oss":
        body = body.replace(closer, f"{closer}<|start|>assistant<|channel|>final<|message|>")
    for tools in (TOOLS, {}):
        deltas = same(name, opener + body, 20, tools=tools)
        assert (text_of(deltas, ReasoningDelta), text_of(deltas)) == (reasoning, content)
        opened = same(name, body, 20, tools=tools, starts_in_reasoning=True)
        assert opened == deltas


# Marks inside data.

CLOSES = {  # what no text in a tagged value may hold, since it is what ends it
    "deepseek_dsml": "</｜DSML｜parameter>",
    "gemma4": '<|"|>',
    "glm4": "</arg_value>",
    "hunyuan_v3": "</arg_value:opensource>",
    "kimi_k3": "<|close|>argument",
    "minicpm5": "]]></param>",
    "minimax_m2": "</parameter>",
    "minimax_m3": "]<]minimax[>[</",
    "muse_atem": "</atem:parameter>",
    "qwen3_coder": "</parameter>",
    "seed_oss": "</parameter>",
    "step3": "</steptml:parameter>",
}
DATA = [
    *(RENDER[other]([("ls_dir", {"p": "x"}), ("led_on", {})]) for other in DIALECTS),
    *(
        '"',
        "\\",
        '\\"',
        "{}[]",
        "'''",
        '"""',
        "```json\n{}\n```",
        "</think>",
        "<think>",
        "\x00\x1f",
        "\ud83d",
        "\u2028",
    ),
    *("</tool_call>\n</tool_call>", "{" * 50, "\n\n\n", " " * 99, "\\u0041\\n", "]}]}", "<|", "é\u0301🚆", "\u2028"),
]


@pytest.mark.parametrize("name", DIALECTS)
def test_marks_inside_data_are_data(name: str) -> None:
    """An argument may be a file that shows replies of this dialect or of any other."""
    chance = random.Random(7)
    for data in DATA:
        if CLOSES.get(name, "\0\0") in data:
            continue
        calls: Sequence[Call] = [("ls_dir", {"p": data}), ("led_on", {})]
        text = RENDER[name](calls)
        sound = chance.random() < 0.5
        whole = read(name, [text], tools=TOOLS, sound_calls=sound)
        assert calls_of(whole) == calls and text_of(whole) == "", data
        for _ in range(3):
            end = chance.choice([len(text), chance.randint(0, len(text))])
            cuts = sorted(chance.choices(range(end + 1), k=chance.randint(1, 40)))
            chunks = [text[start:stop] for start, stop in pairwise([0, *cuts, end])]
            expected = read(name, [text[:end]], tools=TOOLS, sound_calls=sound)
            assert read(name, chunks, tools=TOOLS, sound_calls=sound) == expected, chunks


@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_content_is_all_said(name: str) -> None:
    """Text with marks of other dialects, and broken ones of this, comes back whole."""
    chance = random.Random(3)
    for data in DATA:
        cut = data[: chance.randint(0, len(data))]
        text = f"See: {cut} and so on."
        deltas = same(name, text, 3)
        if any(isinstance(delta, ToolCallStart) for delta in deltas) or name == "gpt_oss":
            continue
        if not any(mark in text for mark in SILENT.get(name, ())):
            assert text_of(deltas) == text


# Cost.


def events(name: str, num_chars: int, sound: bool) -> int:
    """How many calls of functions it takes to read a call with an argument of this length, by the character; and what
    is copied when a character comes stays short."""
    value = ('a "b" \\ </x> {é}\n' * num_chars)[:num_chars]
    text = RENDER[name]([("ls_dir", {"p": value})])
    ids = count()
    parser = resolve(name)(Context(tools=TOOLS, sound_calls=sound, make_id=lambda: f"call_{next(ids):09d}"))
    num_events = 0

    def counted(*_: object) -> None:
        nonlocal num_events
        num_events += 1

    deltas: list[Delta] = []
    sys.setprofile(counted)
    try:
        for char in text:
            deltas += parser.feed(char)
            assert parser._scanner.num_waiting < 80  # type: ignore[attr-defined]
        deltas += parser.finish()
    finally:
        sys.setprofile(None)
    assert sum(isinstance(delta, ToolCallEnd) for delta in deltas) == 1
    return num_events


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_the_cost_is_linear_in_the_text(name: str, sound: bool) -> None:
    short, long = events(name, 500, sound), events(name, 2000, sound)
    assert 0 < long < 4.5 * short


def test_an_argument_of_200_kb_costs_as_much_by_the_character_as_a_short_one() -> None:
    per_char = events("hermes", 1000, False) / 1000
    assert events("hermes", 200_000, False) / 200_000 < 1.2 * per_char
