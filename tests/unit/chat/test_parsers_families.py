# SPDX-License-Identifier: Apache-2.0
"""The documented form of each family whose calls have marks of their own, and what is special in it."""

from __future__ import annotations

import json

import pytest

from tokenspeed.chat.parsers import ContentDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from unit.chat.test_parsers import LS, TOOLS, read, said

M = "]<]minimax[>["
LS_JSON, LS_TAIL = '{"p": "a \\"b\\"", "n": 3}', 'n": 3}'
DOCUMENTED = {
    "apertus": f'<|inner_prefix|>R<|inner_suffix|>C<|tools_prefix|>[{{"ls_dir": {LS_JSON}}}, {{"ping": {{}}}}]'
    "<|tools_suffix|>",
    "apriel": "Here are my reasoning steps:\nR\n[BEGIN FINAL RESPONSE]\nC\n"
    f'<tool_calls>[{{"name": "ls_dir", "arguments": {LS_JSON}}}, {{"name": "ping", "arguments": {{}}}}]</tool_calls>',
    "cohere": "<|START_THINKING|>R<|END_THINKING|><|START_TEXT|>C<|END_TEXT|><|START_ACTION|>[\n"
    f'    {{"tool_call_id": "0", "tool_name": "ls_dir", "parameters": {LS_JSON}}},\n'
    '    {"tool_call_id": "1", "tool_name": "ping", "parameters": {}}\n]<|END_ACTION|>',
    "command_r": '<think>R</think>C\nAction:\n```json\n[\n    {\n        "tool_name": "ls_dir",\n        "parameters": '
    f'{LS_JSON}\n    }},\n    {{\n        "tool_name": "ping",\n        "parameters": {{}}\n    }}\n]```\n',
    "deepseek_dsml": '<think>R</think>C\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ls_dir">\n'
    '<｜DSML｜parameter name="p" string="true">a "b"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="ping">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "ernie45": f'<think>\nR\n</think>\n\n<response>\nC\n</response>\n<tool_call>\n{{"name": "ls_dir", "arguments": '
    f'{LS_JSON}}}\n</tool_call>\n<tool_call>\n{{"name": "ping", "arguments": {{}}}}\n</tool_call>\n',
    "functionary_v31": f"<think>R</think>C<function=ls_dir>{LS_JSON}</function><function=ping>{{}}</function>",
    "functionary_v32": f"<think>R</think>all\nC>>>ls_dir\n{LS_JSON}>>>ping\n{{}}",
    "functools": f'<think>R</think>C\nfunctools[{{"name": "ls_dir", "arguments": {LS_JSON}}}, '
    '{"name": "ping", "arguments": {}}]',
    "gemma4": '<|channel>thought\nR\n<channel|>C<|tool_call>call:ls_dir{p:<|"|>a "b"<|"|>,n:3}<tool_call|>'
    "<|tool_call>call:ping{}<tool_call|><|tool_response>",
    "gigachat": f'<think>R</think>C<|function_call|>{{"name": "ls_dir", "arguments": {LS_JSON}}}<|message_sep|>\n\n'
    '<|function_call|>{"name": "ping", "arguments": {}}<|message_sep|>',
    "granite3": f'<think>R</think><response>C</response><|tool_call|>[{{"name": "ls_dir", "arguments": {LS_JSON}}}, '
    '{"name": "ping", "arguments": {}}]',
    "hunyuan_v3": "<think:opensource>R</think:opensource>C<tool_calls:opensource>\n<tool_call:opensource>ls_dir"
    "<tool_sep:opensource>\n<arg_key:opensource>p</arg_key:opensource>\n"
    '<arg_value:opensource>a "b"</arg_value:opensource>\n<arg_key:opensource>n</arg_key:opensource>\n'
    "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>ping"
    "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
    "internlm2": f'<think>R</think>C<|action_start|><|plugin|>\n{{"name": "ls_dir", "parameters": {LS_JSON}}}'
    '<|action_end|>\n<|action_start|><|plugin|>\n{"name": "ping", "parameters": {}}<|action_end|>',
    "kimi_k3": "<|open|>think<|sep|>R<|close|>think<|sep|><|open|>response<|sep|>C<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="ls_dir" index="1"<|sep|>'
    '<|open|>argument key="p" type="string"<|sep|>a "b"<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="ping" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
    "lfm2": "<think>R</think>C<|tool_call_start|>[ls_dir(p='a \"b\"', n=3), ping()]<|tool_call_end|>",
    "minicpm5": '<think>\nR\n</think>\n\nC\n<function name="ls_dir"><param name="p"><![CDATA[a "b"]]></param>'
    '<param name="n">3</param></function>\n<function name="ping"></function>',
    "minimax_m3": f'<mm:think>R</mm:think>C{M}<tool_call>\n{M}<invoke name="ls_dir">{M}<p>a "b"{M}</p>{M}<n>3{M}</n>'
    f'{M}</invoke>\n{M}<invoke name="ping">{M}</invoke>\n{M}</tool_call>',
    "muse_atem": " to=self<|message|>R<|eom|><|start|>assistant to=user<|message|>C<|eom|>"
    '<|start|>assistant to=ls_dir<|message|><atem:function_calls>\n<atem:invoke name="ls_dir">\n'
    '<atem:parameter name="p">a "b"</atem:parameter>\n<atem:parameter name="n">3</atem:parameter>\n</atem:invoke>\n'
    "</atem:function_calls><|eom|><|start|>assistant to=ping<|message|><atem:function_calls>\n"
    '<atem:invoke name="ping">\n</atem:invoke>\n</atem:function_calls>',
    "nemotron_nano_v2": f'<think>\nR\n</think>\nC\n<TOOLCALL>[{{"name": "ls_dir", "arguments": {LS_JSON}}}, '
    '{"name": "ping", "arguments": {}}]</TOOLCALL>',
    "seed_oss": "<seed:think>R</seed:think>\nC\n\n<seed:tool_call>\n<function=ls_dir>\n"
    '<parameter=p>a "b"</parameter>\n<parameter=n>3</parameter>\n</function>\n</seed:tool_call>\n'
    "<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
    "solar_open": "<|think|>R<|end|><|begin|>assistant<|content|>C<|end|><|begin|>assistant<|tool_calls|>"
    f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>ls_dir<|tool_call:args|>{LS_JSON}<|tool_call:end|>"
    "<|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>ping<|tool_call:args|>{}<|tool_call:end|><|calls|>",
    "step3": "<think>R</think>C\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="ls_dir">\n<steptml:parameter name="p">a "b"</steptml:parameter>\n'
    '<steptml:parameter name="n">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="ping"></steptml:invoke><｜tool_call_end｜>\n'
    "<｜tool_calls_end｜>",
    "tool_calls_list": f'<think>\nR\n</think>\n<answer>\nC\n</answer>\n<tool_calls>\n{{"name": "ls_dir", "arguments": '
    f'{LS_JSON}}}\n{{"name": "ping", "arguments": {{}}}}\n</tool_calls>',
}


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_documented_form(name: str, sound: bool) -> None:
    deltas = read(name, DOCUMENTED[name], sound_calls=sound)
    assert said(deltas) == ("R", "C", [LS, ("ping", {})])
    assert [d.complete for d in deltas if isinstance(d, ToolCallEnd)] == [True, True]
    ids = [d.id for d in deltas if isinstance(d, ToolCallStart)]
    assert ids == (["a1b2c3d4e5", "f6g7h8i9j0"] if name == "solar_open" else ["call_000000000", "call_000000001"])


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_without_parallel_calls_only_the_first_is_read(name: str) -> None:
    assert said(read(name, DOCUMENTED[name], parallel_tool_calls=False))[2] == [LS]


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_without_tools_there_are_no_calls(name: str) -> None:
    reasoning, content, calls = said(read(name, DOCUMENTED[name], tools={}))
    assert (reasoning, content[:1], calls) == ("R", "C", []) and "ls_dir" in content


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_a_form_without_its_last_part_keeps_the_whole_calls_only(name: str) -> None:
    text = DOCUMENTED[name]
    cut = text[: text.index("3") + 1]
    reasoning, content, calls = said(read(name, cut))
    assert (reasoning, calls) == ("R", []) and content.startswith("C") and content.endswith("3")


OPEN_K3 = '<|open|>tools<|sep|><|open|>call tool="ls_dir" index="1"<|sep|>'
ARGUMENT_K3 = '<|open|>argument key="p" type="string"<|sep|>x<|close|>argument<|sep|>'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("apertus", '<|tools_prefix|>{"ls_dir": {}}<|tools_suffix|>'),
        ("apertus", '<|tools_prefix|>["ls_dir"]<|tools_suffix|>'),
        ("apertus", '<|tools_prefix|>[{"ls_dir": [1]}]<|tools_suffix|>'),
        ("apertus", '<|tools_prefix|>[{"ls_dir": {}, "ping": {}}]<|tools_suffix|>'),
        ("cohere", '<|START_ACTION|>[{"name": "ls_dir", "parameters": {}}]<|END_ACTION|>'),
        ("functionary_v31", "<function=ls_dir>x</function>"),
        ("functionary_v31", "<function=ls_dir {}</function>"),
        ("gemma4", "<|tool_call>ls_dir{}<tool_call|>"),
        ("gemma4", "<|tool_call>call:ls_dir<tool_call|>"),
        ("gemma4", "<|tool_call>call:ls_dir{a:1 b:2}<tool_call|>"),
        ("kimi_k3", "<|open|>tools<|sep|>text"),
        ("kimi_k3", '<|open|>tools<|sep|><|open|>call index="1"<|sep|><|close|>call<|sep|>'),
        ("kimi_k3", OPEN_K3 + '<|open|>json type="object"<|sep|>[]<|close|>json<|sep|><|close|>call<|sep|>'),
        ("kimi_k3", OPEN_K3 + '<|open|>json type="object"<|sep|>{}<|close|>call<|sep|>'),
        ("kimi_k3", OPEN_K3 + ARGUMENT_K3 * 2 + "<|close|>call<|sep|>"),
        ("kimi_k3", OPEN_K3 + ARGUMENT_K3),
        ("minimax_m3", f'{M}<tool_call>\n<invoke name="ls_dir">'),
        ("minimax_m3", f'{M}<tool_call>{M}<invoke name="ls_dir"{M}</invoke>'),
        ("minimax_m3", f'{M}<tool_call>{M}<invoke name="ls_dir">{M}<lines>{M}<item>1{M}</item>'),
        ("minimax_m3", f'{M}<tool_call>{M}<invoke name="ls_dir">{M}<lines>{M}<item>1{M}</lines>{M}</invoke>'),
        ("minimax_m3", f'{M}<tool_call>{M}<invoke name="ls_dir">{M}<n>1'),
        ("minimax_m3", f'{M}<tool_call>{M}<invoke name="ls_dir">{M}<p>1'),
        ("nemotron_nano_v2", "<TOOLCALL>[1]</TOOLCALL>"),
        ("solar_open", "<|tool_call:begin|>a1<|tool_call:name|>ls_dir<|tool_call:args|>x<|tool_call:end|>"),
        ("solar_open", "<|tool_call:begin|>a1<|tool_call:name|>ls_dir{}<|tool_call:end|>"),
        ("step3", "<｜tool_calls_begin｜>text"),
        ("step3", "<｜tool_call_begin｜>function<steptml:invoke"),
        ("step3", "<｜tool_call_begin｜>function<｜tool_sep｜>ls_dir{}"),
        ("solar_open", "<|tool_call:begin|>a1<|tool_call:args|>{}<|tool_call:end|>"),
    ],
)
def test_a_form_that_is_not_kept_is_content(name: str, text: str) -> None:
    assert read(name, f"So: {text}") == [ContentDelta(f"So: {text}")]
    sound = read(name, f"So: {text}", sound_calls=True)
    assert not any(delta.complete for delta in sound if isinstance(delta, ToolCallEnd))


def test_apriel_says_its_answer_only() -> None:
    text = "[BEGIN FINAL RESPONSE]\nHi\n[END FINAL RESPONSE]"
    assert said(read("apriel", f"plan\n{text}", starts_in_reasoning=True)) == ("plan", "Hi\n", [])
    assert said(read("apriel", f"plan\n{text}")) == ("", "plan\n\nHi\n", [])


# What the schema does not say, the form does, and the other way round.


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('key="p" type="string"', "3"),
        ('key="p" type="number"', 3),
        ('key="p" type="object"', 3),
        ('key="p"', "3"),
        ('key="n"', 3),
        ('key="a &amp; &quot;b&quot;" type="number"', 3),
    ],
)
def test_the_elements_of_kimi_k3_say_their_types(written: str, value: object) -> None:
    key = {"p": "p", "n": "n"}.get(written[5], 'a & "b"')
    text = (
        f'<|open|>tools<|sep|><|open|>call tool="ls_dir" index="1"<|sep|><|open|>argument {written}<|sep|>3'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    assert said(read("kimi_k3", text)) == ("", "", [("ls_dir", {key: value})])


def test_kimi_k3_writes_arguments_as_one_element_of_json_too() -> None:
    form = (
        '<|open|>tools<|sep|><|open|>call index="1" tool="ls_dir"<|sep|><|open|>json type="object"<|sep|>%s'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    assert said(read("kimi_k3", form % '{"p": "<|sep|>"}')) == ("", "", [("ls_dir", {"p": "<|sep|>"})])
    assert said(read("kimi_k3", form % "[1]"))[2] == []


@pytest.mark.parametrize("block", ["function_calls", "tool_calls"])
@pytest.mark.parametrize(
    ("is_text", "text", "value"),
    [
        ("true", "3", "3"),
        ("false", "3", 3),
        ("false", '"x"', "x"),
        ("false", '{"a": [1]}', {"a": [1]}),
        ("false", "x y", "x y"),
        ("true", "</｜DSML｜parameter> <｜DSML｜", "</｜DSML｜parameter> <｜DSML｜"),
    ],
)
def test_dsml_says_whether_a_value_is_text(block: str, is_text: str, text: str, value: object) -> None:
    whole = (
        f'<｜DSML｜{block}>\n<｜DSML｜invoke name="ls_dir">\n<｜DSML｜parameter name="x" string="{is_text}">{text}'
        f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{block}>"
    )
    assert said(read("deepseek_dsml", whole)) == ("", "", [("ls_dir", {"x": value})])
    assert said(read("deepseek_dsml", f"<think>R{whole}"))[2] == [("ls_dir", {"x": value})]


NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "at": {"$ref": "#/$defs/At"},
        "none": {"anyOf": [{"type": "null"}, {"type": "object"}]},
        "item": {"type": "object"},
    },
    "$defs": {"At": {"type": "object", "properties": {"zip": {"type": "string"}, "no": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"{M}<name>1 {M}<b> \n{M}</name>", {"name": f"1 {M}<b> \n"}),
        (f"{M}<name>{M}</name>", {"name": ""}),
        (f"{M}<tags>{M}<item>1{M}</item>{M}<item>{M}</item>{M}</tags>", {"tags": ["1", ""]}),
        (f"{M}<tags>\n{M}<item>a{M}</item>\n{M}</tags>", {"tags": ["a"]}),
        (f"{M}<tags>{M}</tags>", {"tags": []}),
        (f"{M}<rows>{M}<item>{M}<item>1{M}</item>{M}</item>{M}<item>{M}</item>{M}</rows>", {"rows": [[1], []]}),
        (f"{M}<at>{M}<zip>01{M}</zip>{M}<no>7{M}</no>{M}</at>", {"at": {"zip": "01", "no": 7}}),
        (f"{M}<at>{M}</at>{M}<none>{M}</none>", {"at": {}, "none": {}}),
        (f"{M}<item>{M}<item>1{M}</item>{M}</item>", {"item": {"item": 1}}),
        (f"{M}<at>{{'zip': 'x'}}{M}</at>", {"at": {"zip": "x"}}),
        (f"{M}<more>{M}<item>1{M}</item>{M}<item>x{M}</item>{M}</more>", {"more": [1, "x"]}),
        (f"{M}<more>{M}<a>true{M}</a>{M}</more>", {"more": {"a": True}}),
        (f"{M}<a b>x{M}</a b>", {"a b": "x"}),
        (f"{M}<name>x{M}</other>", None),
        (f"{M}<name>x{M}</name>{M}<name>y{M}</name>", None),
        (f"{M}</name>", None),
        (f"{M}<at>" * 100 + f"{M}</at>" * 100, None),
        ("text", None),
    ],
)
@pytest.mark.parametrize("sound", [False, True])
def test_nested_elements(text: str, value: object, sound: bool) -> None:
    whole = f'{M}<tool_call>\n{M}<invoke name="save">{text}{M}</invoke>\n{M}</tool_call>'
    if value is None:
        assert read("minimax_m3", whole, tools={"save": NESTED}) == [ContentDelta(whole)]
    else:
        deltas = read("minimax_m3", whole, tools={"save": NESTED}, sound_calls=sound)
        assert said(deltas) == ("", "", [("save", value)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{a:<|"|>"x" {y}, \\n\n<|"|>}', {"a": '"x" {y}, \\n\n'}),
        ('{a:{<|"|>b c<|"|>:[1,-2.5e3,true,null]}}', {"a": {"b c": [1, -2500.0, True, None]}}),
        ('{ "a" : "x\\n" , b c: False , "d": None, }', None),
        ('{ "a" : "x\\n" , b c: False , "d": None }', {"a": "x\n", "b c": False, "d": None}),
        ("{a:[],b:{}}", {"a": [], "b": {}}),
        ("{a:x}", None),
        ("{a}", None),
        ("{:1}", None),
        ('{a:<|"|>x}', None),
        ("{a:" + "[" * 300 + "]" * 300 + "}", None),
    ],
)
def test_values_of_gemma4(text: str, value: object) -> None:
    whole = f"<|tool_call>call:ping{text}<tool_call|>"
    expected = ("", "", [("ping", value)]) if value is not None else ("", whole, [])
    assert said(read("gemma4", whole)) == expected


@pytest.mark.parametrize("name", ["seed_oss", "minicpm5"])
def test_lists_and_objects_may_be_written_as_python_does(name: str) -> None:
    form = {
        "seed_oss": "<seed:tool_call>\n<function=ls_dir>\n<parameter=%s>%s</parameter>\n</function>\n</seed:tool_call>",
        "minicpm5": '<function name="ls_dir"><param name="%s">%s</param></function>',
    }[name]
    for key, text, value in (
        ("where", "{'a': ['x', None, True]}", {"a": ["x", None, True]}),
        ("where", '{"a": null}', {"a": None}),
        ("lines", "['it''s'", "['it''s'"),
        ("p", "['x']", "['x']"),
        ("p", "\n x \n", "\n x \n"),
    ):
        assert said(read(name, form % (key, text))) == ("", "", [("ls_dir", {key: value})]), text


@pytest.mark.parametrize("text", ["3", "a < b && c\n", "]]> </param>", '{"a": 1}', ""])
def test_quoted_text_of_minicpm5_is_text(text: str) -> None:
    for key in ("p", "unknown"):
        whole = f'<function name="ls_dir"><param name="{key}"><![CDATA[{text}]]></param></function>'
        assert said(read("minicpm5", whole)) == ("", "", [("ls_dir", {key: text})])


def test_lfm2_writes_json_when_it_is_asked_to() -> None:
    call = '{"name": "ls_dir", "arguments": {"p": "x"}}'
    for text in (f"[{call}]", call, f"[{call}, {call}]"):
        whole = f"<|tool_call_start|>{text}<|tool_call_end|>"
        assert said(read("lfm2", whole)) == ("", "", [("ls_dir", {"p": "x"})] * text.count("name"))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("all\nHi", "Hi", []),
        ('ls_dir\n{"p": "x"}', "", [("ls_dir", {"p": "x"})]),
        (">>>all\nHi", "Hi", []),
        ('all\n>>> print(1)\n1\n>>>ls_dir\n{"p": ">>>all"}', ">>> print(1)\n1", [("ls_dir", {"p": ">>>all"})]),
        ("other\n{}", "other\n{}", []),
        ("ls_dir\nis a tool", "ls_dir\nis a tool", []),
    ],
)
def test_recipients_of_functionary(text: str, content: str, calls: list[object]) -> None:
    assert said(read("functionary_v32", text)) == ("", content, calls)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to=user<|message|>Hi<|eot|>", ("", "Hi", [])),
        ("<|message|>Hi", ("", "Hi", [])),
        (" to=user<|message|>A<|eom|><|start|>assistant to=self<|message|>R<|eom|>", ("R", "A", [])),
        ("Hi to=all", ("", "Hi to=all", [])),
    ],
)
def test_recipients_of_muse(text: str, expected: object) -> None:
    assert said(read("muse_atem", text)) == expected


@pytest.mark.parametrize(
    "text", ["Action: run it", "Action:\n```json\n[]\n```", 'Action:\n```json\n[{"tool_name": "x"}]```']
)
def test_the_word_action_alone_is_no_call(text: str) -> None:
    assert read("command_r", text) == [ContentDelta(text)]


def test_gigachat_3_calls_in_a_message_of_their_own() -> None:
    text = 'C<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "ls_dir", "arguments": {"p": "x"}}'
    assert said(read("gigachat", text)) == ("", "C", [("ls_dir", {"p": "x"})])


@pytest.mark.parametrize("text", ["<|START_RESPONSE|>Hi\n<|END_RESPONSE|>", "<|START_TEXT|>Hi\n<|END_TEXT|>", "Hi\n"])
def test_marks_around_the_answer_are_not_said(text: str) -> None:
    for tools in (TOOLS, {}):
        assert said(read("cohere", text, tools=tools)) == ("", "Hi\n", [])


@pytest.mark.parametrize("name", ["none", "hermes", "qwen3_coder", "llama_pythonic"])
def test_a_list_of_calls_may_be_the_value_of_an_object(name: str) -> None:
    """As xLAM 1 writes it."""
    call = '{"name": "ls_dir", "arguments": {"p": "x"}}'
    for text in (f'{{"tool_calls": [{call}, {call}]}}', f'\n{{ "tool_calls" : [ {call},\n{call} ]\n}}\n'):
        assert said(read(name, text)) == ("", "", [("ls_dir", {"p": "x"})] * 2)
        fenced = f"```json\n{text}\n```"
        assert said(read(name, fenced)) == ("", "", [("ls_dir", {"p": "x"})] * 2)
    for rest in ("[]}", "1}", f"{call}}}", f"[{call}], 1}}", f"[{call}]", f"[{call}]}} text", f"[{call}"):
        other = f'{{"tool_calls": {rest}'
        assert read(name, other) == [ContentDelta(other)], other
    for other in ('{"tool_calls"', '{"tool_calls" "name": "ping"}'):
        assert read(name, other) == [ContentDelta(other)]


def test_arguments_stay_as_they_were_written() -> None:
    for name, text in DOCUMENTED.items():
        if LS_JSON in text:
            assert ToolCallArguments(0, LS_JSON) in read(name, text), name
            assert json.loads(LS_JSON) == LS[1]
