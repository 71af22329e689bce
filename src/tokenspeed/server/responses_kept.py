# SPDX-License-Identifier: Apache-2.0
"""Endpoints about responses that were made or are being made: the response, its input, its end. Knows the store; knows
no model.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.server import responses_answers
from tokenspeed.server.openapi import Operation
from tokenspeed.server.responses_store import Item, ResponsesStore
from tokenspeed.server.served import Served

_ITEMS_DEFAULT, _ITEMS_MAX = 20, 100


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items. first_id, last_id: None in an empty one."""

    object: str = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


@Operation("A stored response", answer=responses_answers.Answer, failures=(400, 404)).of
async def stored_response(store: ResponsesStore, _: Served, request: Request) -> Response:
    """As it was answered."""
    if request.query_params.get("stream") == "true":
        raise InvalidRequestError("a stored response is not streamed again; leave stream out", "stream")
    return Response(store.body(request.path_params["id"]), media_type="application/json")


@Operation("Forget a stored response", answer=responses_answers.Deleted, failures=(404,)).of
async def delete_response(store: ResponsesStore, _: Served, request: Request) -> Response:
    """And end it if it still runs."""
    store.delete(request.path_params["id"])
    answer = responses_answers.Deleted(request.path_params["id"])
    return Response(msgspec.json.encode(answer), media_type="application/json")


@Operation("End a response that is being made", answer=responses_answers.Answer, failures=(404,)).of
async def cancel_response(store: ResponsesStore, _: Served, request: Request) -> Response:
    """The response as far as it came."""
    return Response(store.cancel(request.path_params["id"]), media_type="application/json")


@Operation("The conversation that a response answers, in pages", answer=ItemList, failures=(400, 404)).of
async def input_items(store: ResponsesStore, _: Served, request: Request) -> Response:
    """The newest items first unless order=asc; after: the last item of the page before."""
    response_id, asked = request.path_params["id"], request.query_params
    order, after = asked.get("order", "desc"), asked.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {order!r}; use asc or desc", "order")
    limit = asked.get("limit", str(_ITEMS_DEFAULT))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= _ITEMS_MAX):
        raise InvalidRequestError(f"limit is {limit[:20]!r}; use 1 to {_ITEMS_MAX}", "limit")
    items = [input_item(item, f"{response_id}/{index}") for index, item in enumerate(store.input(response_id))]
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequestError(f"after: there is no item {after!r} in this input", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    answer = ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > len(page))
    return Response(msgspec.json.encode(answer), media_type="application/json")


def input_item(item: Item, place: str) -> Item:
    """An item as it is shown: with an id, which stays the same for the same place, and text as parts."""
    kind = item.get("type") or ("message" if "role" in item else "unknown")
    shown: Item = {**item, "type": kind}
    if not isinstance(item.get("id"), str):
        digest = hashlib.sha256(place.encode()).hexdigest()[:32]
        shown["id"] = f"{'msg' if kind == 'message' else kind}_{digest}"
    if kind == "message":
        shown["status"] = item.get("status") or "completed"
        shown["content"] = _parts(item)
    return shown


def _parts(item: Item) -> list[Any]:
    content = item.get("content")
    if isinstance(content, list):
        return content
    if item.get("role") == "assistant":
        return [{"type": "output_text", "text": content or "", "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content or ""}]
