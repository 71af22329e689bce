# SPDX-License-Identifier: Apache-2.0
"""How each dialect says that a call is written, for grammars: what is written so is read as exactly that call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from tokenspeed.chat.parsers import (
    CallFormat,
    ContentDelta,
    Delta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    call_format,
    names,
    opens_reasoning,
    reasoning_marks,
)
from tokenspeed.core.errors import ConfigError
from unit.chat.test_parsers import read, said

TOOLS: Mapping[str, Mapping[str, object]] = {
    "edit": {"type": "object", "properties": {"p": {"type": "string"}}},
    "mcp__files-v2.read_all": {"type": "object"},
    "r": {"type": "object"},
}
ARGUMENTS = ('{"p": "a \\"b\\" </tool_call>\\n``` {}"}', "{}", '{"p": "é🚆", "q": [1, {"r": null}]}')
NO_JSON = {
    *("deepseek_dsml", "gemma4", "glm4", "hunyuan_v3", "kimi_k3", "lfm2", "llama_pythonic", "minicpm5", "minimax_m2"),
    *("minimax_m3", "muse_atem", "qwen3_coder", "seed_oss", "solar_open", "step3"),
}
WITH_JSON = sorted({*names()} - NO_JSON)


def written(forms: Sequence[CallFormat], arguments: Sequence[str]) -> str:
    """A reply that is these calls, each in its form."""
    first = forms[0]
    calls = (
        form.begin + (f"{number}{form.number_end}" if form.number_end else "") + text + form.end
        for number, (form, text) in enumerate(zip(forms, arguments, strict=True))
    )
    return first.opening + first.parting.join(calls) + first.closing


def calls(deltas: Sequence[Delta]) -> list[tuple[str, str]]:
    """(name, arguments as they were sent) of each call; all are complete and nothing else is said."""
    assert not any(isinstance(delta, ContentDelta) for delta in deltas), deltas
    assert all(delta.complete for delta in deltas if isinstance(delta, ToolCallEnd))
    called = [delta.name for delta in deltas if isinstance(delta, ToolCallStart)]
    return list(zip(called, [d.text for d in deltas if isinstance(d, ToolCallArguments)], strict=True))


def forms_of(name: str, tool: str) -> list[CallFormat]:
    forms = call_format(name, [tool])
    assert forms
    return forms


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("name", WITH_JSON)
def test_what_is_written_in_the_format_is_that_call(name: str, sound: bool) -> None:
    for tool in TOOLS:
        for form in forms_of(name, tool):
            for text in ARGUMENTS:
                deltas = read(name, written([form], [text]), tools=TOOLS, sound_calls=sound)
                assert calls(deltas) == [(tool, text)], form


@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("name", WITH_JSON)
def test_several_calls_in_the_format_are_those_calls(name: str, sound: bool) -> None:
    each = [forms_of(name, tool) for tool in TOOLS]
    for forms in zip(*each, strict=True):
        deltas = read(name, written(forms, ARGUMENTS), tools=TOOLS, sound_calls=sound)
        assert calls(deltas) == list(zip(TOOLS, ARGUMENTS, strict=True)), forms


@pytest.mark.parametrize("name", WITH_JSON)
def test_a_call_after_text_may_lack_what_stands_around_all_calls(name: str) -> None:
    """A grammar that waits for the trigger binds neither the opening nor the closing."""
    for form in forms_of(name, "r"):
        if form.ambiguous or name == "gpt_oss":
            continue
        number = f"0{form.number_end}" if form.number_end else ""
        text = f"Hm. {form.begin}{number}{ARGUMENTS[0]}{form.end}"
        deltas = read(name, text, tools=TOOLS, sound_calls=True)
        assert deltas[0] == ContentDelta("Hm. ") and calls(deltas[1:]) == [("r", ARGUMENTS[0])], form


@pytest.mark.parametrize("name", WITH_JSON)
def test_forms_are_told_apart_by_their_triggers(name: str) -> None:
    forms = call_format(name, TOOLS) or []
    assert {form.name for form in forms} == {*TOOLS}
    assert all(form.trigger and form.begin.startswith(form.trigger) for form in forms)
    assert len({form.begin for form in forms}) == len(forms)
    assert any(not form.ambiguous for form in forms) or name in ("none", "command_r", "functionary_v32")
    others = [form.trigger for form in forms if not form.ambiguous]
    assert not any(json.dumps({"answer": "text"}).startswith(trigger) for trigger in others)


@pytest.mark.parametrize("name", sorted(NO_JSON))
def test_dialects_without_json_say_so(name: str) -> None:
    assert call_format(name, TOOLS) is None


def test_no_tools_have_no_forms_and_no_dialect_is_an_error() -> None:
    assert call_format("hermes", []) == []
    with pytest.raises(ConfigError, match="hermes"):
        call_format("klingon", TOOLS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "r", "parameters": {"p": "x'),
        ("gpt_oss", ' to=functions.r<|channel|>commentary json<|message|>{"p": "x'),
        ("none", '```json\n{"name": "r", "arguments": {"p": "x'),
    ],
)
def test_what_no_trigger_begins_is_withheld_even_if_calls_are_sound(name: str, text: str) -> None:
    assert read(name, text, tools=TOOLS, sound_calls=True) == [ContentDelta(text)]


@pytest.mark.parametrize("name", names())
def test_marks_of_reasoning_are_those_that_are_read(name: str) -> None:
    marks = reasoning_marks(name)
    text = f"R{marks.close}{marks.answer}C"
    if name != "functionary_v32":
        assert said(read(name, marks.open + text)) == ("R", "C", [])
        assert said(read(name, text, starts_in_reasoning=True)) == ("R", "C", [])
    assert opens_reasoning(f"go{marks.open}\n") and not opens_reasoning(f"go{marks.open}{marks.close}")
