# SPDX-License-Identifier: Apache-2.0
"""Input items in pages, conversations made short, and how a prompt that is too long is named, raw and with the API's
own client."""

from __future__ import annotations

from array import array
from typing import Any

import openai
import pytest

from fakes import FakeSource, FakeWorker, engine_info, script

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
REPLIES = (
    ("Summarize this conversation so that", "<think>hm</think> They said #one and then #two. "),
    ("#silent", "<think>nothing to say</think>"),
    ("", "plain"),
)


@pytest.fixture(scope="module")
def server(start_module: Any) -> Any:
    worker = FakeWorker(info=engine_info(max_model_len=2048, num_kv_blocks=256))
    return start_module(
        worker=worker, source=FakeSource(chat_template=TEMPLATE + "<tool_call>", script=script(*REPLIES))
    )


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def last_prompt(server: Any) -> str:
    ids = array("i", server.submits()[-1].request.token_ids)
    return str(server.llm.tokenizer.decode(list(ids), skip_special_tokens=True))


def test_input_items_of_a_chain_of_responses(server: Any) -> None:
    client = client_of(server)
    first = client.responses.create(model="fake-model", input="one", instructions="Be brief.")
    call = {"type": "function_call", "call_id": "k", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "k", "output": "ok"}
    asked: list[Any] = [call, result, {"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    second = client.responses.create(model="fake-model", input=asked, previous_response_id=first.id)
    (item,) = client.responses.input_items.list(first.id).data
    assert (item.type, item.role, item.content[0].text) == ("message", "user", "one")
    page = client.responses.input_items.list(second.id, order="asc", limit=2)
    kinds = [item.type for item in page]  # the client asks for the further pages by itself
    assert kinds == ["message", "message", "function_call", "function_call_output", "message"]
    ids = [item.id for item in client.responses.input_items.list(second.id)]
    assert ids == [item.id for item in page.iter_pages() for item in item.data][::-1] and len(set(ids)) == 5
    raw = server.client.get(f"/v1/responses/{second.id}/input_items", params={"limit": 2, "after": ids[1]}).json()
    assert (raw["object"], raw["first_id"], raw["last_id"], raw["has_more"]) == ("list", ids[2], ids[3], True)
    rest = server.client.get(f"/v1/responses/{second.id}/input_items", params={"after": ids[-1]}).json()
    assert (rest["data"], rest["first_id"], rest["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [("order=up", "order"), ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("after=no", "after")],
)
def test_a_wrong_page_is_refused_by_name(server: Any, query: str, param: str) -> None:
    made = server.client.post("/v1/responses", json={"input": "one"}).json()
    answer = server.client.get(f"/v1/responses/{made['id']}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    absent = server.client.get("/v1/responses/none/input_items")
    assert (absent.status_code, absent.json()["error"]["code"]) == (404, "response_not_found")


def test_a_conversation_made_short_goes_on(server: Any) -> None:
    client = client_of(server)
    items: list[Any] = [
        {"role": "user", "content": "#one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
        {"role": "user", "content": "#two"},
    ]
    short = client.responses.compact(model="fake-model", input=items, instructions="Be brief.")
    assert last_prompt(server).startswith("[system]Be brief.[user]#one[assistant]said[user]#two[user]Summarize this")
    assert short.object == "response.compaction" and short.id.startswith("resp_")
    assert [item.type for item in short.output] == ["message", "message", "compaction"]
    assert short.usage.output_tokens > short.usage.output_tokens_details.reasoning_tokens > 0
    assert short.usage.total_tokens == short.usage.input_tokens + short.usage.output_tokens
    again: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in short.output]
    client.responses.create(model="fake-model", input=[*again, {"role": "user", "content": "go on"}])
    assert last_prompt(server) == (
        "[user]#one[user]#two[user]Summary of the conversation so far:\nThey said #one and then #two.[user]go on>"
        "<tool_call>"
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(short.id)


def test_a_stored_conversation_is_made_short_by_its_id(server: Any) -> None:
    client = client_of(server)
    first = client.responses.create(model="fake-model", input="#one")
    short = client.responses.compact(model="fake-model", previous_response_id=first.id)
    assert [item.type for item in short.output] == ["message", "compaction"]
    assert "[user]#one[assistant]plain[user]Summarize" in last_prompt(server)


def test_a_summary_that_cannot_be_read_is_named(server: Any) -> None:
    for content in ("bm90IG91cnM=", "?", None):
        items = [{"type": "compaction", "encrypted_content": content}, {"role": "user", "content": "a"}]
        answer = server.client.post("/v1/responses", json={"input": items})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].encrypted_content")


def test_no_summary_is_no_answer(start: Any) -> None:
    source = FakeSource(chat_template=TEMPLATE + "<tool_call>", script=script(("", "<think>hm</think>")))
    server = start(source=source)
    answer = server.client.post("/v1/responses/compact", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/compact"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_in_the_input(server: Any, path: str, stream: bool) -> None:
    answer = server.client.post(path, json={"input": "x" * 3000, "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert "2048 tokens" in error["message"] and " the prompt has 3" in error["message"]
