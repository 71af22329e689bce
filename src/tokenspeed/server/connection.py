# SPDX-License-Identifier: Apache-2.0
"""The client's side of a request: its body within a limit, and whether it is still there. Knows no dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from tokenspeed.server.errors import HttpError, decode_failure

T = TypeVar("T")


async def read_struct(request: Request, kind: type[T], bytes_max: int) -> T:
    """The body as `kind`, whatever content type it claims. 413 above bytes_max, 400 where it does not fit `kind`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise decode_failure(error) from None
    except RecursionError:
        raise HttpError(400, "the request body is nested too deeply", code="invalid_json", param="body") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when the client leaves first, `work` is cancelled and ClientDisconnect raised.

    To be called once the body has been read, since whatever `receive` still yields is dropped.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all sources as they come, with the index of their source. Closing it closes all sources."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=2 * len(sources))
    pumps = [asyncio.ensure_future(_pump(index, source, queue)) for index, source in enumerate(sources)]
    num_running = len(pumps)
    try:
        while num_running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_running -= 1
            else:
                yield entry
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, source: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((index, item))
    except Exception as error:  # noqa: BLE001 - raised again where the queue is read
        await queue.put(error)
    else:
        await queue.put(None)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(bytes_max: int) -> HttpError:
    return HttpError(413, f"the request body exceeds {bytes_max} bytes", code="request_too_large", param="body")
