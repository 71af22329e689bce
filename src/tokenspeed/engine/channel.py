# SPDX-License-Identifier: Apache-2.0
"""The engine's ends of its streams: whole messages in, whole messages out. Knows nothing of what they mean."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenspeed.core.ipc import FrameBuffer, Message, ToEngine, decode_to_engine, encode_frame

M = TypeVar("M")
_RECV_BYTES = 1 << 20


class ChannelClosedError(Exception):
    """The peer has gone: the API process, and nobody is left to serve, or another rank."""


class Stream(Generic[M]):
    """Blocking. Receive on one thread; send on any. Every method raises ChannelClosedError once the peer has gone, but
    what it said before is received first."""

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], M]) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decode = decode
        self._frames = FrameBuffer()
        self._sending = threading.Lock()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor, to wait on."""
        return self._sock.fileno()

    def receive(self, timeout_s: float) -> list[M]:
        """What has arrived; waits up to timeout_s when nothing has."""
        messages: list[M] = []
        wait_ms = int(timeout_s * 1000)
        while self._poll.poll(wait_ms):
            try:
                data = self._read()
            except ChannelClosedError:
                if messages:
                    return messages
                raise
            messages.extend(self._decode(body) for body in self._frames.feed(data))
            wait_ms = 0
        return messages

    def send(self, message: Message) -> None:
        """Write one message, waiting for the peer to take it."""
        self.send_frame(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Write a message that is encoded already."""
        try:
            with self._sending:
                self._sock.sendall(frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def close(self) -> None:
        """Let the peer see the end of the stream."""
        self._sock.close()

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(_RECV_BYTES)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of stream")
        return data


class Channel(Stream[ToEngine]):
    """The engine's end of its stream with the API process."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, decode_to_engine)
