# SPDX-License-Identifier: Apache-2.0
"""Which session a request is of, and when its pages are kept for the next turn."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import FakeSource, script
from tokenspeed.core.ipc import Release
from tokenspeed.core.request import Retention, SamplingParams
from tokenspeed.server.chat import Conversation, Message
from tokenspeed.server.sessions import session_of

TEMPLATE = "{{bos_token}}{%if tools%}<tool_call>{%endif%}{%for m in messages%}[{{m.role}}]{{m.content}}{%endfor%}>"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(start_module: Any) -> Any:
    return start_module(source=FakeSource(chat_template=TEMPLATE, script=script(("#call", CALL), ("", "plain"))))


def retained(server: Any, path: str, fields: dict[str, object], **headers: str) -> tuple[Retention | None, bool]:
    """What was asked of the pages of a request, and whether they were let go at its end."""
    seen = len(server.worker.received)
    body = {"model": "m", "max_tokens": 80, **fields}
    assert server.client.post(path, json=body, headers=headers).status_code == 200
    submit = server.submits()[-1].request
    server.chat(max_tokens=1)  # whatever was told before it has arrived when it is answered
    released = [m for m in server.worker.received[seen:] if isinstance(m, Release)]
    assert all(message.request_id == submit.request_id for message in released)
    return submit.retain, bool(released)


def messages(path: str, content: str, **fields: object) -> tuple[str, dict[str, object]]:
    tool = CHAT_TOOL if path.endswith("completions") else TOOL
    return path, {"messages": [{"role": "user", "content": content}], "tools": [tool], **fields}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_pages_wait_for_the_results_of_calls_and_for_nothing_else(server: Any, path: str, stream: bool) -> None:
    kept, released = retained(server, *messages(path, "#call", stream=stream), **{"x-session-id": "s1"})
    assert (kept, released) == (Retention("s1", 300.0), False)
    kept, released = retained(server, *messages(path, "hello", stream=stream), **{"x-session-id": "s1"})
    assert (kept, released) == (Retention("s1", 300.0), True)
    assert retained(server, path, {"messages": [{"role": "user", "content": "#call"}]}) == (None, False)


def test_the_longest_hint_counts(server: Any) -> None:
    content = [{"type": "text", "text": "#call", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    fields = {"messages": [{"role": "user", "content": content}], "tools": [TOOL], "metadata": {"user_id": "u"}}
    assert retained(server, "/v1/messages", fields) == (Retention("u", 3600.0), False)


def conversation(*texts: str, system: str = "be brief") -> Conversation:
    turns = [Message("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(texts)]
    return Conversation((Message("system", system), *turns), (CHAT_TOOL,), SamplingParams())


def test_a_session_without_a_name_is_known_by_its_beginning() -> None:
    first = session_of({}, (None,), conversation("a"))
    assert first == session_of({}, (), conversation("a", "b", "c"))
    assert first != session_of({}, (), conversation("b"))
    assert first != session_of({}, (), conversation("a", system="be long"))


def test_names_come_from_the_body_then_from_headers_and_agents_are_apart() -> None:
    headers = {"x-claude-code-session-id": "h"}
    assert session_of(headers, (None, "b"), conversation("a")) == "b"
    assert session_of(headers, (None, 7), conversation("a")) == "h"
    assert session_of({**headers, "x-claude-code-agent-id": "sub"}, (), conversation("a")) == "h/sub"
    long = session_of({}, ("k" * 5000,), conversation("a"))
    assert len(long) < 100 and long == session_of({}, ("k" * 5000,), conversation("b"))


def test_a_session_named_inside_an_object_is_that_session() -> None:
    named = '{"device_id": "d", "account_uuid": "", "session_id": "inner"}'
    assert session_of({}, (named,), conversation("a")) == "inner"
    for odd in ('{"device_id": "d"}', '{"session_id": 7}', "{no json"):
        assert session_of({}, (odd,), conversation("a")) == odd
