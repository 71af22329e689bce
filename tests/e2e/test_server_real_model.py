# SPDX-License-Identifier: Apache-2.0
"""A real instruct model behind real HTTP: conversations, 64 streams, a tiny pool, and clients that go."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.models

BLOCK_SIZE = 16
TOPICS = (
    "rivers", "bread", "clocks", "bridges", "moss", "kites", "salt", "whales", "paper", "glass", "storms", "maps",
    "bees", "iron", "gardens", "snow", "drums", "lamps", "wool", "ships", "coins", "trains", "owls", "tea", "ropes",
    "chess", "radio", "wells", "ink", "stars", "soap", "mills",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(start_module_server: Any, smollm2_path: Path) -> Any:
    return start_module_server(str(smollm2_path), "--threads", "2", "--max-num-seqs", "64", "--kv-tokens", "40000")


@pytest.fixture(scope="module")
def small_server(start_module_server: Any, smollm2_path: Path) -> Any:
    return start_module_server(str(smollm2_path), "--threads", "2", "--kv-tokens", "1024")


def ask(server: Any, content: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """A greedy answer and its usage, not streamed."""
    body = server.chat(content, max_tokens=max_tokens).json()
    return body["choices"][0]["message"]["content"], body["usage"]


def ask_streamed(server: Any, content: str, max_tokens: int) -> str:
    """The same, streamed; the text is joined from the deltas and the stream must end in [DONE]."""
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
    }
    text, done = "", False
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert done
    return text


def test_ten_turns_compute_only_what_is_new(server: Any) -> None:
    messages = [{"role": "system", "content": "You are brief. " + "Answer in one sentence. " * 20}]
    known = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"Question {turn}: tell me about {TOPICS[turn]}."})
        body = {"messages": messages, "temperature": 0, "max_tokens": 24}
        answer = server.client.post("/v1/chat/completions", json=body).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if turn > 0:
            assert cached > 0
            new_tokens = usage["prompt_tokens"] - known
            assert usage["prompt_tokens"] - cached <= new_tokens + BLOCK_SIZE, (turn, usage, known)
        # The prompt and the generated tokens whose K/V were computed (all but the last) are known to the next turn.
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def test_sixty_four_streams_give_the_text_of_a_lone_request(server: Any) -> None:
    """Two of each prompt, so that half as many have to be asked alone."""
    prompts = [f"Write one sentence about {topic}." for topic in TOPICS]
    alone = [ask(server, prompt, 8)[0] for prompt in prompts]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(lambda prompt: ask_streamed(server, prompt, 8), prompts * 2))
    assert together == alone * 2
    server.wait_until_idle()


def test_a_pool_of_1024_tokens_preempts_and_finishes_all(server: Any, small_server: Any) -> None:
    prompts = [f"Tell me a story about {topic}." for topic in TOPICS[:24]]
    with ThreadPoolExecutor(24) as pool:
        expected = list(pool.map(lambda prompt: ask(server, prompt, 36)[0], prompts))
        answers = list(pool.map(lambda prompt: ask(small_server, prompt, 36)[0], prompts))
    assert answers == expected
    assert small_server.metric("num_preemptions_total") > 0
    small_server.wait_until_idle()


def test_a_prompt_beyond_the_pool_is_refused_with_the_numbers(small_server: Any) -> None:
    response = small_server.chat("word " * 2000, max_tokens=4)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "1024" in message, message
    assert small_server.chat("Hello", max_tokens=4).status_code == 200


def test_clients_that_go_leave_nothing(server: Any) -> None:
    long_prompt = "The quick brown fox jumps over the lazy dog. " * 150
    baseline = ask(server, "Name three colours.", 12)[0]
    for index in range(18):
        kind = ("stream", "prefill", "plain")[index % 3]
        content = f"{index} {long_prompt}" if kind == "prefill" else f"Count to {1000 + index}."
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 2000,
            "ignore_eos": True,
            "stream": kind == "stream",
        }
        server.hang_up(body, after_s={"stream": 0.1, "prefill": 0.15, "plain": 0.3}[kind], read=kind == "stream")
        server.wait_until_idle(2.0)
    assert ask(server, "Name three colours.", 12)[0] == baseline
