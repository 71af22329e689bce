# SPDX-License-Identifier: Apache-2.0
"""Faults that real servers had, driven through HTTP: stop strings, usage, log-probs, refusals, limits, reuse."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from scripted import write_scripted_model

REPLIES = [
    ("near miss", '"alpha-DEFGHIX-omega"'),
    ("stop here", '"alpha-DEFGHIJ-omega"'),
    ("test tube", '"🧪"'),
    ("", "The quick brown fox jumps over the lazy dog, and the dog does not mind."),
]
FOX = REPLIES[-1][1]


@pytest.fixture(scope="module")
def server(start_module_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_scripted_model(tmp_path_factory.mktemp("cases") / "model", REPLIES, context_length=512)
    return start_module_server(str(folder), "--load-format", "scripted", "--served-name", "scripted")


def chunks(text: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def read(response: Any, stream: bool) -> tuple[str, str, list[Any]]:
    """Text, finish reason and log-prob entries of the only choice, streamed or whole."""
    assert response.status_code == 200, response.text
    if not stream:
        (choice,) = response.json()["choices"]
        return choice["message"]["content"], choice["finish_reason"], (choice["logprobs"] or {}).get("content", [])
    choices = [choice for chunk in chunks(response.text) for choice in chunk["choices"]]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    return "".join(c["delta"].get("content", "") for c in choices), choices[-1]["finish_reason"], entries


def assert_alive(server: Any) -> None:
    began = time.monotonic()
    assert server.chat("are you there", max_tokens=4).status_code == 200
    assert time.monotonic() - began < 2.0


def test_banner_says_what_is_served(server: Any) -> None:
    for words in ("scripted", "cpu", "tokens in", "MiB", "context", "512", "http://127.0.0.1:", "Press Ctrl-C"):
        assert words in server.banner


@pytest.mark.parametrize("stream", [False, True])
def test_st_1_stop_text_never_leaks(server: Any, stream: bool) -> None:
    hit = server.chat("stop here", stop=["DEFGHIJ"], stream=stream)
    assert read(hit, stream)[:2] == ('"alpha-', "stop")
    miss = server.chat("near miss", stop=["DEFGHIJ"], stream=stream)
    assert read(miss, stream)[:2] == ('"alpha-DEFGHIX-omega"', "stop")


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]])
def test_st_3_usage_of_a_stream_equals_the_whole_run(server: Any, tools: Any) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, "tools": tools}
    got = chunks(server.chat("count", stream=True, stream_options={"include_usage": True}, **fields).text)
    assert [chunk["choices"] == [] for chunk in got] == [False] * (len(got) - 1) + [True]
    assert got[-2]["choices"][0]["finish_reason"] == "length"
    assert all(chunk["usage"] is None for chunk in got[:-1])
    usage = got[-1]["usage"]
    whole = server.chat("count", **fields).json()["usage"]
    for counts in (usage, whole):
        assert counts["completion_tokens"] == 9
        assert counts["total_tokens"] == counts["prompt_tokens"] + 9
        assert counts["prompt_tokens_details"]["cached_tokens"] >= 0
    assert usage["prompt_tokens"] == whole["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_sl_1_bytes_of_the_entries_are_the_text(server: Any, stream: bool) -> None:
    response = server.chat("test tube", logprobs=True, top_logprobs=3, stream=stream)
    text, finish, entries = read(response, stream)
    assert (text, finish) == ('"🧪"', "stop")
    joined = bytes(byte for entry in entries for byte in entry["bytes"])
    assert joined == text.encode()
    assert bytes([240, 159, 167, 170]) in joined
    assert all(entry["bytes"] != [239, 191, 189] for entry in entries)
    assert all(-1e6 < entry["logprob"] <= 0.0 for entry in entries)
    usage = server.chat("test tube").json()["usage"]
    assert len(entries) == usage["completion_tokens"] - 1, "all but the end token"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
def test_er_1_a_prompt_beyond_the_window(server: Any, path: str, stream: bool) -> None:
    text = "x" * 2000
    messages = {"messages": [{"role": "user", "content": text}]}
    fields = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}.get(path, messages)
    response = server.client.post(path, json={**fields, "stream": stream, "max_tokens": 16})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    count = server.client.post("/tokenize", json=fields if "prompt" in fields else messages).json()["count"]
    assert count >= 2000 and error["type"] == "invalid_request_error"
    if path == "/v1/messages":
        assert response.json()["type"] == "error"
        assert error["message"] == f"prompt is too long: {count} tokens > 511 maximum"
    else:
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == next(iter(fields))
        assert str(count) in error["message"] and "512" in error["message"]
    assert_alive(server)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", '{"prompt":[[-1]]}', "prompt"),
        ("/v1/completions", '{"prompt":[[1000000000]]}', "prompt"),
        ("/v1/completions", '{"prompt":"a","stream":"true"}', "stream"),
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"stream":"true"}', "stream"),
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"temperature":-1}', "temperature"),
        ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"stop":[""]}', "stop"),
        ("/v1/chat/completions", '{"messages":[]}', "messages"),
        ("/v1/chat/completions", "{", "body"),
        ("/v1/completions", "{", "body"),
    ],
)
def test_er_3_bad_bodies_name_the_field(server: Any, path: str, body: str, param: str) -> None:
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert_alive(server)


def test_er_3_unknown_fields_are_accepted(server: Any) -> None:
    extra = {"store": False, "metadata": {}, "service_tier": "auto", "prompt_cache_key": "k"}
    assert server.chat("hello", **extra).status_code == 200


def test_the_openai_package_sees_errors_as_its_own(server: Any) -> None:
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)
    message = {"role": "user", "content": "x" * 2000}
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="scripted", messages=[message])  # type: ignore[list-item]
    assert caught.value.code == "context_length_exceeded"
    stream = client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == FOX


def test_many_streams_at_once_each_get_their_text(server: Any) -> None:
    body = {"prompt": ["stop here", "near miss", "test tube", "else"] * 4, "max_tokens": 128, "stream": True}
    text = server.client.post("/v1/completions", json=body).text
    got: dict[int, str] = {}
    for chunk in chunks(text):
        for choice in chunk["choices"]:
            got[choice["index"]] = got.get(choice["index"], "") + choice["text"]
    wanted = [REPLIES[1][1], REPLIES[0][1], REPLIES[2][1], FOX] * 4
    assert [got[index] for index in range(16)] == wanted


def test_pc_3_the_prompt_is_reused_though_the_answer_was_rewritten(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", [("", "<think>hm</think>ok")])
    script = json.loads((folder / "script.json").read_text())
    script["chat_template"] = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}\n{% endfor %}"
        "<|assistant|><think>\n"
    )
    (folder / "script.json").write_text(json.dumps(script))
    server = start_server(str(folder), "--load-format", "scripted")
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be good. " * 170}]
    before: list[int] = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"This is question {turn}, please answer it."})
        ids = server.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        body = {"messages": messages, "max_tokens": 64, "temperature": 0}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        common = next((i for i, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1]), len(before))
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert cached >= common - 16, f"turn {turn}: {cached} of {common} common tokens were reused"
        assert cached > 1400 or turn == 0
        messages.append({"role": "assistant", "content": "ok"})
        before = ids


def test_lc_2_what_can_never_fit_is_refused_at_once(start_server: Any, tmp_path: Path) -> None:
    folder = write_scripted_model(tmp_path / "model", REPLIES, context_length=8192)
    server = start_server(str(folder), "--load-format", "scripted", "--kv-tokens", "1024")
    began = time.monotonic()
    for path, field in (("chat/completions", "messages"), ("messages", "messages"), ("responses", "input")):
        prompt = "x" * 2000 if field == "input" else [{"role": "user", "content": "x" * 2000}]
        response = server.client.post(f"/v1/{path}", json={field: prompt, "max_tokens": 64})
        assert response.status_code == 400
        assert "1024" in response.json()["error"]["message"] or "1023" in response.json()["error"]["message"]
        code = response.json()["error"].get("code", "kv_capacity_exceeded")
        assert code in ("kv_capacity_exceeded", "context_length_exceeded")
    for _ in range(3):
        assert read(server.chat("short"), stream=False)[:2] == (FOX[:64], "length")
    assert time.monotonic() - began < 5.0
    server.wait_until_idle()
