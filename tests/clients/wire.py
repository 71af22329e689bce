# SPDX-License-Identifier: Apache-2.0
"""What went over the wire: a relay on loopback that passes every byte on as it is and keeps it, and the HTTP/1.1
exchanges read from what was kept. Knows no dialect.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer. start_s, end_s: when the request's first and the answer's last byte passed."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    answer_headers: dict[str, str]
    answer: bytes
    start_s: float
    end_s: float

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """The data of the answer's events; a plain JSON answer is one event."""
        if "event-stream" not in self.answer_headers.get("content-type", ""):
            return [json.loads(self.answer)]
        lines = self.answer.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@dataclass(slots=True)
class _Bytes:
    """One direction of a connection: the bytes, and when each piece of them came."""

    data: bytearray = field(default_factory=bytearray)
    times: list[tuple[int, float]] = field(default_factory=list)

    def add(self, piece: bytes) -> None:
        self.data += piece
        self.times.append((len(self.data), time.monotonic()))

    def time_of(self, offset: int) -> float:
        """When the byte at this offset came."""
        return next(when for end, when in self.times if end > offset)


class Relay:
    """Listens on a port of its own and passes everything to `port`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._connections: list[tuple[_Bytes, _Bytes]] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def exchanges(self) -> list[Exchange]:
        """All that were answered, in the order in which they began."""
        found = [exchange for asked, answered in list(self._connections) for exchange in _exchanges(asked, answered)]
        return sorted(found, key=lambda exchange: exchange.start_s)

    def close(self) -> None:
        """Ends every connection and takes no more."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._sockets += [client, server]
            asked, answered = _Bytes(), _Bytes()
            self._connections.append((asked, answered))
            for source, sink, kept in ((client, server, asked), (server, client, answered)):
                threading.Thread(target=_pass_on, args=(source, sink, kept), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket, kept: _Bytes) -> None:
    """Until the source ends; then the sink is told so."""
    with contextlib.suppress(OSError):
        while piece := source.recv(_READ_BYTES):
            kept.add(piece)
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@dataclass(frozen=True, slots=True)
class _Message:
    """A request or an answer, and where it lies in the bytes."""

    first: str
    headers: dict[str, str]
    body: bytes
    start: int
    end: int


def _exchanges(asked: _Bytes, answered: _Bytes) -> Iterator[Exchange]:
    requests = list(_messages(bytes(asked.data), []))
    methods = [request.first.split()[0] for request in requests]
    for request, answer in zip(requests, _messages(bytes(answered.data), methods), strict=False):
        method, path, _ = request.first.split()
        yield Exchange(
            method,
            path,
            request.headers,
            request.body,
            int(answer.first.split()[1]),
            answer.headers,
            answer.body,
            asked.time_of(request.start),
            answered.time_of(answer.end - 1),
        )


def _messages(data: bytes, methods: list[str]) -> Iterator[_Message]:
    """Whole messages. methods: of the requests that these answer, since those to HEAD have no body."""
    start = number = 0
    while (head_end := data.find(b"\r\n\r\n", start)) >= 0:
        first, *lines = data[start:head_end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        is_head = number < len(methods) and methods[number] == "HEAD"
        if is_head:
            body, end = b"", head_end + 4
        elif headers.get("transfer-encoding") == "chunked":
            body, end = _unchunked(data, head_end + 4)
        else:
            end = head_end + 4 + int(headers.get("content-length", 0))
            body = data[head_end + 4 : end]
        if end > len(data):
            return
        yield _Message(first, headers, body, start, end)
        start, number = end, number + 1


def _unchunked(data: bytes, start: int) -> tuple[bytes, int]:
    """(body, where it ends); the end is past the data when the last chunk is missing."""
    body = b""
    while (line_end := data.find(b"\r\n", start)) >= 0:
        size = int(data[start:line_end].split(b";")[0], 16)
        body += data[line_end + 2 : line_end + 2 + size]
        start = line_end + 2 + size + 2
        if size == 0:
            return body, start
    return body, len(data) + 1
