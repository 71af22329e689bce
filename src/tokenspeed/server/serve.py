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
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette

from tokenspeed.core.config import EngineConfig, ServerConfig, launched_rank, trace_settings
from tokenspeed.core.errors import ConfigError, EngineDeadError, PortInUseError, StartError
from tokenspeed.core.ipc import EngineInfo
from tokenspeed.llm.async_llm import AsyncLLM, Launch
from tokenspeed.observability.stacks import answer_stacks_signal
from tokenspeed.observability.tracing import Tracer, open_tracer
from tokenspeed.server.app import check_dialect, create_app, served_name
from tokenspeed.server.grpc_port import GrpcPort, gateways_served, with_events
from tokenspeed.server.http import DRAIN_S, FLUSH_S, http_config, run
from tokenspeed.server.responses_store import ResponsesStore, open_store
from tokenspeed.server.served import Patience
from tokenspeed.server.stalls import StallWatch
from tokenspeed.server.supervisor import EngineEndedError, RestartPolicy, supervise

ProgressFn = Callable[[str, int, int, str], None]

_BACKLOG = 2048
_PORT_MAX = 65535
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Serving:
    """How to serve. announce is called once with the banner when requests can come. restarts: what is done about an
    engine that dies, unless a launcher started the ranks. launch: gives the engine, where its process began ahead."""

    engine: EngineConfig
    server: ServerConfig
    progress: ProgressFn | None
    announce: Callable[[str], None]
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    launch: Launch | None = None


def serve(serving: Serving) -> int:
    """Serve until SIGINT or SIGTERM; 0 after an orderly end, 128 + signal when still loading.

    Raises StartError: PortInUseError before anything is loaded, EngineEndedError when the engine dies and
    starting it again is no use.
    """
    server = serving.server.validate()
    check_dialect(server)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(contextlib.closing(bind(server.host, server.port)))
        grpc = None
        if server.grpc_port is not None:
            grpc = stack.enter_context(contextlib.closing(bind(server.host, server.grpc_port, "--grpc-port")))
        store = stack.enter_context(contextlib.closing(open_store(server.store)))
        return run(_serve(serving, sock, grpc, store))


def bind(host: str, port: int, flag: str = "--port") -> socket.socket:
    """A bound TCP socket. flag: which asked for the port. Raises PortInUseError or ConfigError."""
    if not 0 <= port <= _PORT_MAX:
        raise ConfigError(f"--host {host} {flag} {port}: a port is 0 to {_PORT_MAX}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ConfigError(
            f"--host {host} {flag} {port}: no such address; use a name or address of this machine"
        ) from None
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _bind_error(host, port, error, flag) from None
    return sock


def _host_tier(info: EngineInfo) -> tuple[tuple[str, str], ...]:
    if info.num_host_blocks == 0:
        return ()
    num_tokens = info.num_host_blocks * info.block_size
    return (("host tier", f"{num_tokens:,} tokens in {info.num_host_blocks:,} blocks"),)


def _weights(info: EngineInfo) -> tuple[tuple[str, str], ...]:
    """How much is packed and how much is numbers; nothing of a model without weights."""
    if info.weight_bytes == 0:
        return ()
    if info.packed_bytes == 0:
        return (("weights", f"{info.weight_bytes / 2**20:,.0f} MiB in {info.dtype}"),)
    packed_mib, numbers_mib = info.packed_bytes / 2**20, (info.weight_bytes - info.packed_bytes) / 2**20
    return (("weights", f"{packed_mib:,.1f} MiB packed, {numbers_mib:,.1f} MiB in {info.dtype}"),)


def banner(info: EngineInfo, name: str, address: str, grpc_url: str | None = None) -> str:
    """What a user wants to know when serving begins. grpc_url: where gateways are served, if they are."""
    kv_tokens = info.num_kv_blocks * info.block_size
    rows = (
        ("model", f"{name} ({info.model_type}, {_parameters(info.num_parameters)} parameters)"),
        ("device", f"{info.device}, {info.dtype}, {info.num_threads} threads"),
        *_weights(info),
        ("KV cache", f"{kv_tokens:,} tokens in {info.num_kv_blocks:,} blocks, {info.kv_bytes / 2**20:,.0f} MiB"),
        *_host_tier(info),
        (
            "context",
            f"{info.max_model_len:,} tokens, up to {info.max_num_seqs} requests at once",
        ),
        ("step", f"up to {info.max_num_batched_tokens} tokens"),
        ("loaded in", f"{info.load_s:.1f} s"),
        ("address", address),
        *((("gRPC", grpc_url),) if grpc_url else ()),
    )
    lines = [f"  {label:<10} {text}" for label, text in rows]
    return "\n".join(["TokenSpeed is ready", *lines, "Press Ctrl-C to stop."])


def address_of(sock: socket.socket, host: str) -> str:
    """The URL under which the socket is reached."""
    return _url("http", host, sock.getsockname()[1])


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: the engine has to end in order too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield


async def _serve(serving: Serving, sock: socket.socket, grpc: socket.socket | None, store: ResponsesStore) -> int:
    stop = _StopSignals()
    engine = with_events(serving.engine, serving.server)
    loading = asyncio.ensure_future(AsyncLLM.start(engine, serving.progress, launch=serving.launch))
    if not await stop.is_first(loading):
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return 128 + stop.number
    llm = loading.result()
    try:
        async with _observed(llm) as tracer:
            app = create_app(llm, serving.server, tracer=tracer, store=store)
            url_of = partial(_url, "grpc", serving.server.host)
            async with gateways_served(app.state.served, grpc, url_of) as grpc_port:
                await _serve_http(serving, sock, app, grpc_port, stop)
    finally:
        await llm.shutdown()
    return 0


@contextlib.asynccontextmanager
async def _observed(llm: AsyncLLM) -> AsyncIterator[Tracer | None]:
    """Where spans go, while stalls of the engine are watched for."""
    parallel, stall_s = llm.config.parallel, Patience().stall_s
    if parallel.num_ranks > 1:  # the report comes before the replica is given up
        stall_s = min(stall_s, parallel.rank_timeout_s / 2)
    answer_stacks_signal()
    watching = asyncio.ensure_future(StallWatch(llm, stall_s).run())
    tracer = open_tracer(trace_settings(), served_name(llm))
    try:
        yield tracer
    finally:
        watching.cancel()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def _serve_http(
    serving: Serving, sock: socket.socket, app: Starlette, grpc_port: GrpcPort, stop: _StopSignals
) -> None:
    llm = app.state.served.llm
    try:
        sock.listen(_BACKLOG)
    except OSError as error:  # another program may have come first while the model was loading
        raise _bind_error(serving.server.host, serving.server.port, error) from None
    server = _Server(http_config(app))
    address = address_of(sock, serving.server.host)
    serving.announce(banner(llm.info, served_name(llm), address, grpc_port.url))
    http, hurry = asyncio.ensure_future(server.serve(sockets=[sock])), asyncio.Event()
    ready = asyncio.ensure_future(_prepare(llm))
    lost = asyncio.ensure_future(_until_lost(llm, serving.restarts))
    asked = asyncio.ensure_future(stop.wait())
    await asyncio.wait({http, lost, asked}, return_when=asyncio.FIRST_COMPLETED)
    if asked.done():
        _log.info("stopping; running requests have %d s to finish, press Ctrl-C again to drop them", DRAIN_S)
        stop.on_second(partial(_drop, server, grpc_port, hurry))
    server.should_exit = True
    for task in (lost, asked, ready):
        task.cancel()
    ending = asyncio.ensure_future(_end_running(llm, hurry))
    await asyncio.gather(http, grpc_port.drain(DRAIN_S + FLUSH_S))
    ending.cancel()
    (end, _) = await asyncio.gather(lost, asked, return_exceptions=True)
    if isinstance(end, Exception):  # not a cancellation
        raise end


async def _prepare(llm: AsyncLLM) -> None:
    """What the first request with tools or a form would otherwise wait for."""
    if llm.source.script is None:
        with contextlib.suppress(EngineDeadError):
            await llm.prepare_grammars()


async def _end_running(llm: AsyncLLM, hurry: asyncio.Event) -> None:
    """Requests that still run after their time, or once there is a hurry, end with an error, each in its dialect."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(hurry.wait(), DRAIN_S)
    if llm.num_live:
        _log.info("ending %d requests that still run", llm.num_live)
    await llm.shutdown("the server is shutting down")


def _drop(server: _Server, grpc_port: GrpcPort, hurry: asyncio.Event) -> None:
    """Requests that still run are not waited for, but told so."""
    hurry.set()
    asyncio.get_running_loop().call_later(FLUSH_S, _leave, server, grpc_port)


def _leave(server: _Server, grpc_port: GrpcPort) -> None:
    server.force_exit = True
    grpc_port.drop()


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


def _bind_error(host: str, port: int, error: OSError, flag: str = "--port") -> StartError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"{host}:{port} is in use; stop the other program, or pass {flag} N (0 picks a free one)")
    return ConfigError(f"--host {host} {flag} {port}: cannot listen there ({error.strerror}); use another address")


def _parameters(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
