# SPDX-License-Identifier: Apache-2.0
"""The chat dialect, stream and whole, over loopback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from fakes import FakeSource, FakeWorker, byte_tokenizer, engine_info, script

USER = [{"role": "user", "content": "hi"}]


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def test_whole_answer(shared: Any) -> None:
    response = shared.chat()
    answer = response.json()
    assert response.headers["x-request-id"] == answer["id"]
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "fake-model")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abcdefgh", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt_len = len("<bos>[user]hi>") - 4
    usage = {"prompt_tokens": prompt_len, "completion_tokens": 8, "total_tokens": prompt_len + 8}
    assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}


def test_stream_has_role_deltas_finish_and_done(shared: Any) -> None:
    response = shared.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    got = chunks(response.text)
    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "abcdefgh"
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None] * (len(got) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in got)
    assert len({chunk["id"] for chunk in got}) == 1


def test_usage_chunk_comes_once_at_the_end_and_equals_the_whole_run(shared: Any) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True}
    got = chunks(shared.chat(stream=True, stream_options={"include_usage": True}, **fields).text)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == shared.chat(**fields).json()["usage"]
    assert got[-1]["usage"]["completion_tokens"] == 9
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in got[:-1])


def test_continuous_usage_counts_up(shared: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    got = chunks(shared.chat(stream=True, stream_options=options).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in got]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_n_choices_each_have_role_and_finish(shared: Any) -> None:
    got = [choice for chunk in chunks(shared.chat(stream=True, n=3).text) for choice in chunk["choices"]]
    for index in range(3):
        mine = [choice for choice in got if choice["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "abcdefgh"
        assert mine[-1]["finish_reason"] == "length"
    whole = shared.chat(n=3).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["completion_tokens"] == 24


def test_the_openai_package_reads_both(shared: Any) -> None:
    client = OpenAI(base_url=f"{shared.url}/v1", api_key="unused")
    whole = client.chat.completions.create(model="fake-model", messages=USER, max_tokens=4, temperature=0)
    assert whole.choices[0].message.content == "abcd"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    text = ""
    for chunk in client.chat.completions.create(
        model="fake-model", messages=USER, max_tokens=4, temperature=0, stream=True
    ):
        text += chunk.choices[0].delta.content or ""
    assert text == "abcd"
    assert client.models.retrieve("fake-model").id == "fake-model"


def test_every_sampling_field_reaches_the_engine(start: Any) -> None:
    server = start()
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.25, "seed": 11, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    assert server.chat(logit_bias={"5": -3.5}, max_completion_tokens=6, stop="~", **fields).status_code == 200
    (submit,) = server.submits()
    sampling = submit.request.sampling
    assert {name: getattr(sampling, name) for name in fields} == {**fields, "stop_token_ids": (3,)}
    assert (sampling.max_tokens, sampling.logit_bias, sampling.stop) == (6, ((5, -3.5),), ("~",))
    assert submit.request.end_token_ids == (3,)


def test_defaults_come_from_the_model(start: Any) -> None:
    server = start(source=FakeSource(generation_config={"temperature": 0.3, "top_k": 4}))
    server.chat(temperature=None)
    server.chat(temperature=1.5)
    first, second = (submit.request.sampling for submit in server.submits())
    assert (first.temperature, first.top_k) == (0.3, 4)
    assert (second.temperature, second.top_k) == (1.5, 4)


def test_text_and_parts_are_one_thing(shared: Any) -> None:
    parts = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    ids = [
        shared.client.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in ("hi", parts)
    ]
    assert ids[0] == ids[1]


def test_template_arguments_reach_the_template(start: Any) -> None:
    template = "{{ enable_thinking }}/{{ reasoning_effort }}/{{ mood }}/{{ add_generation_prompt }}"
    server = start(source=FakeSource(chat_template=template))
    body = {"messages": USER, "reasoning_effort": "none", "chat_template_kwargs": {"mood": "calm"}}
    ids = server.client.post("/tokenize", json={**body, "add_generation_prompt": False}).json()["tokens"]
    assert server.client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "False/none/calm/False"


def test_tools_and_history_are_rendered(start: Any) -> None:
    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    server = start(source=FakeSource(chat_template=template))
    tool = {"type": "function", "function": {"name": "ls", "parameters": {"z": 1, "a": 2}}}
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"b": 1, "a":2}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "ls", "arguments": '{"cmd": '}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, broken], "reasoning_content": " I think. "},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
    ]
    response = server.chat(messages=messages, tools=[tool], tool_choice="auto")
    assert response.status_code == 200, response.text
    answer = server.client.post("/tokenize", json={"messages": messages, "tools": [tool]}).json()
    rendered = server.client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert '"parameters": {"z": 1, "a": 2}' in rendered, "the schema's key order is kept"
    assert '"arguments": {"b": 1, "a": 2}' in rendered
    assert '"reasoning_content": "I think."' in rendered
    assert "c1" not in rendered, "ids differ from session to session, so they are never rendered"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "zzz", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(shared: Any, fields: dict[str, Any], param: str) -> None:
    response = shared.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_stop_text_never_leaks_and_a_near_miss_arrives_whole(start: Any, stream: bool) -> None:
    source = FakeSource(script=script(("miss", '"alpha-DEFGHIX-omega"'), ("", '"alpha-DEFGHIJ-omega"')))
    server = start(source=source)
    for content, text in (("hit", '"alpha-'), ("miss", '"alpha-DEFGHIX-omega"')):
        messages = [{"role": "user", "content": content}]
        response = server.chat(messages=messages, stop=["DEFGHIJ"], stream=stream, max_tokens=64)
        if stream:
            got = [choice for chunk in chunks(response.text) for choice in chunk["choices"]]
            joined, finish = "".join(c["delta"].get("content", "") for c in got), got[-1]["finish_reason"]
        else:
            (choice,) = response.json()["choices"]
            joined, finish = choice["message"]["content"], choice["finish_reason"]
        assert (joined, finish) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprob_bytes_join_to_the_text(start: Any, stream: bool) -> None:
    server = start(source=FakeSource(script=script(("", '"🧪"'))))
    response = server.chat(logprobs=True, top_logprobs=3, max_tokens=32, stream=stream)
    if stream:
        choices = [choice for chunk in chunks(response.text) for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    else:
        choices = response.json()["choices"]
        text, entries = choices[0]["message"]["content"], choices[0]["logprobs"]["content"]
    assert text == '"🧪"'
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    assert all(entry["logprob"] <= 0.0 and len(entry["top_logprobs"]) == 3 for entry in entries)
    assert [239, 191, 189] not in [entry["bytes"] for entry in entries]
    assert len(entries) == len(byte_tokenizer().encode(text, add_special_tokens=False))


def test_prompt_logprobs_skip_the_first_token(shared: Any) -> None:
    answer = shared.chat(prompt_logprobs=0).json()
    entries = answer["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert entries[0] is None
    assert all(len(entry) == 1 for entry in entries[1:])


def test_a_fault_of_the_engine_is_no_answer(start: Any) -> None:
    worker = FakeWorker(info=engine_info())
    server = start(worker=worker)
    worker.runner.faulty = type("Every", (frozenset,), {"__contains__": lambda self, item: True})()
    response = server.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
