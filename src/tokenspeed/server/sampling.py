# SPDX-License-Identifier: Apache-2.0
"""The sampling fields that the OpenAI dialects share: each is honoured or refused by name, never ignored.

Defaults come from the model's generation_config.json. Knows no messages and no streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import PRIORITY_ABS_MAX, SamplingParams
from tokenspeed.llm.sampling import (
    INT32_MAX,
    LOGPROBS_MAX,
    N_MAX,
    PENALTY_ABS_MAX,
    TEMPERATURE_MAX,
    checked,
    default_sampling,
)
from tokenspeed.server.fields import Refused, above, within
from tokenspeed.server.formats import FormatFields
from tokenspeed.server.served import ServedLLM

# Fields that SamplingParams has under the same name and type.
_PLAIN = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)

# Constraints and decoding modes that this server does not offer, with the values that ask for nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "cache_salt": (),
    "prompt_embeds": (),
    "audio": (),
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1.0,),
    "xtc_probability": (0.0,),
    "dry_multiplier": (0.0,),
    "mirostat": (0, 0.0),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "chat_template": (),
    "lora_path": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_hidden_states": (False,),
}


class StreamOptions(msgspec.Struct):
    """stream_options of a request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(FormatFields, kw_only=True):
    """Fields of a request body that the chat and the completions dialect share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, within(1, N_MAX)] = None
    temperature: Annotated[float | None, within(0, TEMPERATURE_MAX)] = None
    top_p: Annotated[float | None, above(0, 1)] = None
    top_k: Annotated[int | None, within(-1, INT32_MAX)] = None
    min_p: Annotated[float | None, within(0, 1)] = None
    presence_penalty: Annotated[float | None, within(-PENALTY_ABS_MAX, PENALTY_ABS_MAX)] = None
    frequency_penalty: Annotated[float | None, within(-PENALTY_ABS_MAX, PENALTY_ABS_MAX)] = None
    repetition_penalty: Annotated[float | None, above(0, 1e9)] = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int | None, within(-(2**63), 2**63 - 1)] = None
    max_tokens: Annotated[int | None, within(1, INT32_MAX)] = None
    min_tokens: Annotated[int | None, within(0, INT32_MAX)] = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Annotated[int | None, within(0, LOGPROBS_MAX)] = None
    priority: Annotated[int | None, within(-PRIORITY_ABS_MAX, PRIORITY_ABS_MAX)] = None
    best_of: int | None = None

    cache_salt: Refused = None
    prompt_embeds: Refused = None
    audio: Refused = None
    modalities: Refused = None
    use_beam_search: Refused = None
    length_penalty: Refused = None
    early_stopping: Refused = None
    bad_words: Refused = None
    allowed_token_ids: Refused = None
    truncate_prompt_tokens: Refused = None
    typical_p: Refused = None
    xtc_probability: Refused = None
    dry_multiplier: Refused = None
    mirostat: Refused = None
    stop_regex: Refused = None
    no_stop_trim: Refused = None
    logits_processors: Refused = None
    custom_logit_processor: Refused = None
    chat_template: Refused = None
    lora_path: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None
    return_token_ids: Refused = None
    return_tokens_as_token_ids: Refused = None
    return_hidden_states: Refused = None


def sampling_params(
    body: SamplingFields,
    served: ServedLLM,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The checked parameters, the model's own defaults in place of what was left out. Raises InvalidRequestError."""
    _refuse_unsupported(body)
    vocab_size = served.info.vocab_size
    given: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None}
    params = SamplingParams(
        **{
            **default_sampling(served.source),
            **given,
            "logit_bias": _logit_bias(body.logit_bias or {}),
            "stop": _stop(body.stop),
            "stop_token_ids": tuple(body.stop_token_ids or ()),
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
        }
    )
    return checked(params, vocab_size)


def under_its_name(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The error as it reads for a body that has the field under another name. names: ours to the body's."""
    ours = error.param or ""
    if ours not in names:
        return error
    return InvalidRequestError(str(error).replace(ours, names[ours], 1), names[ours])


def thinking_budget(num_tokens: int | None, param: str) -> int | None:
    """The number of tokens, or InvalidRequestError."""
    if num_tokens is not None and not 0 <= num_tokens <= INT32_MAX:
        raise InvalidRequestError(f"{param} is {num_tokens}; it must be from 0 to {INT32_MAX}", param)
    return num_tokens


def request_priority(body: SamplingFields) -> int:
    """The priority asked for, 0 when none was."""
    return body.priority or 0


def token_ids(param: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids, each checked against the vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param}[{index}]: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param
            )
    return tuple(ids)


def _refuse_unsupported(body: SamplingFields) -> None:
    for name, neutral in _REFUSED.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(f"{name} is not supported by this server; leave it out", name)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of is not supported; ask for n completions and choose yourself", "best_of")


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise InvalidRequestError(f"logit_bias: {key!r} is not a token id", "logit_bias")
    return tuple((int(key), bias) for key, bias in biases.items())
