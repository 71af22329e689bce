# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters as a caller gives them: types and ranges, defaults of a model, seeds.

Every value is honoured or refused with the field's name, never ignored. Knows no engine and no wire dialect.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping

import msgspec

from tokenspeed.checkpoints import ModelSource
from tokenspeed.core.errors import CheckpointError, InvalidRequestError
from tokenspeed.core.request import SamplingParams

N_MAX = 128
LOGPROBS_MAX = 20
STOP_MAX = 16
LOGIT_BIAS_ABS_MAX = 100.0
PENALTY_ABS_MAX = 2.0
TEMPERATURE_MAX = 100.0
INT32_MAX = 2**31 - 1
_INT64 = 2**63
_UINT64_MASK = 2**64 - 1

_DEFAULT_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def default_sampling(source: ModelSource) -> dict[str, float]:
    """The model's own defaults (generation_config.json), by field of SamplingParams. For fields that the caller leaves
    unset: `SamplingParams(**{**default_sampling(source), **given})`."""
    defaults: dict[str, float] = {}
    for field in _DEFAULT_FIELDS:
        value = source.generation_config.get(field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            defaults[field] = value
    if "top_k" in defaults and math.isfinite(defaults["top_k"]):
        defaults["top_k"] = int(defaults["top_k"])
    try:
        _check_shape(_typed(SamplingParams(**defaults)))  # type: ignore[arg-type]
        _check_penalties(SamplingParams(**defaults))  # type: ignore[arg-type]
    except InvalidRequestError as error:
        raise CheckpointError(f"generation_config.json: {error}") from None
    return defaults


def checked(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """`params` with exact types, or InvalidRequestError naming the field."""
    params = _typed(params)
    _check_shape(params)
    _check_penalties(params)
    _check_lengths(params)
    _check_ids(params, vocab_size)
    return params


def sequence_seed(seed: int | None, index: int) -> int:
    """The seed of the index-th of n sequences: different for each, the given one for the first."""
    if seed is None:
        return secrets.randbits(63)
    return seed if index == 0 else _mixed(seed, index)


def _typed(params: SamplingParams) -> SamplingParams:
    """Callers in Python may have passed lists, dicts, ints or worse: nothing checks a struct's types until now."""
    given = {field: getattr(params, field) for field in params.__struct_fields__}
    if isinstance(given["stop"], str):
        given["stop"] = (given["stop"],)
    if isinstance(given["logit_bias"], Mapping):
        given["logit_bias"] = tuple(given["logit_bias"].items())
    if given["top_k"] == -1:
        given["top_k"] = 0
    try:
        return msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        message = str(error)
        place = re.search(r"\$\.(\w+)", message)
        param = place.group(1) if place else None
        raise InvalidRequestError(f"{param}: {message.partition(' - at ')[0]}", param) from None


def _check_shape(params: SamplingParams) -> None:
    _require(
        0.0 <= params.temperature <= TEMPERATURE_MAX,
        "temperature",
        params.temperature,
        f"from 0 to {TEMPERATURE_MAX:.0f}",
    )
    _require(0 <= params.top_k <= INT32_MAX, "top_k", params.top_k, f"from 0 to {INT32_MAX} (0 or -1 turns it off)")
    _require(0.0 < params.top_p <= 1.0, "top_p", params.top_p, "above 0 and at most 1")
    _require(0.0 <= params.min_p <= 1.0, "min_p", params.min_p, "from 0 to 1")
    _require(1 <= params.n <= N_MAX, "n", params.n, f"from 1 to {N_MAX}")
    if params.seed is not None:
        _require(-_INT64 <= params.seed < _INT64, "seed", params.seed, "a signed 64-bit integer")
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None:
            _require(0 <= value <= LOGPROBS_MAX, name, value, f"from 0 to {LOGPROBS_MAX}")


def _check_penalties(params: SamplingParams) -> None:
    for name, value in (
        ("presence_penalty", params.presence_penalty),
        ("frequency_penalty", params.frequency_penalty),
    ):
        _require(-PENALTY_ABS_MAX <= value <= PENALTY_ABS_MAX, name, value, "from -2 to 2")
    repetition = params.repetition_penalty
    _require(repetition > 0.0 and math.isfinite(repetition), "repetition_penalty", repetition, "above 0")


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None:
        _require(1 <= params.max_tokens <= INT32_MAX, "max_tokens", params.max_tokens, f"from 1 to {INT32_MAX}")
    _require(0 <= params.min_tokens <= INT32_MAX, "min_tokens", params.min_tokens, f"from 0 to {INT32_MAX}")
    if params.max_tokens is not None:
        _require(
            params.min_tokens <= params.max_tokens,
            "min_tokens",
            params.min_tokens,
            f"at most max_tokens ({params.max_tokens})",
        )
    _require(len(params.stop) <= STOP_MAX, "stop", f"{len(params.stop)} strings", f"at most {STOP_MAX}")
    for text in params.stop:
        _require(bool(text), "stop", "an empty string", "strings of at least one character")


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for token_id in params.stop_token_ids:
        _require(0 <= token_id < vocab_size, "stop_token_ids", token_id, f"ids from 0 to {vocab_size - 1}")
    for token_id, bias in params.logit_bias:
        _require(0 <= token_id < vocab_size, "logit_bias", token_id, f"ids from 0 to {vocab_size - 1}")
        within = -LOGIT_BIAS_ABS_MAX <= bias <= LOGIT_BIAS_ABS_MAX
        _require(within, "logit_bias", bias, f"values from -{LOGIT_BIAS_ABS_MAX:.0f} to {LOGIT_BIAS_ABS_MAX:.0f}")


def _require(holds: bool, param: str, got: object, wanted: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{param} is {got}; it must be {wanted}", param)


def _mixed(seed: int, index: int) -> int:
    """splitmix64's finaliser (Steele, Lea and Flood, 2014) over seed + index, as a signed 64-bit integer."""
    z = (seed + index * 0x9E3779B97F4A7C15) & _UINT64_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64_MASK
    z ^= z >> 31
    return z - 2**64 if z >= _INT64 else z
