# SPDX-License-Identifier: Apache-2.0
"""An engine without a model for bench/server.py: it takes requests and sends the frames that it is told to."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from tokenspeed.core.ipc import EngineInfo, EngineStats, Start, Submit, Updates, encode_frame
from tokenspeed.core.request import FinishReason, SequenceUpdate
from tokenspeed.engine.channel import Channel

STATS = EngineStats(num_running=256, used_blocks=4096, total_blocks=65536, generated_tokens=1_000_000, num_steps=10_000)


def info() -> EngineInfo:
    """A model with a long context."""
    return EngineInfo(
        model_type="stand-in",
        num_parameters=1,
        device="cpu",
        dtype="float32",
        num_threads=1,
        block_size=16,
        num_kv_blocks=65536,
        kv_bytes=1,
        max_model_len=262_144,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_num_mixed_prefill_tokens=1024,
        vocab_size=49_152,
        load_s=0.0,
    )


def tokens_message(handles: Sequence[int], token_ids: Sequence[int]) -> Updates:
    """What a step of decoding says: equally many tokens for each sequence."""
    num_each = len(token_ids) // len(handles)
    counts = [num_each] * len(handles) if num_each > 1 else []
    return Updates(handles=list(handles), token_ids=list(token_ids), counts=counts)


class StandIn:
    """The engine's end of the stream."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel = Channel(sock)
        self._submits: list[Submit] = []
        (start,) = self._channel.receive(60.0)
        assert isinstance(start, Start)
        self._channel.send(info())

    def take(self, num_requests: int) -> None:
        """Wait for so many requests."""
        deadline = time.monotonic() + 60.0
        while len(self._submits) < num_requests:
            assert time.monotonic() < deadline, f"{len(self._submits)} of {num_requests} requests came"
            messages = self._channel.receive(1.0)
            self._submits += [message for message in messages if isinstance(message, Submit)]

    def prompt_len(self) -> int:
        """Tokens of the last request."""
        return len(self._submits[-1].request.token_ids) // 4

    def forget(self) -> None:
        """The requests have ended."""
        self._submits.clear()

    def step_frame(self, ids: Sequence[int], step: int, num_tokens: int) -> bytes:
        """num_tokens tokens more for each request, which begins at its own place in `ids`."""
        token_ids = [
            ids[(index * 7 + step * num_tokens + place) % len(ids)]
            for index in range(len(self._submits))
            for place in range(num_tokens)
        ]
        return encode_frame(tokens_message([submit.handle for submit in self._submits], token_ids))

    def end_frame(self) -> bytes:
        """All requests end."""
        updates = [
            SequenceUpdate(request_id=submit.request.request_id, finish_reason=FinishReason.LENGTH)
            for submit in self._submits
        ]
        return encode_frame(Updates(updates=tuple(updates), stats=STATS))

    def send(self, frame: bytes) -> None:
        """Say it."""
        self._channel.send_frame(frame)

    def close(self) -> None:
        """The API process sees the end of the stream."""
        self._channel.close()
