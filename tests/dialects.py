# SPDX-License-Identifier: Apache-2.0
"""One conversation in the words of each API, and one reply read back from each: what is the same must come out so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


@dataclass(frozen=True)
class Called:
    """A call, and what came of it."""

    name: str
    arguments: Json
    result: str
    result_is_parts: bool = False


@dataclass(frozen=True)
class Turn:
    """What a user says, then what the assistant did until the next user turn: steps of (reasoning, text, calls)."""

    parts: tuple[str, ...]
    steps: tuple[tuple[str, str, tuple[Called, ...]], ...] = ()


@dataclass(frozen=True)
class Talk:
    """A conversation that waits for a reply: the last turn ends in the user's words or in results."""

    turns: tuple[Turn, ...]
    system: tuple[str, ...] = ()
    tools: tuple[tuple[str, str, Json], ...] = ()
    parts_as_text: bool = True

    def body(self, dialect: str) -> Json:
        """The request in this dialect."""
        return {"chat": _chat, "messages": _messages, "responses": _responses}[dialect](self)


@dataclass
class Reply:
    """What a reply says, whatever dialect said it."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    end: str = ""
    usage: tuple[int, int, int] = (0, 0, 0)
    """Prompt tokens, cached ones among them, generated tokens."""


def _content(parts: Sequence[str], kind: str, as_text: bool) -> Any:
    if as_text and len(parts) == 1:
        return parts[0]
    return [{"type": kind, "text": part} for part in parts]


def _call_ids(turn: int, step: int, calls: Sequence[Called]) -> list[str]:
    return [f"call_{turn}_{step}_{index}" for index in range(len(calls))]


def _chat(talk: Talk) -> Json:
    messages: list[Json] = []
    if talk.system:
        messages.append({"role": "system", "content": _content(talk.system, "text", talk.parts_as_text)})
    for number, turn in enumerate(talk.turns):
        messages.append({"role": "user", "content": _content(turn.parts, "text", talk.parts_as_text)})
        for step, (reasoning, text, calls) in enumerate(turn.steps):
            ids = _call_ids(number, step, calls)
            said: Json = {"role": "assistant", "content": text or None}
            if reasoning:
                said["reasoning_content"] = reasoning
            if calls:
                said["tool_calls"] = [
                    {"id": i, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
                    for i, c in zip(ids, calls, strict=True)
                ]
            messages.append(said)
            messages += [
                {"role": "tool", "tool_call_id": i, "content": _content((c.result,), "text", not c.result_is_parts)}
                for i, c in zip(ids, calls, strict=True)
            ]
    body: Json = {"messages": messages, "temperature": 0, "max_tokens": 400}
    if talk.tools:
        body["tools"] = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
            for name, text, schema in talk.tools
        ]
    return body


def _messages(talk: Talk) -> Json:
    messages: list[Json] = []
    results: list[Json] = []
    for number, turn in enumerate(talk.turns):
        content = _content(turn.parts, "text", talk.parts_as_text)
        messages.append({"role": "user", "content": content})
        for step, (reasoning, text, calls) in enumerate(turn.steps):
            ids = _call_ids(number, step, calls)
            blocks: list[Json] = []
            if reasoning:
                blocks.append({"type": "thinking", "thinking": reasoning, "signature": "s"})
            if text:
                blocks.append({"type": "text", "text": text})
            blocks += [
                {"type": "tool_use", "id": i, "name": c.name, "input": c.arguments}
                for i, c in zip(ids, calls, strict=True)
            ]
            messages.append({"role": "assistant", "content": blocks})
            results = [
                {"type": "tool_result", "tool_use_id": i,
                 "content": _content((c.result,), "text", not c.result_is_parts)}
                for i, c in zip(ids, calls, strict=True)
            ]  # fmt: skip
            if results:
                messages.append({"role": "user", "content": results})
    body: Json = {"messages": messages, "temperature": 0, "max_tokens": 400}
    if talk.system:
        body["system"] = _content(talk.system, "text", talk.parts_as_text)
    if talk.tools:
        body["tools"] = [
            {"name": name, "description": text, "input_schema": schema} for name, text, schema in talk.tools
        ]
    return body


def _responses(talk: Talk) -> Json:
    items: list[Json] = []
    if talk.system:
        items.append({"role": "developer", "content": _content(talk.system, "input_text", talk.parts_as_text)})
    for number, turn in enumerate(talk.turns):
        items.append({"role": "user", "content": _content(turn.parts, "input_text", talk.parts_as_text)})
        for step, (reasoning, text, calls) in enumerate(turn.steps):
            ids = _call_ids(number, step, calls)
            if reasoning:
                items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]})
            if text:
                items.append(
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
                )
            items += [
                {"type": "function_call", "call_id": i, "name": c.name, "arguments": json.dumps(c.arguments)}
                for i, c in zip(ids, calls, strict=True)
            ]
            items += [
                {"type": "function_call_output", "call_id": i,
                 "output": _content((c.result,), "input_text", not c.result_is_parts)}
                for i, c in zip(ids, calls, strict=True)
            ]  # fmt: skip
    body: Json = {"input": items, "temperature": 0, "max_output_tokens": 400}
    if talk.tools:
        body["tools"] = [
            {"type": "function", "name": name, "description": text, "parameters": schema}
            for name, text, schema in talk.tools
        ]
    return body


def read_whole(dialect: str, answer: Json) -> Reply:
    """A reply that was not streamed."""
    if dialect == "chat":
        (choice,) = answer["choices"]
        message, usage = choice["message"], answer["usage"]
        calls = [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []
        ]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = (usage["prompt_tokens"], cached, usage["completion_tokens"])
        thought = message.get("reasoning_content") or ""
        return Reply(message["content"] or "", thought, calls, choice["finish_reason"], counts)
    if dialect == "messages":
        return _of_blocks(answer["content"], answer["stop_reason"], answer["usage"])
    return _of_items(answer)


def read_stream(dialect: str, text: str) -> Reply:
    """A reply put together from its events."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(item) for item in data if item != "[DONE]"]
    return {"chat": _of_chunks, "messages": _of_block_events, "responses": _of_item_events}[dialect](events)


def _of_blocks(blocks: Sequence[Json], stop_reason: str, usage: Json) -> Reply:
    cached = usage["cache_read_input_tokens"]
    return Reply(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}[stop_reason],
        (usage["input_tokens"] + cached, cached, usage["output_tokens"]),
    )


def _of_items(answer: Json) -> Reply:
    items, usage = answer["output"], answer["usage"]
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    end = "length" if answer["status"] == "incomplete" else "tool_calls" if calls else "stop"
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Reply(
        "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["summary"]),
        calls,
        end,
        (usage["input_tokens"], cached, usage["output_tokens"]),
    )


def _of_chunks(events: Sequence[Json]) -> Reply:
    reply, arguments = Reply(), {}
    for chunk in events:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            reply.text += delta.get("content") or ""
            reply.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                name, so_far = arguments.get(call["index"], ("", ""))
                function = call["function"]
                arguments[call["index"]] = (function.get("name") or name, so_far + (function.get("arguments") or ""))
            reply.end = choice["finish_reason"] or reply.end
        if chunk.get("usage"):
            usage = chunk["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            reply.usage = (usage["prompt_tokens"], cached, usage["completion_tokens"])
    reply.calls = [(name, json.loads(text)) for _, (name, text) in sorted(arguments.items())]
    return reply


def _of_block_events(events: Sequence[Json]) -> Reply:
    blocks: list[Json] = []
    inputs: dict[int, str] = {}
    stop_reason, usage = "", dict(events[0]["message"]["usage"])
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for name in ("text", "thinking"):
                if name in delta:
                    block[name] += delta[name]
            if delta["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            stop_reason = event["delta"]["stop_reason"]
            usage |= event["usage"]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text or "{}")
    return _of_blocks(blocks, stop_reason, usage)


def _of_item_events(events: Sequence[Json]) -> Reply:
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    reply = _of_items(events[-1]["response"])
    deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert deltas == reply.text, "the deltas are another text than the whole"
    return reply
