# SPDX-License-Identifier: Apache-2.0
"""/v1/models, and what a request is told that names another model than the one served. Knows no other endpoint."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.server import anthropic_answers
from tokenspeed.server.errors import HttpError
from tokenspeed.server.openapi import Operation
from tokenspeed.server.served import Served

_ANTHROPIC_VERSION = "anthropic-version"


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model as /v1/models lists it."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tokenspeed"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


@Operation(
    "The models: the one that is served. With the header anthropic-version in that API's shape",
    answer=(ModelList, anthropic_answers.ModelList),
).of
async def list_models(served: Served, request: Request) -> Response:
    """GET /v1/models."""
    if _ANTHROPIC_VERSION in request.headers:
        return _answer(anthropic_answers.ModelList.of(served))
    return _answer(ModelList(data=[_card(served)]))


@Operation("One model", answer=(ModelCard, anthropic_answers.ModelInfo)).of
async def show_model(served: Served, request: Request) -> Response:
    """GET /v1/models/{model}. HttpError for another name than the served one."""
    name = request.path_params["model"]
    if name != served.model_name:
        raise _unknown_model(served, name)
    is_theirs = _ANTHROPIC_VERSION in request.headers
    return _answer(anthropic_answers.ModelInfo.of(served) if is_theirs else _card(served))


def model_headers(served: Served, asked: str | None) -> dict[str, str]:
    """Headers that say so when a body names a model that is not the one served."""
    if not asked or asked == served.model_name:
        return {}
    if served.config.strict_model_name:
        raise _unknown_model(served, asked)
    shown = asked.encode("ascii", "replace").decode()[:128]
    printable = "".join(character if character.isprintable() else "?" for character in shown)
    return {"x-tokenspeed-warning": f"model '{printable}' is not served here; '{served.model_name}' answered"}


def _unknown_model(served: Served, asked: str) -> HttpError:
    message = f"the model {asked!r} does not exist; this server has {served.model_name!r}"
    return HttpError(404, message, code="model_not_found", param="model")


def _card(served: Served) -> ModelCard:
    return ModelCard(
        id=served.model_name,
        created=served.created,
        root=served.model_name,
        max_model_len=served.llm.info.max_model_len,
    )


def _answer(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
