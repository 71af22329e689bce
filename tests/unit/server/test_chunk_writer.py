# SPDX-License-Identifier: Apache-2.0
"""Chunks of content, which are put together from bytes, are what encoding them whole gives."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tokenspeed.chat.parsers import ContentDelta, Delta, ReasoningDelta, ToolCallStart
from tokenspeed.server import openai_chat
from tokenspeed.server.turn import End, News

TEXTS = ["a", ' "quoted" \\ ', "line\nline\t", "東京 🧪 é", "\x00\x1f\x7f\u2028", "</script>", "data: [DONE]\n\n"]


def writer(**fields: Any) -> openai_chat._ChunkWriter:
    body = msgspec.convert({"messages": [], "model": "m", "stream": True, **fields}, openai_chat.ChatBody)
    served: Any = SimpleNamespace(model_name='m "x"')
    job: Any = SimpleNamespace(request_id="chatcmpl-1")
    return openai_chat._ChunkWriter(served, job, body)


def news(*deltas: Delta, choice: int = 0, end: End | None = None) -> News:
    output: Any = None
    return News(choice, deltas, (), end, output)


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("text", TEXTS)
def test_a_chunk_of_content_is_as_if_encoded_whole(text: str, fields: dict[str, Any]) -> None:
    chunks = writer(**fields)
    for choice in (0, 3, 0):
        whole = chunks.frame([openai_chat.ChunkChoice(choice, openai_chat.Delta(content=text))])
        assert chunks.frames(news(ContentDelta(text), choice=choice)) == whole
        assert json.loads(whole.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": text}


def test_usage_in_each_chunk_is_not_that_of_the_first() -> None:
    chunks = writer(stream_options={"include_usage": True, "continuous_usage_stats": True})
    seen = []
    for count in (1, 2):
        chunks.tally.num_generated[0] = count
        seen.append(json.loads(chunks.frames(news(ContentDelta("a"))).removeprefix(b"data: "))["usage"])
    assert [usage["completion_tokens"] for usage in seen] == [1, 2]


def test_what_comes_together_is_a_chunk_each() -> None:
    said = writer().frames(
        news(ReasoningDelta("r"), ContentDelta("c"), ToolCallStart(0, "call_1", "ls"), end=End("tool_calls"))
    )
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in said.decode().split("\n\n")[:-1]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [sorted(delta) for delta in deltas] == [["reasoning", "reasoning_content"], ["content"], ["tool_calls"], []]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert writer().frames(news()) == b""
