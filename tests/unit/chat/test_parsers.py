# SPDX-License-Identifier: Apache-2.0
"""What each dialect reads, by example: the same in one piece, by the character, by two and by seven."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count

import pytest

from tokenspeed.chat.parsers import (
    ContentDelta,
    Context,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    choose,
    joined,
    names,
    opens_reasoning,
    resolve,
    tool_schemas,
)
from tokenspeed.core.errors import ConfigError

TOOLS: dict[str, Mapping[str, object]] = {
    "ls_dir": {
        "type": "object",
        "properties": {
            "p": {"type": "string"},
            "n": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "lines": {"type": "array"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "level": {"enum": ["1", "2"]},
            "where": {"$ref": "#/$defs/Where"},
        },
        "required": ["p"],
        "$defs": {"Where": {"type": "object"}},
    },
    "ping": {"type": "object", "properties": {}},
}

HERMES = '<tool_call>\n{"name": "ls_dir", "arguments": {"p": "/srv"}}\n</tool_call>'


def read(name: str, text: str, **context: object) -> list[Delta]:
    """Joined deltas, after a check that they are the same for every way to split."""
    results = []
    for size in (len(text) or 1, 1, 2, 7):
        ids = count()
        given = {"tools": TOOLS, "make_id": lambda ids=ids: f"call_{next(ids):09d}", **context}
        parser = resolve(name)(Context(**given))  # type: ignore[arg-type]
        deltas = [d for start in range(0, len(text), size) for d in parser.feed(text[start : start + size])]
        results.append(joined(deltas + parser.finish()))
    assert all(result == results[0] for result in results), results
    return results[0]


def said(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, object]]]:
    """(reasoning, content, calls with their arguments read as JSON)."""
    reasoning = "".join(d.text for d in deltas if isinstance(d, ReasoningDelta))
    content = "".join(d.text for d in deltas if isinstance(d, ContentDelta))
    called = [d.name for d in deltas if isinstance(d, ToolCallStart)]
    arguments = [json.loads(d.text) for d in deltas if isinstance(d, ToolCallArguments)]
    return reasoning, content, list(zip(called, arguments, strict=True))


# Public cases.


def test_two_calls_have_their_own_index_and_id() -> None:
    other = HERMES.replace("/srv", "/opt")
    assert read("hermes", f"Looking. {HERMES}\n{other}") == [
        ContentDelta("Looking. "),
        ToolCallStart(0, "call_000000000", "ls_dir"),
        ToolCallArguments(0, '{"p": "/srv"}'),
        ToolCallEnd(0),
        ToolCallStart(1, "call_000000001", "ls_dir"),
        ToolCallArguments(1, '{"p": "/opt"}'),
        ToolCallEnd(1),
    ]


def test_without_parallel_calls_the_parser_is_done_after_the_first() -> None:
    text = f"{HERMES}\n{HERMES} more"
    assert len(read("hermes", text, parallel_tool_calls=False)) == 3
    parser = resolve("hermes")(Context(tools=TOOLS, parallel_tool_calls=False))
    parser.feed(HERMES[:-20])
    assert not parser.done
    parser.feed(HERMES[-20:])
    assert parser.done and parser.feed("more") == [] and parser.finish() == []
    text = "<|channel|>commentary to=functions.ping<|message|>{}<|call|><|channel|>analysis<|message|>a<|end|>b"
    assert said(read("gpt_oss", text, parallel_tool_calls=False)) == ("", "", [("ping", {})])


@pytest.mark.parametrize("arguments", [', "arguments": {}', "", ', "arguments": null', ', "arguments": ""'])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    text = f'<tool_call>\n{{"name": "ping"{arguments}}}\n</tool_call>'
    assert ToolCallArguments(0, "{}") in read("hermes", text)


def test_unicode_stays_as_it_was_written() -> None:
    arguments = '{"town": "Zürich", "note": "東京 🚆 \\ud83d\\ude86"}'
    text = f'<tool_call>\n{{"name": "find_town", "arguments": {arguments}}}\n</tool_call>'
    assert ToolCallArguments(0, arguments) in read("hermes", text)


def test_what_is_no_call_is_content() -> None:
    broken = '<tool_call>\n{"name": "grep_it", "arguments": {"q": "a"\n</tool_call>'
    assert read("hermes", broken) == [ContentDelta(broken)]
    assert said(read("hermes", '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>')) == (
        *("", ""),
        [("no_such_tool", {})],
    )


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>plan</think>ok 1 <", "plan", "ok 1 <"),
        ("<think>half a thought</thi", "half a thought</thi", ""),
        ("<think>use a <b> tag</think>done", "use a <b> tag", "done"),
        ("\n<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
        ("<think>\n\n</think>\n\nc", "", "c"),
        ("<think><think>a</think></think>\nc", "<think>a", "c"),
        ("</think>c", "", "c"),
        ("say <think> and </think>", "", "say <think> and </think>"),
        (f"<think>like {HERMES}</think>c", f"like {HERMES}", "c"),
    ],
)
def test_reasoning(text: str, reasoning: str, content: str) -> None:
    assert said(read("hermes", text)) == (reasoning, content, [])
    assert said(read("hermes", text, tools={})) == (reasoning, content, [])


@pytest.mark.parametrize("opened", ["", "<think>", "\n<think>\n"])
def test_reasoning_that_the_prompt_has_opened(opened: str) -> None:
    text = f"{opened}plan</think>\n\n{HERMES}"
    assert said(read("hermes", text, starts_in_reasoning=True)) == ("plan", "", [("ls_dir", {"p": "/srv"})])


# Each dialect as its templates write it.

LS = ("ls_dir", {"p": 'a "b"', "n": 3})
DOCUMENTED = {
    "hermes": '<think>\nR\n</think>\n\nC\n<tool_call>\n{"name": "ls_dir", "arguments": {"p": "a \\"b\\"", "n": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<think>\nR\n</think>\n\nC\n<tool_call>\n<function=ls_dir>\n<parameter=p>\n"
    'a "b"\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    "glm4": "\n<think>R</think>\nC\n<tool_call>ls_dir\n<arg_key>p</arg_key>\n"
    '<arg_value>a "b"</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n'
    "<tool_call>ping</tool_call>",
    "minimax_m2": '<think>\nR\n</think>\n\nC\n<minimax:tool_call>\n<invoke name="ls_dir">\n<parameter name="p">'
    'a "b"</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi_k2": "<think>R</think>C<|tool_calls_section_begin|><|tool_call_begin|>functions.ls_dir:0"
    '<|tool_call_argument_begin|>{"p": "a \\"b\\"", "n": 3}<|tool_call_end|><|tool_call_begin|>functions.ping:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<think>\nR\n</think>\n\nC<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ls_dir\n"
    '```json\n{"p": "a \\"b\\"", "n": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n'
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<think>R</think>C<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ls_dir<｜tool▁sep｜>"
    '{"p": "a \\"b\\"", "n": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "gpt_oss": "<|channel|>analysis<|message|>R<|end|><|start|>assistant<|channel|>commentary<|message|>C<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.ls_dir <|constrain|>json<|message|>"
    '{"p": "a \\"b\\"", "n": 3}<|call|><|start|>assistant to=functions.ping<|channel|>commentary json<|message|>{}'
    "<|call|>",
    "mistral": '[THINK]R[/THINK]C[TOOL_CALLS]ls_dir[ARGS]{"p": "a \\"b\\"", "n": 3}[TOOL_CALLS]ping[ARGS]{}',
}


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_documented_form(name: str, sound: bool) -> None:
    deltas = read(name, DOCUMENTED[name], sound_calls=sound)
    assert said(deltas) == ("R", "C", [LS, ("ping", {})])
    assert [d.complete for d in deltas if isinstance(d, ToolCallEnd)] == [True, True]


@pytest.mark.parametrize("name", sorted({*DOCUMENTED} - {"gpt_oss"}))
def test_without_tools_markup_is_content(name: str) -> None:
    text = DOCUMENTED[name]
    content = text[text.index("C") :]
    assert said(read(name, text, tools={})) == ("R", content, [])


def test_line_ends_of_windows() -> None:
    for name in ("hermes", "qwen3_coder", "glm4", "minimax_m2"):
        assert said(read(name, DOCUMENTED[name].replace("\n", "\r\n"))) == ("R", "C", [LS, ("ping", {})]), name


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('{"name": "ls_dir", "parameters": {"p": "x"}}', [("ls_dir", {"p": "x"})], ""),
        ('{"type": "function", "name": "ping", "parameters": {}}', [("ping", {})], ""),
        ('<|python_tag|>{"name": "a", "parameters": {}}; {"name": "ping"}', [("a", {}), ("ping", {})], ""),
        ('{"name": "Ada", "age": 3}', [], '{"name": "Ada", "age": 3}'),
        ('{"age": 3, "name": "ping"}', [], '{"age": 3, "name": "ping"}'),
        ('<|python_tag|>search.call(q="x")', [], '<|python_tag|>search.call(q="x")'),
        ('Call {"name": "ping"}', [], 'Call {"name": "ping"}'),
    ],
)
def test_llama3_json(text: str, calls: list[object], content: str) -> None:
    assert said(read("llama3_json", text)) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("p='it''s'", None),
        ("p='a\\n\\x41\\u00e9\\U0001F686\\ud83d\\ude86\\q', n=-3", {"p": "a\nAé🚆🚆\\q", "n": -3}),
        ('p="""a "b" c\nd""", flag=True, maybe=None', {"p": 'a "b" c\nd', "flag": True, "maybe": None}),
        ("p='', lines=[1, 2.5e3, ['x',], {'k': {}}, []],", {"p": "", "lines": [1, 2500.0, ["x"], {"k": {}}, []]}),
        ("p='x' n=3", None),
        ("'x'", None),
        ("p=1, p=2", None),
        ("p={1: 2}", None),
        ("p='\\xZZ'", None),
    ],
)
def test_llama_pythonic(text: str, arguments: object) -> None:
    whole = f"[ls_dir({text}), ping()]"
    reasoning, content, calls = said(read("llama_pythonic", whole))
    if arguments is None:
        assert (content, calls) == (whole, [])
    else:
        assert (reasoning, content, calls) == ("", "", [("ls_dir", arguments), ("ping", {})])


@pytest.mark.parametrize("text", ["[link](http://x)", "[1, 2]", "[other(a=1)]", "see [ping()]"])
def test_a_list_that_is_no_pythonic_call(text: str) -> None:
    assert read("llama_pythonic", text) == [ContentDelta(text)]
    assert said(read("llama_pythonic", "<|python_start|>[other(a=1)]<|python_end|>"))[2] == [("other", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (
            '[TOOL_CALLS][{"name": "ping", "arguments": {}}, {"name": "ping", "arguments": {}}]',
            ["000000000", "000000001"],
        ),
        ('[TOOL_CALLS] [{"arguments": {}, "name": "ping", "id": "x"}]', ["000000000"]),
        ('[TOOL_CALLS]{"name": "ping"}', ["000000000"]),
        ("[TOOL_CALLS]ping[CALL_ID]abcdefghi[ARGS]{}", ["abcdefghi"]),
        ("[TOOL_CALLS]ping{}[TOOL_CALLS]ping[ARGS]{}", ["000000000", "000000001"]),
    ],
)
def test_mistral_ids_have_nine_characters(text: str, ids: list[str]) -> None:
    deltas = read("mistral", text)
    assert [d.id for d in deltas if isinstance(d, ToolCallStart)] == ids
    assert said(deltas) == ("", "", [("ping", {})] * len(ids))


def test_kimi_keeps_the_ids_of_the_model() -> None:
    deltas = read("kimi_k2", DOCUMENTED["kimi_k2"])
    assert [d.id for d in deltas if isinstance(d, ToolCallStart)] == ["functions.ls_dir:0", "functions.ping:1"]


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "deepseek_v31"])
def test_a_section_of_calls_ends_reasoning(name: str) -> None:
    text = DOCUMENTED[name].replace("</think>", "").replace("\n\nC", "").replace("C", "")
    assert said(read(name, text)) == ("R", "", [LS, ("ping", {})])
    assert said(read(name, text, tools={}))[2] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("", "plain", [])),
        (" to=functions.ping<|channel|>commentary<|message|><|call|>", ("", "", [("ping", {})])),
        ("<|channel|>final<|message|>a <|channel|> b<|return|>", ("", "a <|channel|> b", [])),
        ("<|channel|>analysis to=python<|message|>1+1<|call|>", ("1+1", "", [])),
        ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b", ("a", "b", [])),
        (
            '<|channel|>commentary to=functions.ls_dir<|message|>{"p": "<|call|>"}<|call|>',
            ("", "", [("ls_dir", {"p": "<|call|>"})]),
        ),
        (
            "<|channel|>commentary to=functions.ping<|message|>{oops",
            ("", "<|channel|>commentary to=functions.ping<|message|>{oops", []),
        ),
        (
            "<|channel|>analysis<|message|>\n a\n<|end|><|start|>assistant<|channel|>final<|message|>\n\nb\n",
            ("a", "b\n", []),
        ),
        ("<|channel|>anal", ("", "<|channel|>anal", [])),
    ],
)
def test_harmony(text: str, expected: object) -> None:
    assert said(read("gpt_oss", text)) == expected


def test_harmony_that_starts_in_reasoning() -> None:
    text = "R<|end|><|start|>assistant<|channel|>final<|message|>C"
    assert said(read("gpt_oss", text, starts_in_reasoning=True)) == ("R", "C", [])


# Arguments.


@pytest.mark.parametrize(
    "arguments",
    [
        '{"p": "</tool_call>\\n<tool_call>"}',
        '{"p": "\\"}{[\\\\", "n": {"a": [1, {"b": []}]}}',
        '{ "p" : -0.5e+10 , "q" : [ true , false , null ] }',
        '"{\\"p\\": \\"\\\\u00e9\\"}"',
    ],
)
def test_marks_and_brackets_in_strings_end_nothing(arguments: str) -> None:
    value = json.loads(arguments)
    value = json.loads(value) if isinstance(value, str) else value
    for text in (
        f'{{"name": "t", "arguments": {arguments}}}',
        f'{{"arguments": {arguments}, "name": "t", "x": [{{}}]}}',
    ):
        assert said(read("hermes", f"<tool_call>{text}</tool_call>")) == ("", "", [("t", value)])


def test_control_characters_in_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "t", "arguments": {"p": "a\n\tb\x00"}}</tool_call>'
    assert ToolCallArguments(0, '{"p": "a\\n\\tb\\u0000"}') in read("hermes", text)


@pytest.mark.parametrize(
    "body",
    [
        *('{"name": "t", "arguments": [1]}', '{"name": "t", "arguments": "[1]"}', '{"name": "t", "arguments": 3}'),
        *('{"name": 3}', '{"arguments": {}}', "{}", '{"name": "t", "arguments": {"a": 01}}', '{"name": ""}'),
        *('{"name": "t", "arguments": {"a": NaN}}', '{"name": "t", "arguments": {"a": 1,}}', "{'name': 't'}"),
        *('{"name": "t", "name": "u"}', '{"name": "t", "arguments": {}, "parameters": {}}', '{"name": "t"'),
        *('{"name": "t", "arguments": {"a": "\\x"}}', '{"name": "t", "arguments": {"a": "\\u12"}}', "", "text"),
        '{"name": "t", "arguments": {"a": ' + "[" * 100_000,
    ],
)
def test_a_call_that_is_malformed_is_content(body: str) -> None:
    text = f"a\n<tool_call>{body}</tool_call>\n"
    assert read("hermes", text) == [ContentDelta(text)]


@pytest.mark.parametrize("name", ["hermes", "llama_pythonic"])
def test_depth_has_a_limit(name: str) -> None:
    form = {"hermes": '<tool_call>{"name": "ping", "arguments": {"a": %s}}', "llama_pythonic": "[ping(a=%s)]"}[name]
    good, bad = (form % ("[" * depth + "]" * depth) for depth in (200, 300))
    assert [call for call, _ in said(read(name, good))[2]] == ["ping"]
    assert read(name, bad) == [ContentDelta(bad)]


def test_a_good_call_after_a_bad_one_is_read() -> None:
    bad = '<tool_call>\n{"name": "t", "arguments": {"q": "a"\n</tool_call>'
    deltas = read("hermes", f"{bad}\n{HERMES}")
    assert said(deltas) == ("", bad, [("ls_dir", {"p": "/srv"})])
    assert [delta.index for delta in deltas if isinstance(delta, ToolCallEnd)] == [0]


@pytest.mark.parametrize("close", ["", "</tool_call>", "\n\n</tool_call>\n", '{"name": "ping"}'])
def test_closing_marks_may_be_forgotten(close: str) -> None:
    text = '<tool_call>\n<tool_call>{"name": "ping"}' + close
    assert said(read("hermes", text)) == ("", "", [("ping", {})] * (2 if "ping" in close else 1))


def test_text_after_a_call_is_content() -> None:
    assert said(read("hermes", f"{HERMES}\nDone.\n")) == ("", "\nDone.\n", [("ls_dir", {"p": "/srv"})])
    assert said(read("hermes", f"{HERMES}\n\n")) == ("", "", [("ls_dir", {"p": "/srv"})])


# Tagged parameters take their types from the schema.


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("p", "3", "3"),
        ("p", '{"a": 1}', '{"a": 1}'),
        ("p", "", ""),
        ("p", " a\n b\n", " a\n b\n"),
        ("p", "x </parameter> <function=y>\n</function> </arg_value> z", None),
        ("n", "3", 3),
        ("n", "12345678901234567890123", 12345678901234567890123),
        ("n", "three", "three"),
        ("ratio", "3", 3),
        ("flag", "True", True),
        ("flag", "false", False),
        ("lines", '["a", {"b": null}]', ["a", {"b": None}]),
        ("lines", "['a', {'b': None}]", ["a", {"b": None}]),
        ("lines", "['a", "['a"),
        ("maybe", "['a']", "['a']"),
        ("p", "x\n</parameter>" + " " * 100 + "\n</function> y", None),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("level", "1", "1"),
        ("where", '{"x": 1}', {"x": 1}),
        ("unknown", "7", 7),
        ("unknown", "seven", "seven"),
        ("unknown", "NaN", "NaN"),
    ],
)
@pytest.mark.parametrize("sound", [False, True])
def test_tagged_values(key: str, text: str, value: object, sound: bool) -> None:
    value = text if key == "p" else value
    forms = {
        "qwen3_coder": f"<tool_call>\n<function=ls_dir>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "minimax_m2": f'<minimax:tool_call><invoke name="ls_dir"><parameter name="{key}">{text}</parameter></invoke>'
        "</minimax:tool_call>",
    }
    if "</arg_value>" not in text:
        forms["glm4"] = f"<tool_call>ls_dir\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    for name, form in forms.items():
        assert said(read(name, form, sound_calls=sound)) == ("", "", [("ls_dir", {key: value})]), name


def test_a_function_without_its_opening_mark_is_a_call_if_it_is_a_given_tool() -> None:
    text = "<function=%s>\n<parameter=p>\nx\n</parameter>\n</function>\n</tool_call>"
    assert said(read("qwen3_coder", "Go.\n" + text % "ls_dir")) == ("", "Go.", [("ls_dir", {"p": "x"})])
    assert said(read("qwen3_coder", text % "other")) == ("", text % "other", [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=ls_dir>\n<parameter=p>\nx\n</parameter>\n<parameter=p>\ny\n</parameter>",
        ),
        ("qwen3_coder", "<tool_call>\n<function=ls_dir>\n<parameter=p>\nx\n</parameter>\n"),
        ("qwen3_coder", "the <tool_call> mark"),
        ("glm4", "the <tool_call> mark of <b>it</b>"),
        ("glm4", "<tool_call>ls_dir\n<arg_key>p</arg_key>\n<arg_value>x</arg_value>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="ls_dir">\n<parameter name="p">x</parameter>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0<|tool_call_argument_begin|>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n"),
        ("mistral", "[TOOL_CALLS]ping"),
    ],
)
def test_a_call_that_is_not_complete_is_content(name: str, text: str) -> None:
    assert read(name, text) == [ContentDelta(text)]


# Calls in a fence, and calls that are the whole answer.

CALL = '{"name": "ls_dir", "arguments": {"p": "```"}}'


def answer(name: str, text: str) -> str:
    """The text as the answer of a message of this dialect."""
    begin = {"gpt_oss": "<|channel|>final<|message|>", "functionary_v32": "all\n"}
    return begin.get(name, "") + text


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("name", names())
def test_a_fenced_call_of_a_given_tool_is_understood(name: str, sound: bool) -> None:
    for text, before, num_calls in (
        (f"Sure:\n```json\n{CALL}\n```\n", "Sure:", 1),
        (f"```json\n[{CALL}, {CALL}]", "", 2),
        (f"```\n{CALL}\n```\n```tool_call\n{CALL}```", "", 2),
        (f"```python\nx\n```\n```json\n{CALL}\n```", "```python\nx\n```", 1),
    ):
        deltas = read(name, answer(name, text), sound_calls=sound)
        assert said(deltas) == ("", before, [("ls_dir", {"p": "```"})] * num_calls)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("text", ["%s", "\n%s\n", "[%s]", " [ %s , %s ] "])
def test_calls_that_are_the_whole_answer_are_understood(name: str, text: str) -> None:
    whole = text.replace("%s", CALL)
    calls = [("ls_dir", {"p": "```"})] * text.count("%s")
    assert said(read(name, answer(name, whole))) == ("", "", calls)
    others = [f"As in {whole}", whole.replace("ls_dir", "other"), whole.rstrip()[:-1]]
    if name != "llama3_json":  # whose own form the bare object is
        others.append(f"{whole} is an example")
    for other in others:
        assert said(read(name, answer(name, other)))[2] == [], other
        assert said(read(name, answer(name, other), tools={}))[2] == [], other


@pytest.mark.parametrize(
    ("arguments", "is_call"),
    [
        *(('{"p": "x", "n": 1}', True), ('{"p": "x", "n": 1.0}', True), ('{"p": "x", "ratio": 1}', True)),
        *(('{"p": "x", "maybe": null}', True), ('{"p": "x", "more": []}', True), ('{"p": "x", "where": {}}', True)),
        *(('{"p": 1}', False), ('{"p": "x", "n": "1"}', False), ('{"p": "x", "n": 1.5}', False)),
        *(('{"p": "x", "flag": 1}', False), ('{"p": "x", "where": []}', False), ('{"n": 1}', False)),
        *(('{"p": null}', False), ('{"p": "x", "level": 1}', False), ("[]", False)),
    ],
)
def test_only_arguments_that_fit_their_schema_make_an_answer_a_call(arguments: str, is_call: bool) -> None:
    text = f'{{"name": "ls_dir", "arguments": {arguments}}}'
    for form in (text, f"```json\n{text}\n```"):
        calls = [("ls_dir", json.loads(arguments))] if is_call else []
        assert said(read("none", form)) == ("", "" if is_call else form, calls)
    assert said(read("hermes", f"<tool_call>{text}</tool_call>"))[2] or arguments == "[]"


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    "body",
    [
        *('{"name": "other", "arguments": {"p": "x"}}', '{"name": "ls_dir", "arguments": {"n": 1}}', '{"p": 1}', "[]"),
        *('{"name": "ls_dir"}', '[{"name": "ping"}, {"name": "other"}]', '{"name": "ping"} and', '[{"name": "ping"}'),
    ],
)
def test_other_fences_are_content(name: str, body: str) -> None:
    text = f"A file:\n```json\n{body}\n```\nDone."
    for sound in (False, True):
        assert read(name, answer(name, text), sound_calls=sound) == [ContentDelta(text)]


@pytest.mark.parametrize("text", ["<tools>\n%s\n</tools>", "<tool_calls>[%s]</tool_calls>"])
def test_hermes_reads_other_tags_of_small_models(text: str) -> None:
    call = '{"name": "ls_dir", "arguments": {"p": "x"}}'
    assert said(read("hermes", text % call)) == ("", "", [("ls_dir", {"p": "x"})])
    other = text % '{"name": "Ada"}'
    assert read("hermes", other) == [ContentDelta(other)]


# Streaming.


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gpt_oss", "llama_pythonic"])
def test_sound_arguments_leave_as_they_come(name: str) -> None:
    before, after = {
        "hermes": ('<tool_call>\n{"name": "ls_dir", "arguments": {"p": "', '"}}\n</tool_call>'),
        "qwen3_coder": ("<tool_call>\n<function=ls_dir>\n<parameter=p>\n", "\n</parameter>\n</function>\n</tool_call>"),
        "gpt_oss": ('<|channel|>commentary to=functions.ls_dir<|message|>{"p": "', '"}<|call|>'),
        "llama_pythonic": ('[ls_dir(p="', '")]'),
    }[name]
    parser = resolve(name)(Context(tools=TOOLS, sound_calls=True))
    first = joined([*parser.feed(before), *(delta for char in "a<é" for delta in parser.feed(char))])
    assert isinstance(first[0], ToolCallStart) and first[1:] == [ToolCallArguments(0, '{"p": "a<é')]
    assert parser.feed("xyz")[-1] == ToolCallArguments(0, "xyz")
    assert not parser.withholds
    assert parser.feed(after)[-1] == ToolCallEnd(0)


def test_a_sound_call_that_breaks_keeps_what_was_sent() -> None:
    text = '<tool_call>\n{"name": "grep_it", "arguments": {"q": "a"\n</tool_call>'
    assert read("hermes", text, sound_calls=True) == [
        ToolCallStart(0, "call_000000000", "grep_it"),
        ToolCallArguments(0, '{"q": "a"\n'),
        ToolCallEnd(0, complete=False),
        ContentDelta("</tool_call>"),
    ]
    assert read("hermes", f"{text}\n{HERMES}", sound_calls=True)[4:] == [
        ToolCallStart(1, "call_000000001", "ls_dir"),
        ToolCallArguments(1, '{"p": "/srv"}'),
        ToolCallEnd(1),
    ]
    deep = '<tool_call>{"name": "t", "arguments": {"a": ' + "[" * 100_000
    assert ToolCallEnd(0, complete=False) in read("hermes", deep, sound_calls=True)


def test_what_is_withheld_is_told() -> None:
    parser = resolve("hermes")(Context(tools=TOOLS))
    assert parser.feed("Hm <") == [ContentDelta("Hm ")] and parser.withholds
    assert parser.feed("b>") == [ContentDelta("<b>")] and not parser.withholds
    assert parser.feed('<tool_call>{"name": "ls_dir", "argu') == [] and parser.withholds
    assert [type(delta) for delta in parser.finish()] == [ContentDelta]


def test_feeding_after_the_end_is_an_error() -> None:
    parser = resolve("none")(Context())
    assert parser.feed("") == [] and parser.finish() == []
    with pytest.raises(AssertionError):
        parser.feed("x")
    with pytest.raises(AssertionError):
        parser.finish()


# The contract.


def test_no_template_and_no_such_dialect() -> None:
    assert choose("") == "none"
    for name in ("klingon", "_machine", "../hermes"):
        with pytest.raises(ConfigError, match="hermes"):
            resolve(name)


def test_a_prompt_says_whether_it_opened_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert opens_reasoning("[THINK]") and opens_reasoning("<|start|>assistant<|channel|>analysis<|message|>")
    assert not opens_reasoning("<think>\n\n</think>\n\n") and not opens_reasoning("")


def test_schemas_of_tools() -> None:
    function = {"name": "a", "parameters": {"type": "object"}}
    tools = [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "b"}},
        {"type": "web"},
    ]
    assert tool_schemas(tools) == {"a": {"type": "object"}, "b": {}}
    assert tool_schemas(None) == {}
