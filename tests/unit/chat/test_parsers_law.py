# SPDX-License-Identifier: Apache-2.0
"""The law of parsers, for every dialect: what is said depends on the text and not on how it was split, nothing is taken
back, nothing is lost, and what a template would render is read back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise

import pytest
from hypothesis import given, settings
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

Call = tuple[str, Mapping[str, object]]

TOOLS: dict[str, Mapping[str, object]] = {
    "ls_dir": {"type": "object", "properties": {"p": {"type": "string"}, "n": {"type": "integer"}}, "required": ["p"]},
    "edit": {
        "type": "object",
        "properties": {
            "old text": {"type": "string"},
            "lines": {"type": "array"},
            "flag": {"type": ["boolean", "null"]},
            "meta": {"type": "object"},
        },
    },
}


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


# How templates render calls.


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>' for n, a in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={n}>\n"
        + "".join(f"<parameter={k}>\n{bare(v)}\n</parameter>\n" for k, v in a.items())
        + "</function>\n</tool_call>"
        for n, a in calls
    )


def glm4(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{n}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{bare(v)}</arg_value>\n" for k, v in a.items())
        + "</tool_call>"
        for n, a in calls
    )


def minimax_m2(calls: Sequence[Call]) -> str:
    invokes = (
        f'<invoke name="{n}">\n'
        + "".join(f'<parameter name="{k}">{bare(v)}</parameter>\n' for k, v in a.items())
        + "</invoke>\n"
        for n, a in calls
    )
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def kimi_k2(calls: Sequence[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
        for i, (n, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def deepseek_v3(calls: Sequence[Call]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Sequence[Call]) -> str:
    each = (f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>" for n, a in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def gpt_oss(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>" for n, a in calls
    )


def llama3_json(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + "; ".join(f'{{"name": "{n}", "parameters": {dumps(a)}}}' for n, a in calls)


def slug(key: str) -> str:
    return key.replace(" ", "_")


def llama_pythonic(calls: Sequence[Call]) -> str:
    each = (f"{n}({', '.join(f'{slug(k)}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"<|python_start|>[{', '.join(each)}]<|python_end|>"


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}" for n, a in calls)


def none(calls: Sequence[Call]) -> str:
    return f"```json\n{dumps([{'name': n, 'arguments': a} for n, a in calls])}\n```"


RENDER: dict[str, Callable[[Sequence[Call]], str]] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "glm4": glm4,
    "gpt_oss": gpt_oss,
    "hermes": hermes,
    "kimi_k2": kimi_k2,
    "llama3_json": llama3_json,
    "llama_pythonic": llama_pythonic,
    "minimax_m2": minimax_m2,
    "mistral": mistral,
    "none": none,
    "qwen3_coder": qwen3_coder,
}
THINK = {"gpt_oss": ("<|channel|>analysis<|message|>", "<|end|>"), "mistral": ("[THINK]", "[/THINK]")}
EXAMPLE: Sequence[Call] = (
    ("ls_dir", {"p": 'a "b" \\ <é\n🚆', "n": -1}),
    ("edit", {"old text": "x\n", "lines": [1.5, {"k": None}], "flag": True, "meta": {}}),
)


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
    opener, closer = THINK.get(name, ("<think>", "</think>"))
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
        opener, closer = THINK.get(name, ("<think>", "</think>"))
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
    marks = THINK.get(name, ("<think>", "</think>"))
    begins_with_reasoning = text.lstrip().startswith(marks) or context["starts_in_reasoning"]
    if name != "gpt_oss" and not begins_with_reasoning and not any(isinstance(d, ToolCallStart) for d in whole):
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
    opener, closer = THINK.get(name, ("<think>", "</think>"))
    text = RENDER[name](calls)
    start = "<|start|>assistant" if name == "gpt_oss" else ""
    deltas = read(name, data.draw(st.composite(splits)(f"{opener}\nI see.\n{closer}{start}{text}")), sound_calls=sound)
    if name == "llama_pythonic":
        calls = [(n, {slug(k): v for k, v in a.items()}) for n, a in calls]
    assert calls_of(deltas) == list(calls)
    assert text_of(deltas, ReasoningDelta) == "I see."
    assert text_of(deltas) == ""


@pytest.mark.parametrize("name", sorted(RENDER))
def test_a_text_that_ends_anywhere_keeps_what_was_sent(name: str) -> None:
    text = "Hm. " + RENDER[name](EXAMPLE)
    whole = read(name, [text], sound_calls=True)
    for end in range(len(text)):
        cut = read(name, [text[:end]], sound_calls=True)
        sent = read(name, [text[:end]], sound_calls=True, finish=False)
        for have, final in zip(sent, whole, strict=False):
            assert have == final or (type(have) is type(final) and final.text.startswith(have.text)), (have, final)  # type: ignore[union-attr]
        assert cut[: len(sent) - 1] == sent[:-1]
        withheld = read(name, [text[:end]])
        complete = [delta.index for delta in withheld if isinstance(delta, ToolCallEnd)]
        assert calls_of(withheld) == calls_of(read(name, [text]))[: len(complete)]


@pytest.mark.parametrize("name", sorted(RENDER))
@pytest.mark.parametrize("sound", [False, True])
def test_what_waits_is_bounded(name: str, sound: bool) -> None:
    """Long arguments in small chunks cost linear time only while what is not yet read stays short."""
    text = RENDER[name]([("ls_dir", {"p": "ab <\n</parameter>" + " " * 999 + "</function>" + "ab <\n" * 200})])
    parser = resolve(name)(Context(tools=TOOLS, sound_calls=sound))
    for char in text:
        parser.feed(char)
        assert parser._scanner.num_waiting < 80  # type: ignore[attr-defined]
