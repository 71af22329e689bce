# SPDX-License-Identifier: Apache-2.0
"""A conversation of the Responses API made short: what the user said stays, the rest becomes a summary that the model
writes. Knows no other dialect.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from contextlib import aclosing

import msgspec

from tokenspeed.chat.parsers import ContentDelta, ReasoningDelta
from tokenspeed.core.errors import RequestError
from tokenspeed.server.chat import Message
from tokenspeed.server.errors import GenerationError
from tokenspeed.server.generation import Job, Tally
from tokenspeed.server.openai_responses import COMPACTION, Asked, sealed
from tokenspeed.server.responses_answers import Usage, name_input, usage_of
from tokenspeed.server.responses_kept import input_item
from tokenspeed.server.responses_store import Item, items_of
from tokenspeed.server.served import Served
from tokenspeed.server.tool_choice import ToolChoice
from tokenspeed.server.turn import Reply, news_of

_REQUEST = (
    "Summarize this conversation so that the work can go on from your summary alone, without any of the messages "
    "before it. Say what was asked for and why, what was done and found (files, commands, results, decisions), what is "
    "unfinished, and what comes next. Write the summary only; call no tool."
)
_SUMMARY_TOKENS_MAX = 4096


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/responses/compact: the user's messages, then one compaction item."""

    id: str
    object: str = "response.compaction"
    created_at: int
    output: list[Item]
    usage: Usage


def asking_for_summary(asked: Asked) -> Asked:
    """The same conversation, which ends with the wish for a summary."""
    conversation = asked.conversation
    params = conversation.params
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=_SUMMARY_TOKENS_MAX)
    messages = (*conversation.messages, Message("user", _REQUEST))
    conversation = dataclasses.replace(
        conversation, messages=messages, params=params, choice=ToolChoice(may_call=False), form=None
    )
    return dataclasses.replace(asked, conversation=conversation)


async def compacted(served: Served, job: Job, asked: Asked, reply: Reply) -> Compacted:
    """Runs the job to its end. GenerationError when the model wrote no summary."""
    tally, texts, thoughts = Tally(), [], []
    try:
        async with aclosing(news_of(served, job, reply, tally)) as found:
            async for news in found:
                texts += [delta.text for delta in news.deltas if isinstance(delta, ContentDelta)]
                thoughts += [delta.text for delta in news.deltas if isinstance(delta, ReasoningDelta)]
    except RequestError as error:
        name_input(error)
        raise
    summary = "".join(texts).strip()
    if not summary:
        raise GenerationError("the model wrote no summary; try again")
    items = enumerate(items_of(asked.history))
    said = [input_item(item, f"{job.request_id}/{index}") for index, item in items if item.get("role") == "user"]
    item = {"id": f"cmp_{uuid.uuid4().hex}", "type": COMPACTION, "encrypted_content": sealed(summary)}
    return Compacted(
        id=job.request_id,
        created_at=int(time.time()),
        output=[*said, item],
        usage=await usage_of(served, tally, "".join(thoughts)),
    )
