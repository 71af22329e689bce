# SPDX-License-Identifier: Apache-2.0
"""Faults that real servers had with what agents send: odd histories, billing lines, system messages in the middle, and
items of every kind. The names are those of the cases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripted import CALLING_TEMPLATE, spoken_call, write_scripted_model

STRICT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}" + CALLING_TEMPLATE
)
REPLIES = [
    ("say json", '{"v":1}'),
    ("use sh", spoken_call("sh", cmd="uptime")),
    ("", "The quick brown fox."),
]
FUNCTION = {"name": "run_it", "description": "Runs it.", "parameters": {"type": "object", "properties": {}}}
FLAT = {"type": "function", **FUNCTION}
LIMITS = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def server(start_module_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("agents") / "model"
    write_scripted_model(folder, REPLIES, template=STRICT_TEMPLATE, context_length=16384)
    return start_module_server(str(folder), "--load-format", "scripted", "--kv-tokens", "65536")


def post(server: Any, path: str, body: dict[str, Any], **headers: str) -> Any:
    return server.client.post(path, json=body, headers=headers)


def is_alive(server: Any) -> bool:
    return bool(server.chat("are you there", max_tokens=4).status_code == 200)


def bad_history(path: str, arguments: str, *, has_calls: bool) -> dict[str, Any]:
    """A session in which the model once wrote arguments that are no JSON."""
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "c1", "name": "run_it", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c1", "output": "bad arguments"}
        items = [
            {"role": "user", "content": "go"},
            *([call, output] if has_calls else []),
            {"role": "user", "content": "on"},
        ]
        return {"input": items, "tools": [FLAT], "max_output_tokens": 24, "temperature": 0}
    if path == "/v1/messages":
        said: list[dict[str, Any]] = [{"type": "text", "text": "ok"}]
        result: list[dict[str, Any]] = [{"type": "text", "text": "on"}]
        if has_calls:
            said.append({"type": "tool_use", "id": "c1", "name": "run_it", "input": {"raw": arguments}})
            result.insert(0, {"type": "tool_result", "tool_use_id": "c1", "content": "bad arguments", "is_error": True})
        turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": said}]
        return {"messages": [*turns, {"role": "user", "content": result}], **LIMITS}
    call = {"id": "c1", "type": "function", "function": {"name": "run_it", "arguments": arguments}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call] if has_calls else []}
    tool = {"role": "tool", "tool_call_id": "c1", "content": "bad arguments"}
    messages = [
        {"role": "user", "content": "go"},
        assistant,
        *([tool] if has_calls else []),
        {"role": "user", "content": "on"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}], **LIMITS}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("arguments", "has_calls"), [('{"cmd": ', True), ("", True), ("[1]", True), ("null", True), ("{}", False)]
)
def test_ct_1_a_call_that_was_no_json_does_not_end_the_session(
    server: Any, path: str, arguments: str, has_calls: bool
) -> None:
    first, again = (post(server, path, bad_history(path, arguments, has_calls=has_calls)) for _ in range(2))
    assert first.status_code == again.status_code == 200, first.text
    assert "quick brown" in first.text and "quick brown" in again.text


def test_pc_1_a_billing_line_is_not_part_of_the_prompt(server: Any) -> None:
    words = "Fixed instructions of an agent, which never change. " * 160

    def ask(stamp: str, text: str) -> tuple[int, int]:
        """(cached, all) tokens of the prompt."""
        billing = f"x-anthropic-billing-header: cc_version=9.9.9; cch={stamp};"
        system = [{"type": "text", "text": billing}, {"type": "text", "text": text}]
        body = {"system": system, "messages": [{"role": "user", "content": "hi"}], **LIMITS}
        usage = post(server, "/v1/messages?beta=true", body).json()["usage"]
        return usage["cache_read_input_tokens"], usage["cache_read_input_tokens"] + usage["input_tokens"]

    ask("aa01", words)
    cached, total = ask("bb02", words)
    assert cached >= 0.9 * total and total > 8000
    changed, _ = ask("cc03", words.replace("Fixed", "Other", 1))
    assert changed < 0.1 * total, "a changed word has to lower the hit"


def test_am_2_a_system_message_in_the_middle(server: Any) -> None:
    system = [
        {"type": "text", "text": "S1", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "S2"},
    ]
    user = {"role": "user", "content": "hi"}
    extra = {"role": "system", "content": "Extra: kinds are A, B."}
    body = {"system": system, "messages": [user, extra], **LIMITS}
    for path in ("/v1/messages?beta=true", "/v1/messages"):
        answer = post(server, path, body, **{"x-api-key": "any", "anthropic-version": "2023-06-01"})
        assert answer.status_code == 200 and answer.json()["content"][0]["text"] == REPLIES[-1][1]
    count = {"system": system, "messages": [user]}
    fewer, more = (
        post(server, "/v1/messages/count_tokens?beta=true", asked).json()["input_tokens"]
        for asked in (count, {**count, "messages": [user, extra]})
    )
    assert more >= fewer + len("Extra: kinds are A, B.")
    assert answer.json()["usage"]["input_tokens"] + answer.json()["usage"]["cache_read_input_tokens"] == more
    wrong = post(server, "/v1/messages", {**body, "messages": [user, {"role": "zzz", "content": "x"}]})
    assert wrong.status_code == 400
    assert wrong.json()["type"] == "error" and wrong.json()["error"]["type"] == "invalid_request_error"
    assert "messages.1.role" in wrong.json()["error"]["message"]
    assert server.client.head("/").status_code == 200


def test_ra_1_the_events_of_a_response(server: Any) -> None:
    answer = post(server, "/v1/responses", {"input": "say json", "stream": True, "temperature": 0})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * len(deltas) and deltas
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all({"item_id", "output_index", "content_index"} <= set(delta) for delta in deltas)
    response = events[-1]["response"]
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", response["model"])
    assert response["output"][0]["content"][0]["text"] == "".join(delta["delta"] for delta in deltas) == '{"v":1}'
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    cut = post(server, "/v1/responses", {"input": "say json", "stream": True, "max_output_tokens": 3})
    last = json.loads([line for line in cut.text.splitlines() if line.startswith("data: ")][-1][6:])
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_ra_3_items_of_every_kind(server: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r1", "summary": []},
        {"type": "message", "role": "assistant", "content": []},
        {"type": "function_call", "call_id": "k1", "name": "sh", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "k1", "output": "ok"},
        {"role": "user", "content": "use sh"},
    ]
    shell = {"type": "function", "name": "sh", "parameters": {"type": "object", "properties": {}}}
    body = {
        "input": items,
        "tools": [{"type": "web_search"}, shell],
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {},
    }
    answer = post(server, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    (call,) = [item for item in answer.json()["output"] if item["type"] == "function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("sh", {"cmd": "uptime"})
    bare = {**body, "input": [item for item in items if item.get("type") not in ("reasoning", "message")]}
    counts = [post(server, "/v1/responses/input_tokens", each).json()["input_tokens"] for each in (body, bare)]
    assert counts[0] == counts[1], "empty reasoning and an empty message are nothing"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", '{"messages":[{"role":"user","content":"a"}],"max_tokens":8,"stream":"true"}'),
        ("/v1/messages", '{"messages":[{"role":"user","content":"a"}],"max_tokens":8,"temperature":-1}'),
        ("/v1/messages", '{"messages":[{"role":"user","content":"a"}],"max_tokens":8,"stop_sequences":[""]}'),
        ("/v1/messages", '{"messages":[],"max_tokens":8}'),
        ("/v1/messages", "{"),
        ("/v1/messages/count_tokens", '{"messages":3}'),
        ("/v1/responses", '{"input":"a","stream":"true"}'),
        ("/v1/responses", '{"input":"a","temperature":-1}'),
        ("/v1/responses", '{"input":[]}'),
        ("/v1/responses", "{"),
    ],
)
def test_er_3_bad_bodies_name_the_field(server: Any, path: str, body: str) -> None:
    answer = server.client.post(path, content=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    named = ("stream", "temperature", "stop", "messages", "input", "body")
    if path.startswith("/v1/messages"):
        assert answer.json()["type"] == "error" and set(error) == {"type", "message"}
        assert any(name in error["message"] for name in named)
    else:
        assert error["param"] in named
    assert error["type"] == "invalid_request_error" and is_alive(server)


def test_er_3_unknown_fields_are_accepted(server: Any) -> None:
    extra = {"store": False, "metadata": {}, "service_tier": "auto", "prompt_cache_key": "k", "brand_new": [1]}
    messages = [{"role": "user", "content": "hi"}]
    assert post(server, "/v1/messages", {"messages": messages, **LIMITS, **extra}).status_code == 200
    assert post(server, "/v1/responses", {"input": "hi", **extra}).status_code == 200
    assert post(server, "/v1/completions", {"prompt": "hi", **LIMITS, **extra}).status_code == 200
