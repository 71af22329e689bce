# SPDX-License-Identifier: Apache-2.0
"""Forms that a real model is held to, over real HTTP: whatever it would rather say, at any temperature, streamed or
not, beside others."""

from __future__ import annotations

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

pytestmark = pytest.mark.models

UPTIME = {"type": "object", "properties": {"cmd": {"const": "uptime"}}, "required": ["cmd"]}
UPTIME = {**UPTIME, "additionalProperties": False}
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {
        "t": {
            "type": "object",
            "properties": {"k": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/t"}}},
            "required": ["k"],
            "additionalProperties": False,
        }
    },
}
ORDER = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["buy", "sell"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "note": {"type": ["string", "null"], "maxLength": 12},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,4}$"}, "maxItems": 3},
    },
    "required": ["kind", "count", "note", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(start_module_server: Any, smollm2_path: Path) -> Any:
    return start_module_server(
        str(smollm2_path), "--threads", "2", "--kv-tokens", "16384", "--tool-call-parser", "hermes"
    )


def schema_format(schema: Any, **more: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


def events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def streamed(server: Any, content: str, **fields: object) -> tuple[str, str | None]:
    """The content and the finish reason of a streamed chat."""
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 64, **fields}
    choices = [choice for event in events(server, "/v1/chat/completions", body) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


def test_stop_text_inside_a_forced_answer(server: Any) -> None:
    """ST-1: no part of the stop text leaks, and a near miss arrives whole."""
    for const, text in (("alpha-DEFGHIJ-omega", '"alpha-'), ("alpha-DEFGHIX-omega", '"alpha-DEFGHIX-omega"')):
        fields = {**schema_format({"const": const}, strict=True), "stop": ["DEFGHIJ"]}
        (choice,) = server.chat("hi", **fields).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert streamed(server, "hi", **fields) == (text, "stop")


def test_logprobs_of_a_character_in_pieces(server: Any) -> None:
    """SL-1: the bytes of the entries are the text, and every log-probability is one."""
    fields = {**schema_format({"const": "🧪"}), "logprobs": True, "top_logprobs": 3}
    body = server.chat("hi", **fields).json()
    (choice,) = body["choices"]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == '"🧪"'.encode()
    assert all(entry["bytes"] != [239, 191, 189] for entry in entries)
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 0 for entry in entries)
    assert len(entries) == body["usage"]["completion_tokens"] - 1, "the end token has no entry"


def test_an_awkward_schema_refuses_nothing_but_itself(server: Any) -> None:
    """SO-1: three tools of which one has a look-ahead; strict asks for what cannot be had."""
    patterns = ({"pattern": r"^\d{3}-\w+$", "maxLength": 8}, {"pattern": "^(?=.*@).+$"}, {"maxLength": 10000})
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"t{index}",
                "parameters": {"type": "object", "properties": {"x": {"type": "string", **rule}}, "required": ["x"]},
            },
        }
        for index, rule in enumerate(patterns)
    ]
    answer = server.chat("hi", tools=tools)
    assert answer.status_code == 200
    assert "t1" in answer.headers["x-tokenspeed-warning"]
    choice = {"type": "function", "function": {"name": "t0"}}
    (called,) = server.chat("hi", tools=tools, tool_choice=choice).json()["choices"][0]["message"]["tool_calls"]
    assert re.search(r"^\d{3}-\w+$", json.loads(called["function"]["arguments"])["x"])
    tools[1]["function"]["strict"] = True  # type: ignore[index]
    refused = server.chat("hi", tools=tools)
    assert refused.status_code == 400
    assert "'t1', parameters.properties.x" in refused.json()["error"]["message"]


def test_recursion(server: Any) -> None:
    """SO-3: endless ones and unknown types are refused before anything is generated, a good one is followed."""
    for schema in ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, {"type": "not-a-type"}):
        refused = server.chat("hi", **schema_format(schema))
        assert refused.status_code == 400
        assert refused.json()["error"]["message"]
    (choice,) = server.chat("hi", **schema_format(TREE)).json()["choices"]
    if choice["finish_reason"] == "stop":
        jsonschema_rs.validate(TREE, json.loads(choice["message"]["content"]))


def test_a_forced_call_over_messages(server: Any) -> None:
    """AM-1: events in order, one start an index, the input in pieces that join to the forced one."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64, "temperature": 0}
    body |= {"tools": [{"name": "sh", "input_schema": UPTIME}], "tool_choice": {"type": "tool", "name": "sh"}}
    found = events(server, "/v1/messages", body)
    kinds = [event["type"] for event in found if event["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event for event in found if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == list(range(len(starts)))
    (tool,) = [event["content_block"] for event in starts if event["content_block"]["type"] == "tool_use"]
    assert (tool["name"], tool["input"]) == ("sh", {})
    pieces = [
        event["delta"]["partial_json"] for event in found if event.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"cmd": "uptime"}
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens"] > 0


def test_a_forced_answer_over_responses(server: Any) -> None:
    """RA-1: every event in its place, and an end that says how it ended."""
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": {"v": 1}}}}
    body = {"input": "hi", "temperature": 0, "text": form}
    found = events(server, "/v1/responses", body)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    (item,) = found[-1]["response"]["output"]
    assert json.loads(item["content"][0]["text"]) == {"v": 1}
    assert found[-1]["response"]["text"]["format"] == form["format"]
    cut = events(server, "/v1/responses", {**body, "max_output_tokens": 2})
    assert cut[-1]["type"] == "response.incomplete"


def test_arguments_leave_while_they_are_written(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 64}
    parameters = {"type": "object", "properties": {"cmd": {"const": "a " * 8}}, "required": ["cmd"]}
    body |= {"tools": [{"type": "function", "function": {"name": "sh", "parameters": parameters}}]}
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    deltas = [
        call
        for event in events(server, "/v1/chat/completions", body)
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    pieces = [delta["function"]["arguments"] for delta in deltas if delta["function"].get("arguments")]
    assert json.loads("".join(pieces)) == {"cmd": "a " * 8}
    assert len(pieces) > 3, "the whole came at once"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_many_forms_at_once_and_free_text_beside_them(server: Any, temperature: float) -> None:
    """Each keeps to its own form, whatever its neighbours are held to."""
    forms: list[dict[str, Any]] = [
        schema_format(ORDER),
        {"guided_regex": "[a-f]{3}-[0-9]{2}"},
        {"guided_choice": ["red", "green", "dark blue"]},
        {"guided_grammar": 'root ::= "(" [0-9] ("," [0-9]){2} ")"'},
        {},
        schema_format(ORDER),
    ]

    def ask(index: int) -> tuple[str, str]:
        fields = {"temperature": temperature, "seed": index, "max_tokens": 64, **forms[index]}
        (choice,) = server.chat(f"Say {index}.", **fields).json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]

    with ThreadPoolExecutor(len(forms)) as pool:
        answers = list(pool.map(ask, range(len(forms))))
    for index, (text, finish) in enumerate(answers):
        assert text
        if index == 4:
            continue
        assert finish == "stop", (index, text)
        if index in (0, 5):
            jsonschema_rs.validate(ORDER, json.loads(text))
        pattern = (None, "[a-f]{3}-[0-9]{2}", "red|green|dark blue", r"\([0-9],[0-9],[0-9]\)")[index % 5]
        assert pattern is None or re.fullmatch(pattern, text), text
    server.wait_for("num_requests_running", 0.0)


def test_several_choices_and_a_least_length(server: Any) -> None:
    """An end that only the form asks for comes even where min_tokens would wait for more."""
    fields = {"guided_choice": ["yes", "no"], "n": 3, "temperature": 1.0, "min_tokens": 20, "max_tokens": 30}
    for choice in server.chat("Well?", **fields).json()["choices"]:
        assert (choice["message"]["content"] in ("yes", "no"), choice["finish_reason"]) == (True, "stop")
