# SPDX-License-Identifier: Apache-2.0
"""The Responses dialect, stream and whole, over loopback, raw and with its own client."""

from __future__ import annotations

import itertools
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from fakes import FakeSource, FakeWorker, engine_info, script
from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.server.errors import HttpError
from tokenspeed.server.responses_store import ResponsesStore
from tokenspeed.server.responses_tools import Toolbox

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{% for t in tools %}({{ t.function.name }}){% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}>"
)
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"type": "function", "name": "look", "description": "d", "strict": False, "parameters": SCHEMA}
SPAWN = {"type": "function", "name": "spawn", "parameters": SCHEMA}
SPACE = {"type": "namespace", "name": "agents", "description": "n", "tools": [SPAWN]}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "p",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
SEARCH = {"type": "tool_search", "execution": "client", "parameters": SCHEMA}


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CALL = call("look", at="</tool_call> x")
REPLIES = (
    ("#call", f"Let me.{CALL}"),
    ("#two", f"{CALL}\n{CALL}"),
    ("#cut", '<tool_call>\n{"name": "look", "arguments": {"at": "'),
    ("#think", "<think>so so</think>Done."),
    ("#space", call("agents__spawn", at="a")),
    ("#bare", call("spawn", at="a")),
    ("#patch", call("patch", input='*** "x"\n')),
    ("#search", call("tool_search", at="a")),
    ("#found", call("later", at="a")),
    ("#json", '{"v":1}'),
    ("#long", "x" * 3000),
    ("", "plain"),
)


def body(content: object = "hi", **fields: object) -> dict[str, Any]:
    return {"model": "fake-model", "max_output_tokens": 200, "input": content, **fields}


def user(text: object) -> dict[str, object]:
    return {"type": "message", "role": "user", "content": text}


@pytest.fixture(scope="module")
def talking(start_module: Any) -> Any:
    """A server whose model speaks the dialect of TEMPLATE."""
    worker = FakeWorker(info=engine_info(max_model_len=2048, num_kv_blocks=256))
    return start_module(worker=worker, source=talking_source())


def ask(server: Any, fields: dict[str, Any]) -> dict[str, Any]:
    response = server.client.post("/v1/responses", json=fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names must be their types and whose numbers count from 0."""
    found = []
    for frame in text.strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(found)
        found.append(event)
    return found


def streamed(server: Any, fields: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.client.post("/v1/responses", json={**fields, "stream": True})
    assert response.status_code == 200, response.text
    return events(response.text)


def prompt_of(server: Any, fields: dict[str, Any]) -> str:
    """What the engine was given for a body."""
    ask(server, fields)
    ids = array("i", server.submits()[-1].request.token_ids)
    return str(server.llm.tokenizer.decode(list(ids), skip_special_tokens=True))


def bare(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what is new in each reply."""
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def test_whole_answer(talking: Any) -> None:
    response = talking.client.post("/v1/responses", json=body(metadata={"a": "b"}, temperature=0.5))
    answer = response.json()
    assert response.headers["x-request-id"] == answer["id"] and answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "fake-model")
    (item,) = answer["output"]
    part = {"type": "output_text", "text": "plain", "annotations": [], "logprobs": []}
    assert bare(item) == {"type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert answer["error"] is None and answer["incomplete_details"] is None
    assert (answer["metadata"], answer["temperature"], answer["store"]) == ({"a": "b"}, 0.5, True)
    usage = answer["usage"]
    assert usage["input_tokens"] == len("<bos>[user]hi>") - 4
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] >= 5
    assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_stream_tells_a_message_in_order(talking: Any) -> None:
    found = streamed(talking, body("#json"))
    kinds = [key.removeprefix("response.") for key, _ in itertools.groupby(event["type"] for event in found)]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    (item,) = found[-1]["response"]["output"]
    assert "".join(event["delta"] for event in deltas) == '{"v":1}' == item["content"][0]["text"]
    places = {(event["item_id"], event["output_index"], event["content_index"]) for event in deltas}
    assert places == {(item["id"], 0, 0)}
    assert (found[0]["response"]["status"], found[0]["response"]["output"]) == ("in_progress", [])
    assert found[-1]["response"]["status"] == "completed" and found[-1]["response"]["usage"]["output_tokens"] >= 7


def test_stream_tells_a_call(talking: Any) -> None:
    found = streamed(talking, body("#call", tools=[TOOL]))
    message, item = found[-1]["response"]["output"]
    assert message["content"][0]["text"] == "Let me." and message["status"] == "completed"
    assert (item["type"], item["name"], item["status"]) == ("function_call", "look", "completed")
    assert json.loads(item["arguments"]) == {"at": "</tool_call> x"} and item["call_id"] and "namespace" not in item
    deltas = [event for event in found if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == item["arguments"]
    assert {(event["item_id"], event["output_index"]) for event in deltas} == {(item["id"], 1)}
    assert [e["item"] for e in found if e["type"] == "response.output_item.done"] == [message, item]
    (done,) = [event for event in found if event["type"] == "response.function_call_arguments.done"]
    assert (done["arguments"], done["name"]) == (item["arguments"], "look")


@pytest.mark.parametrize("word", ["#call", "#two", "#think", "#cut", "#patch", "#search", "#space", "#json"])
def test_streamed_and_whole_are_one(talking: Any, word: str) -> None:
    fields = body(word, tools=[TOOL, SPACE, PATCH, SEARCH])
    whole, stream = ask(talking, fields), streamed(talking, fields)[-1]["response"]
    assert list(map(bare, stream["output"])) == list(map(bare, whole["output"])) != []
    assert stream["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert stream["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]


def test_reasoning_is_an_item_that_comes_back(talking: Any) -> None:
    found = streamed(talking, body("#think", include=["reasoning.encrypted_content"]))
    thought, message = found[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "so so"}]
    assert message["content"][0]["text"] == "Done."
    deltas = [e["delta"] for e in found if e["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(deltas) == "so so"
    assert found[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    only_sealed = {**thought, "summary": [], "content": None}
    for item in (thought, only_sealed, {**thought, "encrypted_content": "other", "summary": thought["summary"]}):
        text = prompt_of(talking, body([user("a"), item, message, user("b")]))
        assert text == "[user]a[assistant]~so so~Done.[user]b>"
    assert "encrypted_content" not in ask(talking, body("#think"))["output"][0]


def test_output_that_ends_too_early_is_incomplete(talking: Any) -> None:
    found = streamed(talking, body("#long", max_output_tokens=3))
    last = found[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    whole = ask(talking, body("#long", max_output_tokens=3))
    assert (whole["status"], whole["output"][0]["content"][0]["text"]) == ("incomplete", "xxx")


def test_a_namespace_is_a_name_for_the_model_and_a_field_for_the_client(talking: Any) -> None:
    for word in ("#space", "#bare"):
        (item,) = ask(talking, body(word, tools=[TOOL, SPACE]))["output"]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "spawn")
    text = prompt_of(talking, body([user("a"), item], tools=[TOOL, SPACE]))
    assert text == '(look)(agents__spawn)<tool_call>[user]a[assistant]!agents__spawn{"at": "a"}>'


def test_a_custom_tool_takes_and_gives_plain_text(talking: Any) -> None:
    found = streamed(talking, body("#patch", tools=[PATCH]))
    (item,) = found[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", '*** "x"\n')
    (delta,) = [event for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
    assert delta["delta"] == done["input"] == item["input"]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    text = prompt_of(talking, body([user("a"), item, output], tools=[PATCH]))
    assert text == '(patch)<tool_call>[user]a[assistant]!patch{"input": "*** \\"x\\"\\n"}[tool]ok>'


def test_tools_that_are_found_are_told_there_and_can_be_called(talking: Any) -> None:
    (item,) = ask(talking, body("#search", tools=[SEARCH]))["output"]
    assert bare(item) == {
        "type": "tool_search_call",
        "status": "completed",
        "execution": "client",
        "arguments": {"at": "a"},
    }
    later = {**TOOL, "name": "later"}
    output = {"type": "tool_search_output", "call_id": item["call_id"], "execution": "client", "tools": [later, SPACE]}
    fields = body([user("#found"), item, output], tools=[SEARCH])
    text = prompt_of(talking, fields)
    assert text.startswith('(tool_search)<tool_call>[user]#found[assistant]!tool_search{"at": "a"}[tool]{')
    assert '"name":"later"' in text and '"name":"agents__spawn"' in text
    assert ask(talking, fields)["output"][0]["name"] == "later"


def test_tools_among_the_items(talking: Any) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [SPACE, PATCH]}
    assert prompt_of(talking, body([more, user("a")])) == "(agents__spawn)(patch)<tool_call>[user]a>"
    late = prompt_of(talking, body([user("a"), more, user("b")]))
    assert late.startswith("[user]a[system]{") and late.endswith("}[user]b>") and '"name":"patch"' in late
    (item,) = ask(talking, body([more, user("#space")]))["output"]
    assert item["namespace"] == "agents"


def test_a_tool_looks_as_chat_has_it() -> None:
    toolbox = Toolbox()
    toolbox.add([TOOL, {"type": "function", "strict": True, "name": "s"}, {"type": "web_search"}, PATCH], "tools")
    look, strict, patch = (tool["function"] for tool in toolbox.tools)
    assert json.dumps(look) == json.dumps({"name": "look", "description": "d", "parameters": SCHEMA})
    empty = {"type": "object", "properties": {}}
    assert json.dumps(strict) == json.dumps({"strict": True, "name": "s", "parameters": empty})
    assert isinstance(patch, dict) and patch["description"] == "p\n\nThe input follows this lark grammar:\nstart: X"
    assert patch["parameters"]["required"] == ["input"]


def test_the_same_in_many_forms_is_the_same_prompt(talking: Any) -> None:
    part = {"type": "input_text", "text": "hi"}
    forms = (
        body("hi", instructions="Be brief."),
        body([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [part]}]),
        body([{"id": "msg_1", "type": "message", "role": "system", "content": "Be brief."}, user([part])]),
    )
    assert [prompt_of(talking, fields) for fields in forms] == ["[system]Be brief.[user]hi>"] * 3


def test_history_becomes_turns(talking: Any) -> None:
    items = [
        user([{"type": "input_text", "text": "a"}]),
        {"type": "reasoning", "id": "r1", "summary": [], "content": [{"type": "reasoning_text", "text": " hm \n"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}], "id": "m"},
        {"type": "function_call", "call_id": "k1", "name": "look", "arguments": '{"at":"b"}'},
        {"type": "function_call", "call_id": "k2", "name": "look", "arguments": '{"at": '},
        {"type": "function_call_output", "call_id": "k1", "output": "seen"},
        {
            "type": "function_call_output",
            "call_id": "k2",
            "output": [{"type": "text", "text": "bad"}, {"type": "input_image"}],
        },
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {}},
        {"type": "of_next_year", "text": "?"},
        {"type": "message", "role": "assistant", "content": []},
        {"role": "developer", "content": "late"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    assert prompt_of(talking, body(items, tools=[TOOL, {"type": "web_search"}])) == (
        '(look)<tool_call>[user]a[assistant]~hm~ok!look{"at": "b"}!look"{\\"at\\": "'
        "[tool]seen[tool]bad\n[input_image left out: this model takes text only]"
        "[assistant][system]late[assistant]one[assistant]two>"
    )


def test_what_clients_send_along_is_accepted(talking: Any) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r1", "summary": []},
        {"type": "message", "role": "assistant", "content": []},
        {"type": "function_call", "call_id": "k1", "name": "sh", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "k1", "output": "ok"},
        {"role": "user", "content": "go on"},
    ]
    extra = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto", "context": "all_turns"},
        "truncation": "auto",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "user": "u",
    }
    answer = ask(talking, body(items, tools=[{"type": "web_search"}, TOOL], **extra))
    assert answer["store"] is False and answer["reasoning"] == {"effort": "low", "summary": "auto"}
    assert talking.client.get(f"/v1/responses/{answer['id']}").status_code == 404


def test_one_call_at_a_time_and_no_call_where_that_is_asked(talking: Any) -> None:
    both = ask(talking, body("#two", tools=[TOOL]))["output"]
    one = ask(talking, body("#two", tools=[TOOL], parallel_tool_calls=False))["output"]
    none = ask(talking, body("#two", tools=[TOOL], tool_choice="none"))["output"]
    assert [item["type"] for item in both] == ["function_call"] * 2
    assert [item["type"] for item in one] == ["function_call"]
    assert [item["type"] for item in none] == ["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_no"}]}, "input[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"temperature": -1}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"previous_response_id": "resp_no"}, "previous_response_id"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_said_by_name(talking: Any, fields: dict[str, Any], param: str, stream: bool) -> None:
    response = talking.client.post("/v1/responses", json={**body(), "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_before_the_first_byte(talking: Any, stream: bool) -> None:
    response = talking.client.post("/v1/responses", json=body("x" * 3000, stream=stream))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert "2048" in error["message"] or "2047" in error["message"]


def test_tokens_are_counted_as_the_prompt_has_them(talking: Any) -> None:
    fields = body("hi", instructions="Be brief.", tools=[TOOL])
    count = talking.client.post("/v1/responses/input_tokens", json=fields).json()
    assert count == {"object": "response.input_tokens", "input_tokens": ask(talking, fields)["usage"]["input_tokens"]}


def test_a_response_is_gone_on_from(talking: Any) -> None:
    first = ask(talking, body("#call", tools=[TOOL], instructions="Old."))
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "seen"}
    second = body([output], previous_response_id=first["id"], instructions="New.", tools=[TOOL])
    expected = '(look)<tool_call>[system]New.[user]#call[assistant]Let me.!look{"at": "</tool_call> x"}[tool]seen'
    assert prompt_of(talking, second) == f"{expected}>"
    answer = ask(talking, second)
    third = body("more", previous_response_id=answer["id"], instructions="New.", tools=[TOOL])
    said = "Let me.!look" + '{"at": "</tool_call> x"}'
    assert prompt_of(talking, third) == f"{expected}[assistant]{said}[user]more>"
    by_reference = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    assert prompt_of(talking, body([user("a"), *by_reference])) == f"[user]a[assistant]{said}>"


def test_a_stored_response_is_read_cancelled_and_deleted(talking: Any) -> None:
    answer = ask(talking, body())
    path = f"/v1/responses/{answer['id']}"
    assert talking.client.get(path).json() == answer
    assert talking.client.post(f"{path}/cancel").json() == answer
    assert talking.client.get(f"{path}?stream=true").json()["error"]["param"] == "stream"
    assert talking.client.delete(path).json() == {"id": answer["id"], "object": "response", "deleted": True}
    for method, where in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        response = talking.client.request(method, where)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "response_not_found")


def wait_until(holds: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.005)


def paced() -> tuple[FakeWorker, threading.Semaphore]:
    """An engine that takes a step only for each release of the semaphore."""
    worker, steps = FakeWorker(info=engine_info(max_model_len=2048, num_kv_blocks=256)), threading.Semaphore(0)

    def wait() -> None:
        steps.acquire(timeout=10.0)

    worker.runner.pace = wait
    return worker, steps


def talking_source() -> FakeSource:
    return FakeSource(chat_template=TEMPLATE, script=script(*REPLIES))


def data_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def test_one_that_still_runs_is_cancelled(start: Any) -> None:
    worker, steps = paced()
    server = start(worker=worker, source=talking_source())
    steps.release(3)
    with server.client.stream("POST", "/v1/responses", json=body("#long", stream=True)) as response:
        found = data_of(response.iter_lines())
        created = next(found)["response"]
        path = f"/v1/responses/{created['id']}"
        assert server.client.get(path).json()["status"] == "in_progress"
        refused = server.client.post("/v1/responses", json=body(previous_response_id=created["id"]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        cancelled = server.client.post(f"{path}/cancel").json()
        assert (cancelled["id"], cancelled["status"]) == (created["id"], "cancelled")
        steps.release(1000)
        last = list(found)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert server.client.get(path).json() == last["response"]
    wait_until(lambda: len(server.cancels()) == 1)
    assert server.cancels() == [submit.request.request_id for submit in server.submits()]


def test_one_whose_client_leaves_is_cancelled(start: Any) -> None:
    worker, steps = paced()
    server = start(worker=worker, source=talking_source())
    steps.release(3)
    with server.client.stream("POST", "/v1/responses", json=body("#long", stream=True)) as response:
        created = next(data_of(response.iter_lines()))["response"]
    path = f"/v1/responses/{created['id']}"
    wait_until(lambda: server.client.get(path).json()["status"] == "cancelled")
    steps.release(1000)
    wait_until(lambda: len(server.cancels()) == 1)
    assert server.cancels() == [submit.request.request_id for submit in server.submits()]


def test_a_stream_that_breaks_says_so_twice(start: Any) -> None:
    worker, steps = paced()
    server = start(worker=worker, source=talking_source())
    steps.release(3)
    with server.client.stream("POST", "/v1/responses", json=body("#long", stream=True)) as response:
        lines = response.iter_lines()
        found = data_of(lines)
        created = next(found)["response"]
        worker.crash.set()
        steps.release(1000)
        *_, error, last = found
    assert (error["type"], error["code"]) == ("error", "engine_dead") and error["message"]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": error["message"]}
    assert last["sequence_number"] == error["sequence_number"] + 1
    assert server.client.get(f"/v1/responses/{created['id']}").json()["status"] == "failed"
    refused = server.client.post("/v1/responses", json=body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")


def test_the_store_forgets_the_oldest() -> None:
    now = [0.0]
    store = ResponsesStore(responses_max=2, bytes_max=100, age_s_max=10.0, clock=lambda: now[0])

    def add(name: str, size: int = 2) -> None:
        store.begin(name, b"x" * size, (b"[]",), lambda: b"")
        store.finish(name, b"x" * size, [{"id": f"i-{name}"}])

    for name in ("a", "b", "c"):
        add(name)
    assert store.body("b") == b"xx" and store.item("i-c") == {"id": "i-c"} and store.item("i-a") is None
    with pytest.raises(HttpError, match="'a' is not stored"):
        store.body("a")
    add("d", 60)
    assert store.body("c") and store.body("d")
    add("e", 60)
    assert store.body("e") and store.history("e") == (b"[]", b'[{"id":"i-e"}]')
    with pytest.raises(HttpError):
        store.body("d")
    now[0] = 10.5
    with pytest.raises(HttpError, match="send the whole conversation"):
        store.history("e")
    store.begin("f", b"", (), lambda: b"stopped")
    with pytest.raises(InvalidRequestError, match="not finished"):
        store.history("f")
    assert store.cancel("f") == b"stopped"
    store.delete("f")
    store.finish("f", b"late", [])
    with pytest.raises(HttpError):
        store.body("f")


def test_its_own_client(talking: Any) -> None:
    client = openai.OpenAI(base_url=f"{talking.url}/v1", api_key="any", max_retries=0)
    response = client.responses.create(model="fake-model", input="#call", tools=[TOOL])  # type: ignore[list-item]
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert (item.name, json.loads(item.arguments), response.output_text) == (
        "look",
        {"at": "</tool_call> x"},
        "Let me.",
    )
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "seen"}
    with client.responses.stream(
        model="fake-model",
        input=[result],  # type: ignore[list-item]
        previous_response_id=response.id,
    ) as stream:
        kinds = [event.type for event in stream]
    final = stream.get_final_response()
    assert kinds[-1] == "response.completed" and final.output_text and final.previous_response_id == response.id
    assert client.responses.retrieve(response.id).output_text == "Let me."
    count = client.responses.input_tokens.count(model="fake-model", input="hi")
    assert count.input_tokens == len("<bos>[user]hi>") - 4
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake-model", input="x" * 3000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("word", ["#call", "#two", "#think", "#json"])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_says_the_same(talking: Any, word: str, stream: bool) -> None:
    """Identical token ids, text, calls and counts for one conversation."""
    function = {"name": "look", "description": "d", "parameters": SCHEMA}
    history = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at":"b"}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "seen"},
        {"role": "user", "content": word},
    ]
    items = [
        user("go"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"at":"b"}'},
        {"type": "function_call_output", "call_id": "a", "output": "seen"},
        user(word),
    ]
    chat = {"messages": history, "tools": [{"type": "function", "function": function}], "max_tokens": 200}
    theirs = talking.client.post("/v1/chat/completions", json=chat).json()
    ids = talking.submits()[-1].request.token_ids
    fields = body(items, tools=[TOOL])
    mine = streamed(talking, fields)[-1]["response"] if stream else ask(talking, fields)
    assert talking.submits()[-1].request.token_ids == ids
    message = theirs["choices"][0]["message"]
    texts = [part["text"] for item in mine["output"] if item["type"] == "message" for part in item["content"]]
    thoughts = [part["text"] for item in mine["output"] if item["type"] == "reasoning" for part in item["summary"]]
    calls = [(item["name"], item["arguments"]) for item in mine["output"] if item["type"] == "function_call"]
    assert "".join(texts) == (message["content"] or "") and "".join(thoughts) == message.get("reasoning_content", "")
    expected = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    assert calls == expected
    assert mine["usage"]["input_tokens"] == theirs["usage"]["prompt_tokens"]
    assert mine["usage"]["output_tokens"] == theirs["usage"]["completion_tokens"]
