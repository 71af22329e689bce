# SPDX-License-Identifier: Apache-2.0
"""Rendering equals transformers', in a sandbox, and refusals are errors of the request."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed.chat.template import ChatTemplate
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import InvalidRequestError, StartError

CHATML = """{%- if tools %}
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{% if message.tool_calls %}
{%- for call in message.tool_calls %}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson(indent=1) }}}
{%- endfor %}
{%- endif %}
{% generation %}{{ message.content | trim }}{% endgeneration %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
MISTRAL_LIKE = """{{ bos_token }}{% set ns = namespace(system='') %}
{%- for m in messages %}
{%- if m.role == 'system' %}{% set ns.system = m.content %}
{%- elif m.role == 'user' %}[INST] {{ ns.system }}{{ m.content }} [/INST]
{%- elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}
{%- else %}{{ raise_exception('role ' ~ m.role ~ ' is not allowed') }}
{%- endif %}
{%- endfor %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_town",
            "description": "Finds <é> & 'more'",
            "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "find_town", "arguments": {"z": "Zürich <b>", "a": 1}}}
CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "hi"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  hi\n"},
        {"role": "assistant", "content": "yo <|im_end|>"},
        {"role": "user", "content": "more"},
    ],
    "tool call": [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, deepcopy(CALL)]},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
        {"role": "tool", "tool_call_id": "c1", "content": "and there"},
    ],
}


def reference(source: str, messages: object, tools: object, add_generation_prompt: bool) -> str:
    rendered, _ = render_jinja_template(
        [deepcopy(messages)],
        tools=tools,
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(rendered[0])


def check_like_reference(source: str, names: list[str]) -> None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    for name in names:
        wire = deepcopy(CONVERSATIONS[name])
        for message in wire:
            for call in message.get("tool_calls", ()):  # type: ignore[attr-defined]
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else None
        for tools in (None, TOOLS):
            for prompt in (True, False):
                expected = reference(source, CONVERSATIONS[name], tools, prompt)
                assert template.render(CONVERSATIONS[name], tools, prompt) == expected
                assert template.render(wire, tools, prompt) == expected


@pytest.mark.parametrize(("source", "names"), [(CHATML, list(CONVERSATIONS)), (MISTRAL_LIKE, ["one turn", "system"])])
def test_rendering_equals_transformers(source: str, names: list[str]) -> None:
    check_like_reference(source, names)


@pytest.mark.models
@pytest.mark.parametrize("fixture", ["smollm2_path", pytest.param("qwen_coder_path", marks=pytest.mark.slow)])
def test_real_templates_render_as_in_transformers(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    source = open_model(ModelConfig(model=str(path))).chat_template
    assert source is not None
    check_like_reference(source, list(CONVERSATIONS))


def test_bos_is_printed_once_by_the_template_itself() -> None:
    text = ChatTemplate(MISTRAL_LIKE, bos_token="<s>", eos_token="</s>").render(CONVERSATIONS["system"])
    assert text.count("<s>") == 1


def test_template_kwargs_reach_the_template() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(CONVERSATIONS["one turn"], enable_thinking=False).endswith("<think></think>")
    assert not template.render(CONVERSATIONS["one turn"]).endswith("<think></think>")


def test_a_refusing_template_is_an_error_of_the_request() -> None:
    template = ChatTemplate(MISTRAL_LIKE)
    with pytest.raises(InvalidRequestError, match="role tool is not allowed") as caught:
        template.render(CONVERSATIONS["tool call"])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("body", ["{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ no() }}"])
def test_a_failing_template_is_an_error_of_the_request(body: str) -> None:
    with pytest.raises(InvalidRequestError, match="refuses the conversation"):
        ChatTemplate(body).render(CONVERSATIONS["one turn"])


def test_a_broken_template_stops_the_start_with_its_line() -> None:
    with pytest.raises(StartError, match="line 2"):
        ChatTemplate("ok\n{% if %}")


@pytest.mark.parametrize(
    "body",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_the_sandbox_holds(body: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(body).render(CONVERSATIONS["one turn"])


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenspeed.chat.template.OUTPUT_CHARS_MAX", 1000)
    with pytest.raises(InvalidRequestError, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(2000) %}x{% endfor %}").render(CONVERSATIONS["one turn"])


OBJECTS_ONLY = """{% for m in messages %}{{ m.role }}:{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }}
{%- for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]
{%- endfor %}
{% endfor %}"""


def test_malformed_arguments_never_fail_the_session() -> None:
    bad = {"id": "c1", "type": "function", "function": {"name": "run_it", "arguments": '{"cmd": '}}
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [bad]},
        {"role": "tool", "tool_call_id": "c1", "content": "bad arguments"},
    ]
    for source in (OBJECTS_ONLY, CHATML):
        text = ChatTemplate(source).render(history)
        assert "run_it" in text
        assert "cmd" in text
        assert "bad arguments" in text


def test_a_template_gets_the_shape_that_it_reads() -> None:
    parts_only = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    assert ChatTemplate(parts_only).render([{"role": "user", "content": "hi"}]) == "hi;"
    none_means_call = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    assert (
        ChatTemplate(none_means_call).render(CONVERSATIONS["tool call"]).count('find_town{"z": "Zürich <b>", "a": 1}')
        == 2
    )


def test_developer_is_system_where_the_template_knows_no_developer() -> None:
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    chat = [{"role": "developer", "content": "D"}, {"role": "user", "content": "hi"}]
    assert ChatTemplate(source).render(chat) == "system:D;user:hi;"
    assert ChatTemplate("{# developer #}" + source).render(chat) == "developer:D;user:hi;"


LATE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
    {"role": "system", "content": "The date is known."},
    {"role": "user", "content": "and now?"},
    {"role": "system", "content": "Finish."},
]


def test_a_late_system_message_stays_where_the_template_takes_it() -> None:
    text = ChatTemplate(CHATML).render(LATE)
    assert text.index("ho<|im_end|>") < text.index("<|im_start|>system\nThe date is known.") < text.index("and now?")


def test_a_late_system_message_joins_the_next_user_turn_elsewhere() -> None:
    head_only = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system') }}"
        "{%- endif %}[{{ m.role }}]{{ m.content }}\n{%- endfor %}"
    )
    late = "<system>\nThe date is known.\n</system>\nand now?"
    expected = ["[system]Be brief.", "[user]hi", "[assistant]ho", f"[user]{late}", "[user]<system>\nFinish.\n</system>"]
    assert ChatTemplate(head_only).render(LATE) == "".join(expected)
