# SPDX-License-Identifier: Apache-2.0
"""The completions dialect: prompts of every kind, echo, logprobs lists, streams of several prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest

BOS = 257


def test_text_and_ids_are_the_same_prompt(shared: Any) -> None:
    by_text = shared.complete(prompt="ab").json()
    by_ids = shared.complete(prompt=[BOS, 97, 98]).json()
    assert by_text["choices"] == by_ids["choices"]
    assert by_text["usage"] == by_ids["usage"]
    assert (by_text["object"], by_text["choices"][0]["text"]) == ("text_completion", "abcdefgh")
    assert by_text["usage"]["prompt_tokens"] == 3


def test_max_tokens_is_16_unless_said(shared: Any) -> None:
    assert shared.complete(max_tokens=None).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [["ab", "abc", "a"], [[BOS, 97, 98], [BOS, 97, 98, 99], [BOS, 97]]])
def test_several_prompts_keep_their_order(shared: Any, prompt: list[Any]) -> None:
    answer = shared.complete(prompt=prompt, n=2, echo=True, max_tokens=3).json()
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    begin = "" if isinstance(prompt[0], str) else "<bos>"
    assert texts == [f"{begin}{text}abc" for text in ("ab", "ab", "abc", "abc", "a", "a")]
    assert answer["usage"]["prompt_tokens"] == 3 + 4 + 2
    assert answer["usage"]["completion_tokens"] == 18


def test_stream_of_several_prompts(shared: Any) -> None:
    text = shared.complete(prompt=["ab", "abc"], n=2, stream=True, stream_options={"include_usage": True}).text
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    got = [json.loads(item) for item in data[:-1]]
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 32
    for index in range(4):
        mine = [choice for chunk in got for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "abcdefgh"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


def test_logprobs_are_parallel_lists(shared: Any) -> None:
    (choice,) = shared.complete(logprobs=2, max_tokens=3).json()["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3, 3], "two likely ones and the sampled one"
    assert all(top[token] == -0.5 for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_starts_at_the_prompt(shared: Any, stream: bool) -> None:
    response = shared.complete(prompt=[BOS, 97, 98], echo=True, logprobs=1, max_tokens=1, stream=stream)
    if stream:
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [choice for item in data for choice in json.loads(item)["choices"]]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "<bos>aba"
    logprobs: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            logprobs.setdefault(name, []).extend(values)
    assert logprobs["tokens"] == ["<bos>", "a", "b", "a"]
    assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 5, 6, 7]


def test_echo_alone_scores_the_prompt(shared: Any) -> None:
    answer = shared.complete(prompt=[BOS, 97, 98], echo=True, logprobs=1, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "<bos>ab"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert (answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]) == (0, 3)


def test_one_bad_prompt_of_many_refuses_all(start: Any) -> None:
    server = start()
    response = server.complete(prompt=[[97], [97] * 2000])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert server.complete(prompt=[[97], [98]]).status_code == 200
