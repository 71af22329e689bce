# SPDX-License-Identifier: Apache-2.0
"""The Messages dialect, stream and whole, over loopback, raw and with its own client."""

from __future__ import annotations

import json
from array import array
from typing import Any

import anthropic
import pytest

from fakes import FakeSource, script
from tokenspeed.core.config import ServerConfig

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}({{ t.function.name }}){% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}>"
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"name": "look", "description": "d", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "</tool_call> x"}}\n</tool_call>'
REPLIES = (
    ("#call", f"Let me.{CALL}"),
    ("#two", f"{CALL}\n{CALL}"),
    ("#cut", '<tool_call>\n{"name": "look", "arguments": {"at": "'),
    ("#think", "<think>so so</think>Done."),
    ("", "plain"),
)


def body(content: object = "hi", **fields: object) -> dict[str, object]:
    return {"model": "fake-model", "max_tokens": 200, "messages": [{"role": "user", "content": content}], **fields}


@pytest.fixture(scope="module")
def talking(start_module: Any) -> Any:
    """A server whose model speaks the dialect of TEMPLATE."""
    return start_module(source=FakeSource(chat_template=TEMPLATE, script=script(*REPLIES)))


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names must be their types."""
    found = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def prompt_of(server: Any, fields: dict[str, object]) -> str:
    """What the engine was given for a body."""
    assert server.client.post("/v1/messages", json=fields).status_code == 200
    ids = array("i", server.submits()[-1].request.token_ids)
    return str(server.llm.tokenizer.decode(list(ids), skip_special_tokens=True))


def test_whole_answer(talking: Any) -> None:
    response = talking.client.post("/v1/messages", json=body())
    answer = response.json()
    assert response.headers["request-id"] == answer["id"] and answer["id"].startswith("msg-")
    assert answer["content"] == [{"type": "text", "text": "plain"}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "fake-model")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("<bos>[user]hi>") - 4
    assert usage["output_tokens"] >= 5 and usage["cache_creation_input_tokens"] == 0


def test_stream_tells_blocks_in_order(talking: Any) -> None:
    response = talking.client.post("/v1/messages?beta=true", json=body("#call", stream=True, tools=[TOOL]))
    found = events(response.text)
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["text", "tool_use"]
    assert [e["index"] for e in found if e["type"] == "content_block_stop"] == [0, 1]
    text = "".join(e["delta"].get("text", "") for e in found if e["type"] == "content_block_delta")
    arguments = "".join(e["delta"].get("partial_json", "") for e in found if e["type"] == "content_block_delta")
    assert text == "Let me." and json.loads(arguments) == {"at": "</tool_call> x"}
    assert starts[1]["name"] == "look" and starts[1]["id"] and starts[1]["input"] == {}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] > 10 and found[0]["message"]["usage"]["output_tokens"] == 0


def test_thinking_is_a_signed_block(talking: Any) -> None:
    whole = talking.client.post("/v1/messages", json=body("#think")).json()["content"]
    assert [block["type"] for block in whole] == ["thinking", "text"]
    assert (whole[0]["thinking"], whole[1]["text"]) == ("so so", "Done.")
    found = events(talking.client.post("/v1/messages", json=body("#think", stream=True)).text)
    signatures = [e["delta"]["signature"] for e in found if e.get("delta", {}).get("type") == "signature_delta"]
    assert signatures == [whole[0]["signature"]]


def test_a_call_that_was_cut_off_is_text_and_no_call(talking: Any) -> None:
    answer = talking.client.post("/v1/messages", json=body("#cut", tools=[TOOL])).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["stop_reason"] != "tool_use"


def test_without_tools_a_call_is_text(talking: Any) -> None:
    answer = talking.client.post("/v1/messages", json=body("#call")).json()
    assert answer["content"] == [{"type": "text", "text": f"Let me.{CALL}"}]
    barred = body("#call", tools=[TOOL], tool_choice={"type": "none"})
    assert [b["type"] for b in talking.client.post("/v1/messages", json=barred).json()["content"]] == ["text"]


def test_one_call_at_a_time_where_that_is_asked(talking: Any) -> None:
    both = talking.client.post("/v1/messages", json=body("#two", tools=[TOOL])).json()
    assert [block["type"] for block in both["content"]] == ["tool_use", "tool_use"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    one = talking.client.post("/v1/messages", json=body("#two", tools=[TOOL], tool_choice=choice)).json()
    assert [block["type"] for block in one["content"]] == ["tool_use"] and one["stop_reason"] == "tool_use"


def test_the_same_in_two_forms_is_the_same_prompt(talking: Any) -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    plain = body("hi", system="Be brief.")
    parts = body([{"type": "text", "text": "hi", **hint}], system=[{"type": "text", "text": "Be brief.", **hint}])
    bill = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}
    billed = body("hi", system=[bill, {"type": "text", "text": "Be brief."}])
    prompts = [prompt_of(talking, fields) for fields in (plain, parts, billed)]
    assert prompts == ["[system]Be brief.[user]hi>"] * 3


def test_history_becomes_calls_and_results(talking: Any) -> None:
    history = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "a", "name": "look", "input": {"at": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}]},
                {"type": "text", "text": "more"},
            ],
        },
        {"role": "system", "content": "late"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "bad", "is_error": True}]},
    ]
    text = prompt_of(talking, {**body(), "messages": history, "tools": [TOOL]})
    expected = '(look)<tool_call>[user]go[assistant]ok!look{"at": "b"}[tool]seen[user]more[system]late[tool]Error: bad>'
    assert text == expected


def test_deferred_tools_are_told_where_they_are_found(talking: Any) -> None:
    later = {**TOOL, "name": "later", "defer_loading": True}
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    found = [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "later"}]}]
    text = prompt_of(talking, body(found, tools=[TOOL, later, hosted]))
    assert text.startswith("(look)<tool_call>[tool]{") and '"name":"later"' in text and "web_search" not in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: at least one message is required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "takes text only"),
        ({"messages": [{"role": "user", "content": 7}]}, "content"),
        ({"temperature": -1}, "temperature"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_in_the_dialect(
    talking: Any, fields: dict[str, object], words: str, stream: bool
) -> None:
    response = talking.client.post("/v1/messages", json={**body(), "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_says_both_numbers(talking: Any, stream: bool) -> None:
    response = talking.client.post("/v1/messages", json=body("x" * 600, stream=stream))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("prompt is too long: ") and message.endswith(" tokens > 511 maximum")


def test_a_thread_is_refused_so_that_clients_send_everything(talking: Any) -> None:
    error = talking.client.post("/v1/messages", json=body(thread={"type": "create"})).json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_unknown_fields_are_ignored(talking: Any) -> None:
    extra = {"context_management": {"edits": []}, "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"}}
    assert talking.client.post("/v1/messages", json=body(**extra, safeguards=[1])).status_code == 200


def test_tokens_are_counted_as_the_prompt_has_them(talking: Any) -> None:
    fields = body("hi", system="Be brief.", tools=[TOOL])
    count = talking.client.post("/v1/messages/count_tokens", json=fields).json()
    usage = talking.client.post("/v1/messages", json=fields).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_keys_in_either_header(start: Any) -> None:
    server = start(server=ServerConfig(api_key="secret"))
    refused = server.client.post("/v1/messages", json=body(), headers={"x-api-key": "wrong"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert server.client.post("/v1/messages", json=body(), headers=headers).status_code == 200


def test_its_own_client_runs_a_tool_and_reads_a_stream(talking: Any) -> None:
    client = anthropic.Anthropic(base_url=talking.url, api_key="any", max_retries=0)
    message = client.messages.create(**body("#call", tools=[TOOL]))  # type: ignore[call-overload]
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input, message.stop_reason) == ("look", {"at": "</tool_call> x"}, "tool_use")
    with client.messages.stream(**body("#think")) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == "Done."
    assert stream.get_final_message().stop_reason == "end_turn"
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").display_name == "fake-model"
    assert client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hi"}]).input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="too long"):
        client.messages.create(**body("x" * 600))  # type: ignore[call-overload]


@pytest.mark.parametrize("stream", [False, True])
def test_both_dialects_say_the_same(talking: Any, stream: bool) -> None:
    """Identical token ids, text, calls and counts for one conversation."""
    tool = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}
    chat = {"messages": [{"role": "user", "content": "#call"}], "tools": [tool], "max_tokens": 200}
    mine = talking.client.post("/v1/messages", json=body("#call", tools=[TOOL])).json()
    mine_ids = talking.submits()[-1].request.token_ids
    response = talking.client.post("/v1/chat/completions", json={**chat, "stream": stream})
    assert talking.submits()[-1].request.token_ids == mine_ids
    if stream:
        frames = [json.loads(x[6:]) for x in response.text.split("\n\n") if x.startswith("data: {")]
        deltas = [frame["choices"][0]["delta"] for frame in frames]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        text = "".join(delta.get("content") or "" for delta in deltas)
        name, arguments = calls[0]["function"]["name"], "".join(c["function"].get("arguments", "") for c in calls)
        finish = frames[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        text, finish = choice["message"]["content"], choice["finish_reason"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        assert response.json()["usage"]["completion_tokens"] == mine["usage"]["output_tokens"]
    assert (text, name, json.loads(arguments), finish) == ("Let me.", "look", {"at": "</tool_call> x"}, "tool_calls")
    assert mine["content"][0]["text"] == text and mine["content"][1]["input"] == json.loads(arguments)
