# SPDX-License-Identifier: Apache-2.0
"""GET /sessions, what a client is told when its session's prompt departed, and the line of each request."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest

from fakes import FakeSource, script
from tokenspeed.core.config import ServerConfig

TEMPLATE = "{{bos_token}}{%if tools%}<tool_call>{%endif%}{%for m in messages%}[{{m.role}}]{{m.content}}{%endfor%}>"
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
HEADER = "x-tokenspeed-prefix"


@pytest.fixture(scope="module")
def server(start_module: Any) -> Any:
    return start_module(source=FakeSource(chat_template=TEMPLATE, script=script(("#call", CALL), ("", "plain"))))


def tool(path: str, name: str) -> dict[str, object]:
    schema = {"type": "object", "properties": {}}
    if path == "/v1/messages":
        return {"name": name, "input_schema": schema}
    function = {"name": name, "parameters": schema}
    return {"type": "function", **function} if path == "/v1/responses" else {"type": "function", "function": function}


def ask(server: Any, path: str, session: str, *texts: str, tools: str = "ab", **fields: object) -> Any:
    """One turn: user and assistant by turns, the answer drained."""
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    body = {
        ("input" if path == "/v1/responses" else "messages"): said,
        ("max_output_tokens" if path == "/v1/responses" else "max_tokens"): 80,
        "tools": [tool(path, name) for name in tools],
        **fields,
    }
    answer = server.client.post(path, json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    return answer


def card(server: Any, session: str) -> dict[str, Any]:
    (found,) = [each for each in server.client.get("/sessions").json()["data"] if each["session"] == session]
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_departed_prompt_is_told_in_a_header_and_the_line(
    server: Any, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    session = f"told{path}{stream}"

    def turn(*texts: str, tools: str = "ab") -> str | None:
        return ask(server, path, session, *texts, tools=tools, stream=stream).headers.get(HEADER)

    with caplog.at_level(logging.INFO, "tokenspeed"):
        assert turn("one") is None, "a new session"
        assert turn("one", "plain", "two") is None, "it goes on"
        assert turn("one", "plain", "two", "plain", "three", tools="abc") == (
            "prefix-diverged: message 3, tool list changed (1 added)"
        )
        assert turn("one", "plain", "TWO", "plain", "three", tools="abc") == "prefix-diverged: message 2, edited"
        assert turn("one", "plain", "three", "plain", tools="abc") == (
            "prefix-diverged: message 2, removed (compaction)"
        )
    lines = [record.getMessage() for record in caplog.records if f" session {session}" in record.getMessage()]
    assert len(lines) == 5
    assert [line.partition(" prefix-diverged: ")[2].split(",")[0] for line in lines] == [
        "", "", "message 3", "message 2", "message 2",
    ]  # fmt: skip
    assert card(server, session)["prefix"] == "prefix-diverged: message 2, removed (compaction)"


def test_the_same_conversation_in_another_form_goes_on(server: Any) -> None:
    """A client may write the same message as text and as blocks, and its arguments with other spaces."""
    hint = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}

    def turn(first: object, arguments: str) -> str | None:
        call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": arguments}}
        messages = [
            {"role": "user", "content": first},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "c"},
        ]
        body = {"messages": messages, "max_tokens": 8}
        answer = server.client.post("/v1/chat/completions", json=body, headers={"x-session-id": "forms"})
        return answer.headers.get(HEADER)

    assert turn([hint], '{"x": 1, "y": 2}') is None
    assert turn("one", '{"x":1,"y":2}') is None
    assert turn("one", '{"x":1,"y":3}') == "prefix-diverged: message 1, edited"


@pytest.mark.parametrize("path", PATHS)
def test_a_session_is_listed_with_its_counts(server: Any, path: str) -> None:
    session = f"counts{path}"
    ask(server, path, session, "#call")
    held = card(server, session)
    ask(server, path, session, "#call", "ok", "x", tools="")
    found = card(server, session)
    assert (held["requests"], held["turns"], held["running"], held["finish_reason"]) == (1, 1, 0, "tool_calls")
    assert (found["requests"], found["turns"], found["running"]) == (2, 2, 0)
    assert found["generated_tokens"] > held["generated_tokens"] > 10
    added = {name: found[name] - held[name] for name in ("prompt_tokens", "generated_tokens")}
    assert found["context_tokens"] == sum(added.values())
    assert found["last_seen"] >= found["first_seen"] > 1.7e9


def test_a_refused_request_is_no_turn_and_does_not_run_on(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 5000}], "session_id": "refused"}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 400
    found = card(server, "refused")
    assert (found["requests"], found["turns"], found["running"], found["finish_reason"]) == (1, 0, 0, "refused")


def test_no_text_of_a_conversation_is_in_the_list(server: Any) -> None:
    ask(server, "/v1/messages", "private", "a very secret text")
    assert "secret" not in server.client.get("/sessions").text


def test_the_list_is_behind_the_key(start: Any) -> None:
    server = start(server=ServerConfig(api_key="k"))
    assert server.client.get("/sessions").status_code == 401
    assert server.client.get("/sessions", headers={"authorization": "Bearer k"}).json()["data"] == []


def test_the_line_has_every_time(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed"):
        ask(server, "/v1/messages", "times", "#call")
    (line,) = [record.getMessage() for record in caplog.records if "session times" in record.getMessage()]
    assert re.fullmatch(
        r"msg-\w+ prompt \d+ cached 0 generated \d+ queue 0\.\d{3} s ttft 0\.\d{3} s decode \d\.\d{3} s "
        r"speed [\d.]+ tok/s total \d\.\d{3} s finish tool_calls session times",
        line,
    )


@pytest.mark.parametrize("path", PATHS)
def test_pages_are_shown_as_held_after_calls_only(server: Any, path: str) -> None:
    def held_until(session: str) -> float | None:
        listed = server.app.state.served.sessions.listing(any_held=True)
        return next(each.held_until for each in listed.data if each.session == session)

    ask(server, path, f"held{path}", "#call")
    until = held_until(f"held{path}")
    assert until is not None and 290.0 < until - time.time() <= 300.0
    ask(server, path, f"held{path}", "hello")
    assert held_until(f"held{path}") is None
