# SPDX-License-Identifier: Apache-2.0
"""Serves one model until told to stop: address first, then the engine, then HTTP, then an orderly end.

Knows signals, sockets and the HTTP server; knows no dialect.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import uvicorn

from tokenspeed.core.config import EngineConfig, ServerConfig, launched_rank
from tokenspeed.core.errors import ConfigError, PortInUseError, StartError
from tokenspeed.core.ipc import EngineInfo
from tokenspeed.llm.async_llm import AsyncLLM
from tokenspeed.server.app import create_app, served_name
from tokenspeed.server.http import DRAIN_S, http_config, run
from tokenspeed.server.supervisor import EngineEndedError, RestartPolicy, supervise

ProgressFn = Callable[[str, int, int, str], None]

_BACKLOG = 2048
_PORT_MAX = 65535
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """How to serve. announce is called once with the banner when requests can come. restarts: what is done about an
    engine that dies, unless a launcher started the ranks."""

    engine: EngineConfig
    server: ServerConfig
    progress: ProgressFn | None
    announce: Callable[[str], None]
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


def serve(serving: Serving) -> int:
    """Serve until SIGINT or SIGTERM; 0 after an orderly end, 128 + signal when still loading.

    Raises StartError: PortInUseError before anything is loaded, EngineEndedError when the engine dies and
    starting it again is no use.
    """
    with contextlib.closing(bind(serving.server.host, serving.server.port)) as sock:
        return run(_serve(serving, sock))


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises PortInUseError or ConfigError."""
    if not 0 <= port <= _PORT_MAX:
        raise ConfigError(f"--host {host} --port {port}: a port is 0 to {_PORT_MAX}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ConfigError(
            f"--host {host} --port {port}: no such address; use a name or address of this machine"
        ) from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error) from None
    return sock


def _host_tier(info: EngineInfo) -> tuple[tuple[str, str], ...]:
    if info.num_host_blocks == 0:
        return ()
    num_tokens = info.num_host_blocks * info.block_size
    return (("host tier", f"{num_tokens:,} tokens in {info.num_host_blocks:,} blocks"),)


def banner(info: EngineInfo, name: str, address: str) -> str:
    """What a user wants to know when serving begins."""
    kv_tokens = info.num_kv_blocks * info.block_size
    rows = (
        ("model", f"{name} ({info.model_type}, {_parameters(info.num_parameters)} parameters)"),
        ("device", f"{info.device}, {info.dtype}, {info.num_threads} threads"),
        ("KV cache", f"{kv_tokens:,} tokens in {info.num_kv_blocks:,} blocks, {info.kv_bytes / 2**20:,.0f} MiB"),
        *_host_tier(info),
        (
            "context",
            f"{info.max_model_len:,} tokens, up to {info.max_num_seqs} requests at once",
        ),
        ("step", f"up to {info.max_num_batched_tokens} tokens"),
        ("loaded in", f"{info.load_s:.1f} s"),
        ("address", address),
    )
    lines = [f"  {label:<10} {text}" for label, text in rows]
    return "\n".join(["TokenSpeed is ready", *lines, "Press Ctrl-C to stop."])


def address_of(sock: socket.socket, host: str) -> str:
    """The URL under which the socket is reached."""
    port = sock.getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the engine has to end in order too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield


async def _serve(serving: Serving, sock: socket.socket) -> int:
    stop = _StopSignals()
    loading = asyncio.ensure_future(AsyncLLM.start(serving.engine, serving.progress))
    if not await stop.is_first(loading):
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return 128 + stop.number
    llm = loading.result()
    try:
        await _serve_http(serving, sock, llm, stop)
    finally:
        await llm.shutdown()
    return 0


async def _serve_http(serving: Serving, sock: socket.socket, llm: AsyncLLM, stop: _StopSignals) -> None:
    try:
        sock.listen(_BACKLOG)
    except OSError as error:  # another program may have come first while the model was loading
        raise _bind_error(serving.server.host, serving.server.port, error) from None
    server = _Server(http_config(create_app(llm, serving.server)))
    serving.announce(banner(llm.info, served_name(llm), address_of(sock, serving.server.host)))
    http = asyncio.ensure_future(server.serve(sockets=[sock]))
    lost = asyncio.ensure_future(_until_lost(llm, serving.restarts))
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({http, lost, asked}, return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        _log.info("stopping; running requests have %d s to finish, press Ctrl-C again to drop them", DRAIN_S)
        stop.on_second(lambda: setattr(server, "force_exit", True))
    server.should_exit = True
    for task in (lost, asked):
        task.cancel()
    await http
    (end, _) = await asyncio.gather(lost, asked, return_exceptions=True)
    if isinstance(end, Exception):  # not a cancellation
        raise end


async def _until_lost(llm: AsyncLLM, restarts: RestartPolicy) -> NoReturn:
    """Raises EngineEndedError when there is no engine and will be none. Ranks that a launcher started cannot be started
    again from here: their server ends with them."""
    if launched_rank() is None:
        await supervise(llm, restarts)
    raise EngineEndedError(f"the engine has ended, and the server with it: {await llm.wait_death()}")


class _StopSignals:
    """SIGINT and SIGTERM as something to wait for."""

    def __init__(self) -> None:
        self.number = 0
        self._asked = asyncio.Event()
        self._again: Callable[[], None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._came, number)

    async def wait(self) -> None:
        """Until the first signal."""
        await self._asked.wait()

    async def is_first(self, task: asyncio.Future[AsyncLLM]) -> bool:
        """Whether `task` ended before a signal came."""
        asked = asyncio.ensure_future(self.wait())
        both: set[asyncio.Future[Any]] = {task, asked}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        return task.done()

    def on_second(self, call: Callable[[], None]) -> None:
        """What a second signal does."""
        self._again = call

    def _came(self, number: int) -> None:
        if self._asked.is_set() and self._again is not None:
            self._again()
        self.number = number
        self._asked.set()


def _bind_error(host: str, port: int, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"{host}:{port} is in use; stop the other program, or pass --port N (0 picks a free one)")
    return ConfigError(f"--host {host} --port {port}: cannot listen there ({error.strerror}); use another address")


def _parameters(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
