# SPDX-License-Identifier: Apache-2.0
"""Templates that models are published with render what transformers renders.

A conversation can be written in several ways that mean the same; transformers is given one after the other until the
text shows everything that was said, and refuses only when it refuses all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from published_templates import published_templates
from tokenspeed.chat.template import ChatTemplate
from tokenspeed.core.errors import InvalidRequestError

pytestmark = [pytest.mark.models, pytest.mark.slow]

Chat = Sequence[Mapping[str, object]]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2026"}
PLACE = "Uetliberg"
REFUSALS = (jinja2.TemplateError, TypeError)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_town",
            "description": "Finds <é> & 'more'",
            "parameters": {
                "type": "object",
                "properties": {"z": {"type": "string", "description": "a place"}, "a": {"type": "integer"}},
                "required": ["z"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Stops.", "parameters": {"type": "object"}}},
]


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def called(*numbers: int, text: str = "", **more: object) -> dict[str, object]:
    calls = [
        {
            "id": f"call0000{n}",
            "type": "function",
            "function": {"name": "find_town", "arguments": {"z": f"{PLACE} bei Zürich <b>", "a": n}},
        }
        for n in numbers
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls, **more}


def result(number: int, text: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "find_town", "content": text}


def said(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief, and <exact>."}
CHATS: dict[str, Chat] = {
    "one turn": [user("hi & bye")],
    "system": [SYSTEM, user("  hi\n"), said("yo"), user("more")],
    "no generation": [user("hi"), said("yo")],
    "call": [user("where?"), called(1), result(1, "there: <a>")],
    "text and call": [user("where?"), called(1, text="Let me look."), result(1, "there"), said("Found."), user("ok")],
    "two calls": [SYSTEM, user("where?"), called(1, 2), result(1, "there"), result(2, "and there")],
    "calls in turn": [user("where?"), called(1), result(1, "no"), called(2), result(2, "yes"), said("So."), user("ok")],
    "reasoning": [user("2+2?"), said("4", reasoning_content="Two and two."), user("3+3?")],
    "reasoning and call": [user("where?"), called(1, reasoning_content="I need the tool."), result(1, "there")],
    "reasoning, call, answer": [
        SYSTEM,
        user("where?"),
        called(1, reasoning_content="I need it."),
        result(1, "there"),
        said("There.", reasoning_content="It said so."),
        user("thanks"),
    ],
}


@cache
def compiled(name: str) -> ChatTemplate:
    return ChatTemplate(published_templates()[name], bos_token=NAMES["bos_token"], eos_token=NAMES["eos_token"])


def reference(name: str, chat: Chat, **variables: object) -> str | None:
    """What transformers renders; None when it refuses."""
    try:
        rendered, _ = render_jinja_template(
            [deepcopy(chat)], chat_template=published_templates()[name], **{**NAMES, **deepcopy(variables)}
        )
    except REFUSALS:
        return None
    return str(rendered[0])


def ours(name: str, chat: Chat, **variables: object) -> str | None:
    try:
        return compiled(name).render(deepcopy(chat), date_string=NAMES["date_string"], **deepcopy(variables))  # type: ignore[arg-type]
    except InvalidRequestError:
        return None


def spellings(chat: Chat) -> Iterator[Chat]:
    """Ways to write the same conversation."""
    for none_content in (False, True):
        for text_arguments in (False, True):
            yield [_spelled(message, none_content, text_arguments) for message in chat]


def _spelled(message: Mapping[str, object], none_content: bool, text_arguments: bool) -> dict[str, object]:
    spelled = deepcopy(dict(message))
    calls = spelled.get("tool_calls")
    if isinstance(calls, list):
        if none_content and not spelled["content"]:
            spelled["content"] = None
        for call in calls:
            if text_arguments:
                function = call["function"]
                function["arguments"] = f'{{"z": "{PLACE} bei Zürich <b>", "a": {function["arguments"]["a"]}}}'
    return spelled


def expected(name: str, chat: Chat, **variables: object) -> str | None:
    """Of the first spelling that shows the calls, else of the first that is rendered at all."""
    texts = [text for each in spellings(chat) if (text := reference(name, each, **variables)) is not None]
    has_calls = any(message.get("tool_calls") for message in chat)
    whole = [text for text in texts if not has_calls or PLACE in text]
    return next(iter([*whole, *texts]), None)


@pytest.mark.parametrize("kind", list(CHATS))
def test_every_template_renders_as_in_transformers(kind: str) -> None:
    num_rendered = 0
    for name in published_templates():
        for tools in (None, TOOLS):
            opens = kind != "no generation"
            want = expected(name, CHATS[kind], tools=tools, add_generation_prompt=opens)
            got = ours(name, CHATS[kind], tools=tools, add_generation_prompt=opens)
            assert got == want, (name, kind, bool(tools))
            num_rendered += want is not None
    assert num_rendered >= 120


@pytest.mark.parametrize("thinks", [True, False])
def test_switches_reach_every_template(thinks: bool) -> None:
    switches = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": "low"}
    for name in published_templates():
        want = expected(name, CHATS["reasoning"], tools=TOOLS, add_generation_prompt=True, **switches)
        got = ours(name, CHATS["reasoning"], tools=TOOLS, add_generation_prompt=True, **switches)
        assert got == want, name


def test_parts_are_rendered_as_text_is() -> None:
    """As the template itself renders parts, where it takes them; and as text in every case."""
    as_text = [SYSTEM, user("hi, there"), said("yo"), user("more")]
    as_parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in as_text]
    num_taken = 0
    for name in published_templates():
        want = expected(name, as_text, add_generation_prompt=True)
        assert ours(name, as_parts, add_generation_prompt=True) == want, name
        taken = reference(name, as_parts, add_generation_prompt=True)
        num_taken += want is not None and taken == want
    assert num_taken >= 20


def test_arguments_may_come_as_text() -> None:
    chat = CHATS["text and call"]
    for name in published_templates():
        as_text = [_spelled(message, none_content=True, text_arguments=True) for message in chat]
        assert ours(name, as_text, tools=TOOLS, add_generation_prompt=True) == ours(
            name, chat, tools=TOOLS, add_generation_prompt=True
        ), name
