# SPDX-License-Identifier: Apache-2.0
"""The second port, where gateways are served: opened, announced and closed together with HTTP, if it is asked for.

Imports gRPC only then. Knows no message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import msgspec

from tokenspeed.core.config import EngineConfig, ServerConfig
from tokenspeed.core.errors import ConfigError
from tokenspeed.server.served import Served

if TYPE_CHECKING:
    from tokenspeed.server.grpc.listener import GrpcListener


def with_events(engine: EngineConfig, server: ServerConfig) -> EngineConfig:
    """The engine that serves both ports: a gateway may ask what its cache holds. Raises ConfigError where the packages
    for it are missing."""
    if server.grpc_port is None:
        return engine
    _listener()
    return msgspec.structs.replace(engine, cache=msgspec.structs.replace(engine.cache, events=True))


@contextlib.asynccontextmanager
async def gateways_served(
    served: Served, reserved: socket.socket | None, url_of: Callable[[int], str]
) -> AsyncIterator[GrpcPort]:
    """The port that `reserved` holds, served while inside. Raises PortInUseError."""
    if reserved is None:
        yield GrpcPort(None, None)
        return
    port = reserved.getsockname()[1]
    reserved.close()
    listener = await _listener().start(served, served.config.host, port)
    try:
        yield GrpcPort(listener, url_of(listener.port))
    finally:
        await listener.stop(0.0)


class GrpcPort:
    """The open port, or none. url: where gateways find it."""

    def __init__(self, listener: GrpcListener | None, url: str | None) -> None:
        self._listener = listener
        self._dropping: asyncio.Future[None] | None = None
        self.url = url

    async def drain(self, grace_s: float) -> None:
        """Take no more calls, and wait for those that run, at most so long."""
        if self._listener is not None:
            await self._listener.stop(grace_s)

    def drop(self) -> None:
        """Wait for calls no longer."""
        if self._listener is not None:
            self._dropping = asyncio.ensure_future(self._listener.stop(0.0))


def _listener() -> type[GrpcListener]:
    try:
        from tokenspeed.server.grpc.listener import GrpcListener
    except ImportError as error:
        message = f"--grpc-port needs packages that are not installed ({error}): pip install 'tokenspeed[grpc]'"
        raise ConfigError(message) from None
    return GrpcListener
