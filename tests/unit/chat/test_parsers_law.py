# SPDX-License-Identifier: Apache-2.0
"""The law of parsers, for every dialect: what is said depends on the text and not on how it was split, nothing is taken
back, nothing is lost, and what a template would render is read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import count, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenspeed.chat.parsers import (
    ContentDelta,
    Context,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    joined,
    names,
    resolve,
)
from unit.chat.parsers_rendered import EXAMPLE, RENDER, SILENT, TOOLS, Call, dumps, slug, thinks


def read(name: str, chunks: Sequence[str], *, finish: bool = True, **context: object) -> list[Delta]:
    """What a parser says of a text in these chunks, joined."""
    ids = count()
    given_context = {"tools": TOOLS, "make_id": lambda: f"call_{next(ids):09d}", **context}
    parser = resolve(name)(Context(**given_context))  # type: ignore[arg-type]
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return joined(deltas + (parser.finish() if finish else []))


def text_of(deltas: Sequence[Delta], kind: type[Delta] = ContentDelta) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))  # type: ignore[union-attr]


def calls_of(deltas: Sequence[Delta]) -> list[Call]:
    named = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    texts = [
        "".join(d.text for d in deltas if isinstance(d, ToolCallArguments) and d.index == index)
        for index in range(len(named))
    ]
    return [(name, json.loads(text)) for name, text in zip(named, texts, strict=True)]


def test_every_dialect_is_under_the_law() -> None:
    assert sorted(RENDER) == list(names())


# Texts: pieces of the dialect's own markup in any order, and good messages with damage.

PIECES = (
    *("<think>", "</think>", "```json", "```", "{", "}", "[", "]", '"', "\\", ":", ",", " ", "\n", "\r\n", "\t", "'"),
    *(
        '{"name": "ls_dir", "arguments": ',
        '{"p": "a"}',
        '"name"',
        "ls_dir",
        "edit",
        "null",
        "true",
        "-1.5e3",
        "é",
        "🚆",
    ),
    *(
        "\ud83d",
        "\\ud83d\\ude86",
        "\\u00",
        "<",
        "<|",
        ">",
        "(",
        ")",
        "=",
        "p",
        "text",
        "\x00",
        "\x1f",
        "\u3000",
        "x" * 70,
    ),
)


def own_pieces(name: str) -> list[str]:
    """The marks of a dialect, whole and in part."""
    opener, closer = thinks(name)
    whole = RENDER[name](EXAMPLE)
    marks = re.findall(r"<[^<>]+>|\[[A-Z_]+\]|[a-z]+=|to=|functions\.\w+", whole)
    marks = [*dict.fromkeys([*marks, opener, closer, "<|return|>" if name == "gpt_oss" else "<|start|>"])]
    return [*marks, *(mark[: len(mark) // 2] for mark in marks), RENDER[name](EXAMPLE[:1])]


@st.composite
def texts(draw: st.DrawFn, name: str) -> str:
    pieces = st.sampled_from([*own_pieces(name), *own_pieces(name), *PIECES])
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return "".join(draw(st.lists(pieces, max_size=14)))
    good = draw(st.sampled_from(["", "Hm. ", "\n\n"])) + RENDER[name](
        draw(st.lists(st.sampled_from(EXAMPLE), max_size=3))
    )
    if draw(st.booleans()):
        opener, closer = thinks(name)
        good = f"{opener}plan{closer}{good}"
    if kind == 1:
        return good[: draw(st.integers(0, len(good)))]
    start = draw(st.integers(0, len(good)))
    end = min(len(good), start + draw(st.integers(0, 3))) if kind == 2 else start
    return good[:start] + "".join(draw(st.lists(pieces, max_size=3))) + good[end:]


def splits(draw: st.DrawFn, text: str) -> list[str]:
    size = draw(st.sampled_from([0, 1, 2, 7]))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12))) if not size else range(size, len(text), size)
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize("name", sorted(RENDER))
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_deltas_do_not_depend_on_the_split(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    context = {
        "tools": data.draw(st.sampled_from([TOOLS, {}])),
        "starts_in_reasoning": data.draw(st.booleans()),
        "parallel_tool_calls": data.draw(st.booleans()),
        "sound_calls": data.draw(st.booleans()),
    }
    whole = read(name, [text], **context)
    assert read(name, data.draw(st.composite(splits)(text)), **context) == whole
    check_form(whole, sound=bool(context["sound_calls"]))
    if not context["parallel_tool_calls"]:
        assert sum(isinstance(d, ToolCallEnd) and d.complete for d in whole) <= 1
    marks = thinks(name)
    begins_with_reasoning = text.lstrip().startswith(marks) or context["starts_in_reasoning"]
    says_less = name == "gpt_oss" or any(mark in text for mark in SILENT.get(name, ()))
    if not says_less and not begins_with_reasoning and not any(isinstance(d, ToolCallStart) for d in whole):
        assert text_of(whole) == text


def check_form(deltas: Sequence[Delta], sound: bool) -> None:
    """Each call is a start, arguments and an end, in the order of its index; a complete one has an object."""
    calls = [d for d in deltas if not isinstance(d, ContentDelta | ReasoningDelta)]
    index = 0
    arguments = ""
    inside = False
    for delta in calls:
        assert delta.index == index
        if isinstance(delta, ToolCallStart):
            assert not inside and delta.name and delta.id
            inside, arguments = True, ""
        elif isinstance(delta, ToolCallArguments):
            assert inside
            arguments += delta.text
        else:
            assert inside and (delta.complete or sound)
            if delta.complete:
                assert isinstance(json.loads(arguments), dict)
            inside, index = False, index + 1
    assert not inside
    place = [isinstance(d, ContentDelta | ReasoningDelta) for d in deltas]
    starts = [i for i, d in enumerate(deltas) if isinstance(d, ToolCallStart)]
    ends = [i for i, d in enumerate(deltas) if isinstance(d, ToolCallEnd)]
    assert not any(any(place[start:end]) for start, end in zip(starts, ends, strict=True))


# What is rendered is read back.

words = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
strings = st.one_of(
    words, st.sampled_from(["</tool_call>", "</think>", "```", "<|call|>", '{"a": "', "[TOOL_CALLS]", "\\n"])
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), strings)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)
ls_dir = st.tuples(
    st.just("ls_dir"), st.fixed_dictionaries({"p": strings}, optional={"n": st.integers(-(10**20), 10**20)})
)
edit = st.tuples(
    st.just("edit"),
    st.fixed_dictionaries(
        {},
        optional={
            "old text": strings,
            "lines": st.lists(values, max_size=3),
            "flag": st.sampled_from([True, False, None]),
            "meta": st.dictionaries(words, values, max_size=3),
        },
    ),
)


@pytest.mark.parametrize("name", sorted(RENDER))
@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(ls_dir, edit), min_size=1, max_size=3), st.booleans(), st.data())
def test_rendered_calls_are_read_back(name: str, calls: list[Call], sound: bool, data: st.DataObject) -> None:
    opener, closer = thinks(name)
    if name == "minimax_m3":  # which does not write what types nested values without a schema have
        calls = [(n, {k: v for k, v in a.items() if k not in ("lines", "meta")}) for n, a in calls]
    assume(name != "gemma4" or dumps(calls).count('<|\\"|>') == 0)  # which has no way to write its quote in text
    text = RENDER[name](calls)
    start = "<|start|>assistant" if name == "gpt_oss" else ""
    deltas = read(name, data.draw(st.composite(splits)(f"{opener}\nI see.\n{closer}{start}{text}")), sound_calls=sound)
    if name in ("llama_pythonic", "lfm2"):
        calls = [(n, {slug(k): v for k, v in a.items()}) for n, a in calls]
    assert calls_of(deltas) == list(calls)
    assert text_of(deltas, ReasoningDelta) == "I see."
    assert text_of(deltas) == ""


@pytest.mark.parametrize("name", sorted(RENDER))
def test_a_text_that_ends_anywhere_keeps_what_was_sent(name: str) -> None:
    text = "Hm. " + RENDER[name](EXAMPLE)
    whole = read(name, [text], sound_calls=True)
    calls = calls_of(read(name, [text]))
    ids = count()
    parser = resolve(name)(Context(tools=TOOLS, sound_calls=True, make_id=lambda: f"call_{next(ids):09d}"))
    deltas: list[Delta] = []
    for end in range(len(text)):
        sent = joined(deltas)
        for have, final in zip(sent, whole, strict=False):
            assert have == final or (type(have) is type(final) and final.text.startswith(have.text)), (have, final)  # type: ignore[union-attr]
        cut = read(name, [text[:end]], sound_calls=True)
        assert cut[: len(sent) - 1] == sent[:-1]
        withheld = read(name, [text[:end]])
        complete = [delta.index for delta in withheld if isinstance(delta, ToolCallEnd)]
        assert calls_of(withheld) == calls[: len(complete)]
        deltas += parser.feed(text[end])


@pytest.mark.parametrize("name", sorted(RENDER))
@pytest.mark.parametrize("sound", [False, True])
def test_what_waits_is_bounded(name: str, sound: bool) -> None:
    """Long arguments in small chunks cost linear time only while what is not yet read stays short."""
    text = RENDER[name]([("ls_dir", {"p": "ab <\n</parameter>" + " " * 999 + "</function>" + "ab <\n" * 200})])
    parser = resolve(name)(Context(tools=TOOLS, sound_calls=sound))
    for char in text:
        parser.feed(char)
        assert parser._scanner.num_waiting < 80  # type: ignore[attr-defined]
