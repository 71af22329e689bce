# SPDX-License-Identifier: Apache-2.0
"""The gRPC server itself: its port, the standard health and reflection services beside ours, and an orderly end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import tokenspeed_scheduler_pb2_grpc as scheduler_grpc

from tokenspeed.core.errors import PortInUseError
from tokenspeed.server.app import health_problem
from tokenspeed.server.grpc.cache_feed import CacheFeed
from tokenspeed.server.grpc.service import SERVICE_NAME, SchedulerService
from tokenspeed.server.served import Served

_HEALTH_EVERY_S = 1.0


class GrpcListener:
    """A running server. All methods belong to the loop that started it."""

    def __init__(self, server: Any, checks: Any, feed: CacheFeed | None, served: Served, port: int) -> None:
        self.port = port
        self._server = server
        self._checks = checks
        self._feed = feed
        self._watching = asyncio.ensure_future(_watch_health(checks, served))

    @classmethod
    async def start(cls, served: Served, host: str, port: int) -> GrpcListener:
        """Listen there; port 0 takes a free one. Raises PortInUseError."""
        options = (
            ("grpc.so_reuseport", 0),  # or a second server would share the port unnoticed
            ("grpc.max_receive_message_length", served.config.body_bytes_max),
            ("grpc.max_send_message_length", -1),
        )
        server = grpc.aio.server(options=options)
        cache = served.llm.config.cache
        feed = CacheFeed(served.llm, served.llm.info.block_size) if cache.events and cache.prefix_caching else None
        checks = health.aio.HealthServicer()
        scheduler_grpc.add_TokenSpeedSchedulerServicer_to_server(SchedulerService(served, feed), server)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            raise PortInUseError(
                f"{host}:{port} is in use; stop the other program, or pass --grpc-port N (0 picks a free one)"
            ) from None
        await server.start()
        return cls(server, checks, feed, served, bound)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that run have grace_s seconds to finish. Idempotent."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._checks.enter_graceful_shutdown()
        if self._feed is not None:
            self._feed.close()
        await self._server.stop(grace_s)


async def _watch_health(checks: Any, served: Served) -> None:
    """Keeps what the standard health service says true."""
    while True:
        is_well = health_problem(served) is None
        status = health_pb2.HealthCheckResponse.SERVING if is_well else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await checks.set(name, status)
        await asyncio.sleep(_HEALTH_EVERY_S)
