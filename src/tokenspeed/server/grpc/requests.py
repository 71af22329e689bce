# SPDX-License-Identifier: Apache-2.0
"""A GenerateRequest as a job for the engine: every field is honoured or refused by name, never ignored.

Knows the messages of the service; sends nothing.
"""

from __future__ import annotations

from typing import Any

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.input_processor import TokensPrompt
from tokenspeed.llm.sampling import default_sampling
from tokenspeed.server.generation import Job, new_id
from tokenspeed.server.grpc.constraints import grammar_of
from tokenspeed.server.served import Served, ServedLLM

# (field of the message, field of SamplingParams) where a value may be left out
_OPTIONAL = (
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("min_p", "min_p"),
    ("frequency_penalty", "frequency_penalty"),
    ("presence_penalty", "presence_penalty"),
    ("repetition_penalty", "repetition_penalty"),
    ("max_new_tokens", "max_tokens"),
)
_INT64_MAX = 2**63 - 1


def read_job(request: Any, served: Served) -> Job:
    """What is asked. Raises InvalidRequestError; ranges are checked where the engine takes it."""
    llm = served.llm
    _refuse_unserved(request, llm)
    token_ids = list(request.tokenized.input_ids)
    if not token_ids:
        raise InvalidRequestError("tokenized.input_ids is empty; send at least one token", "tokenized.input_ids")
    given = _sampling(request) | {"grammar": grammar_of(request.sampling_params, token_ids, served)}
    params = SamplingParams(**{**default_sampling(llm.source), **given})  # type: ignore[arg-type]
    return Job(request.request_id or new_id("grpc"), [TokensPrompt(token_ids)], params)


def _sampling(request: Any) -> dict[str, object]:
    """The fields of SamplingParams that the request sets."""
    sent = request.sampling_params
    given: dict[str, object] = {ours: getattr(sent, theirs) for theirs, ours in _OPTIONAL if sent.HasField(theirs)}
    if sent.HasField("sampling_seed"):
        given["seed"] = _signed(sent.sampling_seed)
    if request.return_logprob:
        given["logprobs"] = request.top_logprobs_num
    return given | {
        "n": sent.n or 1,
        "min_tokens": sent.min_new_tokens,
        "stop": tuple(sent.stop),
        "stop_token_ids": tuple(sent.stop_token_ids),
        "ignore_eos": sent.ignore_eos,
        "skip_special_tokens": sent.skip_special_tokens,
        "logit_bias": tuple((_token_id(key), bias) for key, bias in sent.logit_bias.items()),
    }


def _refuse_unserved(request: Any, llm: ServedLLM) -> None:
    """What asks for something that this server does not do."""
    sent = request.sampling_params
    if len(sent.custom_params) > 0:
        raise InvalidRequestError("sampling_params.custom_params is not supported; leave it out", "custom_params")
    if len(request.mm_inputs.items) > 0:
        raise InvalidRequestError("mm_inputs: this model reads text only", "mm_inputs")
    for name in ("encode_bootstrap_info", "kv_bootstrap_info"):
        if request.HasField(name):
            raise InvalidRequestError(f"{name}: this server prefills and decodes itself; leave it out", name)
    if len(request.token_ids_logprob) > 0:
        raise InvalidRequestError("token_ids_logprob is not supported; use top_logprobs_num", "token_ids_logprob")
    if request.HasField("logprob_start_len") and request.logprob_start_len >= 0 and request.return_logprob:
        message = "logprob_start_len: an answer has no place for log-probabilities of the prompt; leave it out"
        raise InvalidRequestError(message, "logprob_start_len")
    if request.HasField("data_parallel_rank") and llm.config.parallel.dp_attention > 1:
        message = "data_parallel_rank: this server chooses the partition itself; leave it out"
        raise InvalidRequestError(message, "data_parallel_rank")


def _signed(seed: int) -> int:
    """An unsigned 64-bit seed as the signed one of the same bits."""
    return seed if seed <= _INT64_MAX else seed - 2**64


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidRequestError(f"logit_bias has the key {key!r}; keys are token ids", "logit_bias") from None
