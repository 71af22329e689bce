# SPDX-License-Identifier: Apache-2.0
"""/tokenize and /detokenize. Knows no sampling and no streams."""

from __future__ import annotations

import asyncio

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.llm.input_processor import Prompt, TextPrompt, TokensPrompt
from tokenspeed.server.openai_chat import ChatBody, MessageField, read_conversation
from tokenspeed.server.served import Served


class TokenizeBody(ChatBody, kw_only=True):
    """Text, or a conversation as the chat dialect has it."""

    messages: list[MessageField] = msgspec.field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Ids and their number."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Ids."""

    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text of the ids."""

    prompt: str


async def tokenize(served: Served, body: TokenizeBody) -> TokenizeAnswer:
    """The ids that a completion or a chat with this body would start from."""
    llm = served.llm
    prompt: Prompt
    if body.messages:
        prompt = read_conversation(body, llm).prompt()
    elif body.prompt is not None:
        prompt = TextPrompt(body.prompt, body.add_special_tokens is not False)
    else:
        raise InvalidRequestError("send prompt (text) or messages", "prompt")
    ids = await asyncio.to_thread(llm.input_processor.encode, prompt)
    strings = [llm.tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return TokenizeAnswer(len(ids), llm.info.max_model_len, ids, strings)


async def detokenize(served: Served, body: DetokenizeBody) -> DetokenizeAnswer:
    """The text of the ids, special tokens included."""
    ids = await asyncio.to_thread(served.llm.input_processor.encode, TokensPrompt(body.tokens)) if body.tokens else []
    return DetokenizeAnswer(served.llm.tokenizer.decode(ids, skip_special_tokens=False))
