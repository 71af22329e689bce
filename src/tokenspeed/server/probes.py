# SPDX-License-Identifier: Apache-2.0
"""What gateways ask a worker over HTTP before and while they send it requests: what it serves, and how busy it is.

The same facts as over gRPC. Knows no dialect of requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed import __version__
from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.server.load import Load, LoadMeter
from tokenspeed.server.openapi import Operation
from tokenspeed.server.served import Served, ServedLLM


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model: its name, kind and limits in tokens."""

    model_path: str
    served_model_name: str
    model_type: str
    is_generation: bool = True
    max_context_length: int
    max_req_input_len: int
    vocab_size: int
    model_dtype: str

    @classmethod
    def of(cls, served: Served) -> ModelFacts:
        """Those of what is served. A path on this machine is nobody's business, so the name stands for it."""
        info = served.llm.info
        return cls(
            model_path=served.model_name,
            served_model_name=served.model_name,
            model_type=info.model_type,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            model_dtype=info.dtype,
        )


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The server: what it serves on what, and how much of it at once. max_total_num_tokens: what the KV pool holds."""

    version: str = __version__
    served_model_name: str
    model_path: str
    device: str
    dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_total_num_tokens: int
    prefix_caching: bool

    @classmethod
    def of(cls, served: Served, meter: LoadMeter) -> ServerFacts:
        """Those of this server."""
        info = served.llm.info
        return cls(
            served_model_name=served.model_name,
            model_path=served.model_name,
            device=info.device,
            dtype=info.dtype,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_total_num_tokens=meter.num_kv_tokens,
            prefix_caching=served.llm.config.cache.prefix_caching,
        )


class RankLoad(Load, frozen=True, kw_only=True):
    """The load of the one rank that others see: partitions are the server's own matter."""

    rank: int = msgspec.field(default=0, name="dp_rank")


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/loads."""

    version: str = __version__
    dp_rank_count: int = 1
    loads: list[RankLoad]


@Operation("The model as gateways ask for it", answer=ModelFacts).of
async def model_info(served: Served, _: Request) -> Response:
    """GET /model_info and /get_model_info."""
    return _answer(ModelFacts.of(served))


@Operation("The server as gateways ask for it", answer=ServerFacts).of
async def server_info(meter: LoadMeter, served: Served, _: Request) -> Response:
    """GET /server_info and /get_server_info."""
    return _answer(ServerFacts.of(served, meter))


@Operation("How busy the engine is", answer=Loads, failures=(400,)).of
async def loads(meter: LoadMeter, _: Served, request: Request) -> Response:
    """GET /v1/loads."""
    if request.query_params.get("dp_rank", "0") != "0":
        raise InvalidRequestError("dp_rank: there is one rank here, 0", "dp_rank")
    return _answer(Loads(loads=[RankLoad(**msgspec.structs.asdict(meter.read()))]))


def routes(llm: ServedLLM) -> list[tuple[str, str, Callable[[Served, Request], Awaitable[Response]]]]:
    """Rows of (method, path, handler)."""
    meter = LoadMeter(llm)
    about_server = partial(server_info, meter)
    return [
        ("GET", "/model_info", model_info),
        ("GET", "/get_model_info", model_info),
        ("GET", "/server_info", about_server),
        ("GET", "/get_server_info", about_server),
        ("GET", "/v1/loads", partial(loads, meter)),
    ]


def _answer(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
