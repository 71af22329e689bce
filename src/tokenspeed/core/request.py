# SPDX-License-Identifier: Apache-2.0
"""A request as it crosses from the API process to the engine, and what comes back for it.

Knows no wire dialect, no tokenizer and no scheduler.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "lark", "ebnf", "tags"]

PRIORITY_ABS_MAX = 1 << 20
"""Priority classes go from minus this to this, lower is sooner. The control plane knows no others."""


class Lead(msgspec.Struct, frozen=True, array_like=True):
    """Free text, such as reasoning, that comes before what a grammar describes and ends with `close`. open: there is a
    lead only where the text begins with this; None: there always is, since the prompt has opened it."""

    close: str
    open: str | None = None


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a generated text must match, from its first token to its end.

    kind and source: json_schema, a JSON Schema; regex, of the whole text; lark or ebnf (GBNF), a grammar with the rule
    start or root; tags, the JSON of a grammar.Tags, free text in which calls have a form.
    """

    kind: GrammarKind
    source: str
    lead: Lead | None = None


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Reasoning takes at most num_tokens tokens: then it is closed with close_ids. It begins with open_ids, or is open
    from the start where is_open."""

    num_tokens: int
    is_open: bool
    open_ids: tuple[int, ...]
    close_ids: tuple[int, ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one sequence is sampled. Names and meanings follow the OpenAI API and its common extensions.

    temperature: 0 means greedy. top_k: 0 means off. logprobs: None means off, k means the sampled
    token and the k most likely ones. max_tokens: None means as many as the context allows.
    stop and skip_special_tokens are applied in the API process, all else in the engine.
    seed: None draws one per request. logit_bias: (token id, bias) pairs.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Retention(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep the pages of a request that ends well for the session's next turn: for ttl_s seconds unless told otherwise
    after the end. priority: lower is kept longer when memory runs short."""

    session: str
    ttl_s: float
    priority: int = 0


class ContentSpan(msgspec.Struct, frozen=True, array_like=True):
    """Placeholder tokens start to start + length stand for something whose 128-bit content hash is (high, low): two
    prompts share the blocks that touch a span only if the contents are the same."""

    start: int
    length: int
    hash_high: int
    hash_low: int


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence for the engine (n > 1 is n of these).

    token_ids: packed int32, see pack_ids. sampling.max_tokens and sampling.seed are set (never None).
    end_token_ids: ids that end the sequence (end-of-sequence ids unless ignore_eos, and stop_token_ids).
    forced_token_ids: packed int32; when given, the sampler is made to return these in turn (scripted models).
    match_limit: at most this many prompt tokens may come from the prefix cache; None means no limit.
    retain: keep the pages after the end for the session's next turn. timeout_s: the request ends, in whatever state it
    is, so many seconds after it was queued. tells_at_end: nobody waits for single tokens, which come with other news of
    the request, at the latest with its end.
    """

    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    priority: int = 0
    namespace: str = ""
    adapter: str = ""
    spans: tuple[ContentSpan, ...] = ()
    retain: Retention | None = None
    timeout_s: float | None = None
    match_limit: int | None = None
    forced_token_ids: bytes | None = None
    tells_at_end: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural log) of one token and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one or more steps added to one sequence.

    token_ids: newly accepted ids, an end token included when it ended the sequence.
    logprobs: one entry for each of token_ids when asked for. prompt_logprobs: once, on the first update;
    its first entry is None (nothing precedes the first token). end_token_id: the id that ended it. queue_s: once,
    and nothing with it, when the first step begins that the sequence is part of: seconds since the engine's receipt.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    cached_len: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    end_token_id: int | None = None
    error: str | None = None
    queue_s: float | None = None


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as native-endian int32 bytes."""
    return array("i", token_ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of pack_ids."""
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()
