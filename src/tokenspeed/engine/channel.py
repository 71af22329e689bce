# SPDX-License-Identifier: Apache-2.0
"""The engine's end of the stream: whole messages in, whole messages out. Knows nothing of what they mean."""

from __future__ import annotations

import select
import socket

from tokenspeed.core.ipc import FrameBuffer, FromEngine, ToEngine, decode_to_engine, send

_RECV_BYTES = 1 << 20


class ChannelClosedError(Exception):
    """The API process has gone; nobody is left to serve."""


class Channel:
    """Blocking, one thread. Every method raises ChannelClosedError once the peer has gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._frames = FrameBuffer()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """What has arrived; waits up to timeout_s when nothing has."""
        messages: list[ToEngine] = []
        wait_ms = int(timeout_s * 1000)
        while self._poll.poll(wait_ms):
            messages.extend(decode_to_engine(body) for body in self._frames.feed(self._read()))
            wait_ms = 0
        return messages

    def send(self, message: FromEngine) -> None:
        """Write one message, waiting for the peer to take it."""
        try:
            send(self._sock, message)
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
