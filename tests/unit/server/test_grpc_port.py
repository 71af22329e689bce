# SPDX-License-Identifier: Apache-2.0
"""The second port: asked for or not, taken, without its packages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from typing import Any

import pytest

from tokenspeed.core.config import EngineConfig, ServerConfig
from tokenspeed.core.errors import ConfigError, PortInUseError
from tokenspeed.server.grpc.listener import GrpcListener
from tokenspeed.server.grpc_port import gateways_served, with_events
from tokenspeed.server.serve import bind


def test_only_a_server_that_asks_for_it_has_events() -> None:
    engine = EngineConfig()
    assert with_events(engine, ServerConfig()) is engine
    assert with_events(engine, ServerConfig(grpc_port=0)).cache.events


def test_missing_packages_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenspeed.server.grpc.listener", None)
    with pytest.raises(ConfigError, match=r"pip install 'tokenspeed\[grpc\]'"):
        with_events(EngineConfig(), ServerConfig(grpc_port=0))


def test_without_the_flag_nothing_of_grpc_is_imported() -> None:
    code = "import sys, tokenspeed.server.serve; print([name for name in sys.modules if name.split('.')[0] == 'grpc'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_port_in_use_is_named_with_its_flag() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is in use.*--grpc-port N"):
            bind("127.0.0.1", port, "--grpc-port")


def test_two_servers_never_share_a_port(shared: Any) -> None:
    served = shared.app.state.served

    async def run() -> None:
        first = await GrpcListener.start(served, "127.0.0.1", 0)
        try:
            with pytest.raises(PortInUseError, match="--grpc-port N"):
                await GrpcListener.start(served, "127.0.0.1", first.port)
        finally:
            await first.stop(0.0)

    asyncio.run(run())


def test_the_port_is_served_while_inside_and_may_be_drained_twice(shared: Any) -> None:
    async def run() -> None:
        reserved = bind("127.0.0.1", 0, "--grpc-port")
        port = reserved.getsockname()[1]
        async with gateways_served(shared.app.state.served, reserved, lambda at: f"grpc://here:{at}") as grpc_port:
            assert grpc_port.url == f"grpc://here:{port}"
            socket.create_connection(("127.0.0.1", port), timeout=10.0).close()
            await grpc_port.drain(0.1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=10.0)
        async with gateways_served(shared.app.state.served, None, str) as none:
            assert none.url is None
            await none.drain(0.1)

    asyncio.run(run())
