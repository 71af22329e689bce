# SPDX-License-Identifier: Apache-2.0
"""What the server makes of each recorded request: the ids of its prompt and of its scripted reply, so that the shared
beginning of two steps can be measured and held against what the answers say of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from clients.wire import Exchange
from fakes import engine_info
from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import EngineConfig, ModelConfig
from tokenspeed.core.request import unpack_ids
from tokenspeed.llm.input_processor import InputProcessor
from tokenspeed.llm.tokenizer import Tokenizer
from tokenspeed.server import anthropic_messages, openai_chat, openai_responses
from tokenspeed.server.chat import Conversation
from tokenspeed.server.responses_store import ResponsesStore

CHAT, MESSAGES, RESPONSES = PATHS = "/v1/chat/completions", "/v1/messages", "/v1/responses"

BLOCK_SIZE = 16
"""Tokens; the server's default."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request for a reply. shared: tokens that it has in common with the best earlier one; cached: those that the
    answer says were cached."""

    exchange: Exchange
    prompt_len: int
    shared: int
    cached: int
    told_prompt_len: int


@dataclass(frozen=True, slots=True)
class _Usage:
    """Tokens, whatever the dialect. reply_len: less than the script has where the server stopped after a call."""

    prompt_len: int
    cached: int
    reply_len: int


class Prompts:
    """Reads requests as the server with this scripted model does."""

    def __init__(self, folder: Path) -> None:
        model = ModelConfig(model=str(folder), load_format="scripted")
        config, source = EngineConfig(model=model), open_model(model)
        tokenizer = Tokenizer.from_source(source.tokenizer)
        window = source.config["max_position_embeddings"]
        info = engine_info(vocab_size=tokenizer.vocab_size, max_model_len=window, num_kv_blocks=window)
        self._histories: dict[str | None, list[Any]] = {}
        self._processor = InputProcessor(source, tokenizer, info, config)
        self._llm: Any = SimpleNamespace(
            source=source, info=info, config=config, tokenizer=tokenizer, input_processor=self._processor
        )

    def steps(self, exchanges: Sequence[Exchange]) -> list[Step]:
        """Every exchange that asked for a reply and told what it cost."""
        known: list[tuple[float, list[int]]] = []
        steps = []
        for exchange in exchanges:
            usage = _usage(exchange)
            if usage is None:
                continue
            prompt, reply = self._ids(exchange)
            earlier = [ids for end_s, ids in known if end_s < exchange.start_s]
            shared = max((_shared_len(prompt, ids) for ids in earlier), default=0)
            steps.append(Step(exchange, len(prompt), shared, usage.cached, usage.prompt_len))
            known.append((exchange.end_s, prompt + reply[: usage.reply_len]))
        return steps

    def _ids(self, exchange: Exchange) -> tuple[list[int], list[int]]:
        conversation = self._conversation(exchange)
        done = self._processor.process(conversation.prompt(), conversation.params, request_id="step")
        forced = done.sequences[0].forced_token_ids
        return list(done.prompt_token_ids), [] if forced is None else unpack_ids(forced)

    def _conversation(self, exchange: Exchange) -> Conversation:
        path = exchange.path.split("?")[0]
        if path == MESSAGES:
            messages_body = msgspec.json.decode(exchange.body, type=anthropic_messages.MessagesBody)
            return anthropic_messages.read_conversation(messages_body, self._llm)
        if path == RESPONSES:
            responses_body = msgspec.convert(self._whole_body(exchange), openai_responses.ResponsesBody)
            return openai_responses.read(responses_body, self._llm, ResponsesStore()).conversation
        chat_body = msgspec.json.decode(exchange.body, type=openai_chat.ChatBody)
        return openai_chat.read_conversation(chat_body, self._llm)

    def _whole_body(self, exchange: Exchange) -> dict[str, Any]:
        """With the history itself where the server was only told which of its answers came before."""
        body = exchange.json()
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        items = [*self._histories.get(body.pop("previous_response_id", None), []), *items]
        last = exchange.events()[-1]
        answer = last.get("response", last)
        self._histories[answer["id"]] = [*items, *answer["output"]]
        return {**body, "input": items}


def _shared_len(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _usage(exchange: Exchange) -> _Usage | None:
    """What the answer tells of its tokens, if it does."""
    if exchange.method != "POST" or exchange.status != 200 or exchange.path.split("?")[0] not in PATHS:
        return None
    told = [_usage_of(event) for event in exchange.events()]
    usage = next((each for each in reversed(told) if each), None)
    if usage is None:
        return None
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        prompt_len = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        return _Usage(prompt_len, cached, usage["output_tokens"])
    if "input_tokens" in usage:
        cached = usage["input_tokens_details"]["cached_tokens"]
        return _Usage(usage["input_tokens"], cached, usage["output_tokens"])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return _Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _usage_of(event: dict[str, Any]) -> dict[str, Any] | None:
    """Of an answer, a chunk or an event that has a message or a response in it."""
    inner = event.get("message") or event.get("response") or {}
    found: dict[str, Any] | None = event.get("usage") or inner.get("usage")
    return found
