# SPDX-License-Identifier: Apache-2.0
"""A prompt and its sampling parameters become checked engine requests.

Renders chats, encodes text, checks every bound, fills in what the caller left open (length, seed, end tokens) and
looks up scripted replies. Knows no wire dialect and sends nothing.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from tokenspeed.chat.control_text import ControlTexts, mark_data
from tokenspeed.chat.template import ChatTemplate
from tokenspeed.checkpoints import ModelSource
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import CapacityExceededError, ConfigError, ContextLengthError, InvalidRequestError
from tokenspeed.core.ipc import EngineInfo
from tokenspeed.core.request import EngineRequest, Retention, SamplingParams, pack_ids
from tokenspeed.llm.grammars import checked_grammar
from tokenspeed.llm.retention import checked_priority, checked_retention, checked_seconds
from tokenspeed.llm.sampling import checked, default_sampling, sequence_seed
from tokenspeed.llm.token_ids import TokenIds

__all__ = [
    "ChatPrompt",
    "InputProcessor",
    "ProcessedRequest",
    "Prompt",
    "TextPrompt",
    "TokensPrompt",
    "default_sampling",
]

_NO_REPLY = "no scripted reply matches the prompt; add one with an empty match to take any prompt"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text. add_special_tokens: begin as the tokenizer begins a text (never with two BOS)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in the shape that chat templates expect."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, object] = field(default_factory=dict)


Prompt = TextPrompt | TokensPrompt | ChatPrompt
EXACT_CHARS_MAX = 1_000_000
NORMALISING_MAX = 4
"""A tokenizer may compose characters before it cuts: so many become one at the most."""
_PARAM = {TextPrompt: "prompt", TokensPrompt: "prompt", ChatPrompt: "messages"}


class TextCodec(Protocol):
    """The part of a tokenizer that prompts need."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def controls(self) -> ControlTexts: ...
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]: ...
    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> TokenIds: ...
    def encode_marked(self, text: str, mark: str) -> TokenIds: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One request: its prompt, the parameters that hold, and one engine request for each of n sequences.
    eos_ids: the model's end-of-sequence ids, which end a sequence without being its stop_reason."""

    prompt_token_ids: TokenIds
    params: SamplingParams
    sequences: tuple[EngineRequest, ...]
    eos_ids: frozenset[int]


class InputProcessor:
    """Prompts of one model. Holds no state of any request."""

    def __init__(self, source: ModelSource, tokenizer: TextCodec, info: EngineInfo, config: EngineConfig) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._info = info
        self._config = config
        self.template_text = _chat_template_text(source, config)
        self._template = _chat_template(self.template_text, tokenizer)
        self._eos_ids = _eos_ids(source, tokenizer)
        self._token_chars_max = NORMALISING_MAX * _longest_token(tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The model's end-of-sequence ids."""
        return self._eos_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether a ChatPrompt can be rendered."""
        return self._template is not None

    def reply_opening(self, template_kwargs: Mapping[str, object]) -> str:
        """The end of what is rendered before a reply, which may open its reasoning. Empty without a template."""
        if self._template is None:
            return ""
        return self.render(ChatPrompt([{"role": "user", "content": "?"}], template_kwargs=template_kwargs))[-64:]

    def render(self, prompt: ChatPrompt) -> str:
        """The text that a conversation becomes. Raises InvalidRequestError."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or start with --chat-template FILE", "messages"
            )
        if not prompt.messages:
            raise InvalidRequestError("messages is empty; it must hold at least one message", "messages")
        kwargs = dict(prompt.template_kwargs)
        opens = bool(kwargs.pop("add_generation_prompt", prompt.add_generation_prompt))
        for name in ("messages", "tools"):
            if name in kwargs:
                raise InvalidRequestError(f"chat_template_kwargs may not hold {name}; send it beside them", name)
        return self._template.render(prompt.messages, prompt.tools, opens, **kwargs)

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids, each known to the model. Raises InvalidRequestError."""
        return list(self._encoded(prompt))

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        retain: Retention | None = None,
        timeout_s: float | None = None,
        tells_at_end: bool = False,
    ) -> ProcessedRequest:
        """The checked request. tells_at_end: see EngineRequest; not where there are stop strings. Raises RequestError
        subclasses that name the field."""
        params = checked(params, self._info.vocab_size)
        if retain is not None:
            retain = checked_retention(retain)
        if timeout_s is not None:
            timeout_s = checked_seconds(timeout_s, "timeout_s")
        checked_priority(priority, "priority")
        if params.grammar is not None:
            checked_grammar(params.grammar)
        ids = self._encoded(prompt)
        params = self._fitted(params, len(ids), _PARAM[type(prompt)])
        eos_ids = () if params.ignore_eos else self._eos_ids
        forced = self._forced_ids(ids)
        whole = EngineRequest(
            request_id=request_id,
            token_ids=ids.packed,
            sampling=params,
            end_token_ids=tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids))),
            priority=priority,
            retain=retain,
            timeout_s=timeout_s,
            match_limit=0 if params.prompt_logprobs is not None else None,
            forced_token_ids=None if forced is None else pack_ids(forced),
            tells_at_end=tells_at_end and not params.stop,
        )
        sequences = tuple(_sequence(whole, index) for index in range(params.n))
        return ProcessedRequest(ids, params, sequences, frozenset(self._eos_ids))

    def _encoded(self, prompt: Prompt) -> TokenIds:
        match prompt:
            case TextPrompt(text, add_special_tokens):
                self._require_room(text, "prompt")
                ids = self._tokenizer.encode_prompt(text, add_special_tokens=add_special_tokens)
            case ChatPrompt():
                ids = self._encode_chat(prompt)
            case TokensPrompt(token_ids):
                ids = TokenIds.of(self._known(token_ids))
        if not ids:
            raise InvalidRequestError("the prompt is empty; it must hold at least one token", _PARAM[type(prompt)])
        return ids

    def _encode_chat(self, prompt: ChatPrompt) -> TokenIds:
        """Control text inside data stays text."""
        marked = mark_data(prompt.messages, prompt.tools, self._tokenizer.controls)
        if marked is None:
            text = self.render(prompt)
            self._require_room(text, "messages")
            return self._tokenizer.encode_prompt(text, add_special_tokens=False)
        text = self.render(dataclasses.replace(prompt, messages=marked.messages, tools=marked.tools))
        self._require_room(text, "messages")
        escaped = json.dumps(marked.mark)[1:-1]  # a template may write JSON in ASCII
        return self._tokenizer.encode_marked(text.replace(escaped, marked.mark), marked.mark)

    def _require_room(self, text: str, param: str) -> None:
        """Refuses text that is too long however it is cut: to encode megabytes would hold up every other request. Text
        of a bearable size is encoded all the same, so that the refusal has its exact count."""
        num_tokens_min = len(text) // self._token_chars_max
        if len(text) > EXACT_CHARS_MAX and num_tokens_min >= self._info.max_model_len:
            window, can_grow = self._info.max_model_len, self._can_grow()
            raise ContextLengthError(num_tokens_min, window, param, is_lower_bound=True, can_grow=can_grow)

    def _known(self, token_ids: Iterable[int]) -> list[int]:
        vocab_size = self._info.vocab_size
        try:
            ids = [operator.index(token_id) for token_id in token_ids]
        except TypeError:
            raise InvalidRequestError("the prompt's token ids must be whole numbers", "prompt") from None
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"token id {token_id} is outside this model's vocabulary: ids are 0 to {vocab_size - 1}", "prompt"
                )
        return ids

    def _fitted(self, params: SamplingParams, prompt_len: int, param: str) -> SamplingParams:
        """max_tokens cut to the window. Raises when the prompt leaves no room for even one token."""
        window = self._info.max_model_len
        if prompt_len + 1 > window:
            pool = self._info.num_kv_blocks * self._info.block_size
            if window < self._own_window() and prompt_len + 1 > pool:
                raise CapacityExceededError(prompt_len + 1, pool, param)
            raise ContextLengthError(prompt_len, window, param, can_grow=self._can_grow())
        room = window - prompt_len
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return msgspec.structs.replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))

    def _own_window(self) -> int:
        """The window that the operator or the model asked for; the engine's is smaller when the pool is."""
        asked = self._config.model.max_model_len
        own = self._source.config.get("max_position_embeddings")
        if asked is not None:
            return asked
        return own if isinstance(own, int) else self._info.max_model_len

    def _can_grow(self) -> bool:
        """Whether the window is smaller than the model's own."""
        own = self._source.config.get("max_position_embeddings")
        return isinstance(own, int) and self._info.max_model_len < own

    def _forced_ids(self, prompt_ids: Sequence[int]) -> list[int] | None:
        """What a scripted model will say to this prompt; None for a real model."""
        script = self._source.script
        if script is None:
            return None
        text = self._tokenizer.decode(prompt_ids, skip_special_tokens=False)
        for reply in script.replies:
            if reply.match in text:
                eos = self._eos_ids[:1]
                return [*self._tokenizer.encode(reply.text, add_special_tokens=False, parse_special=False), *eos]
        raise InvalidRequestError(_NO_REPLY, "messages")


def _sequence(whole: EngineRequest, index: int) -> EngineRequest:
    """The index-th of n sequences. Only the first computes log-probabilities of the prompt, and only the first is
    kept for the session's next turn."""
    params = msgspec.structs.replace(whole.sampling, seed=sequence_seed(whole.sampling.seed, index))
    if index == 0 and whole.sampling.n == 1:
        return msgspec.structs.replace(whole, sampling=params)
    return msgspec.structs.replace(
        whole,
        request_id=f"{whole.request_id}#{index}",
        sampling=msgspec.structs.replace(params, prompt_logprobs=params.prompt_logprobs if index == 0 else None),
        match_limit=whole.match_limit if index == 0 else None,
        retain=whole.retain if index == 0 else None,
    )


def _longest_token(tokenizer: TextCodec) -> int:
    """Characters of the longest token of the vocabulary."""
    return max(len(tokenizer.token_text(token_id)) for token_id in range(tokenizer.vocab_size))


def _eos_ids(source: ModelSource, tokenizer: TextCodec) -> tuple[int, ...]:
    """The tokenizer's end-of-sequence id and those of generation_config.json, in that order."""
    listed = source.generation_config.get("eos_token_id")
    ids = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if isinstance(listed, int):
        ids.append(listed)
    elif isinstance(listed, Sequence):
        ids.extend(token_id for token_id in listed if isinstance(token_id, int))
    return tuple(dict.fromkeys(ids))


def _chat_template_text(source: ModelSource, config: EngineConfig) -> str | None:
    """The template given by the operator, else the model's own."""
    given = given_template(config)
    return source.chat_template if given is None else given


def _chat_template(text: str | None, tokenizer: TextCodec) -> ChatTemplate | None:
    if text is None:
        return None
    return ChatTemplate(
        text, bos_token=_token_text(tokenizer, tokenizer.bos_id), eos_token=_token_text(tokenizer, tokenizer.eos_id)
    )


def given_template(config: EngineConfig) -> str | None:
    """The template that the operator gives: --chat-template is a file, or the template itself. Raises ConfigError."""
    given = config.model.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {given}: cannot read it ({error}); give a jinja file") from None


def _token_text(tokenizer: TextCodec, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)
