# SPDX-License-Identifier: Apache-2.0
"""Typed messages between the API process and the engine, and their framing on a stream socket.

A frame is a little-endian uint32 length and a msgpack body. Knows no socket library beyond `socket`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import msgspec

from tokenspeed.core.config import EngineConfig
from tokenspeed.core.request import EngineRequest, SequenceUpdate

FRAME_LEN_MAX = 256 * 1024 * 1024
NUM_RETAINED_MAX = 16_384
"""Ended requests that Retain and Release may still name; the oldest is forgotten, and its pages then go in their own
time."""
_HEADER = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: build the engine to this configuration."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client has gone; drop the request in whatever state it is. Unknown ids are ignored."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """A stop string was found: the sequence ends with its first keep_tokens generated tokens."""

    request_id: str
    keep_tokens: int


class Retain(msgspec.Struct, frozen=True, tag=True):
    """Keep the pages of a request that was submitted with a retention for ttl_s seconds from now. May come before its
    end or after it; ids that are unknown, or whose pages have gone, are ignored."""

    request_id: str
    ttl_s: float


class Release(msgspec.Struct, frozen=True, tag=True):
    """Let go of the pages of a request that was submitted with a retention, at its end or after it. Unknown ids are
    ignored."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine; running requests are dropped."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Start-up progress. stage: download, load or warmup; unit: what done and total count."""

    stage: str
    done: int
    total: int
    unit: str = ""


class KernelBinding(msgspec.Struct, frozen=True):
    """Which solution serves an op, and why each other one was passed over."""

    op: str
    solution: str
    passed_over: tuple[tuple[str, str], ...] = ()


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once when the engine can serve."""

    model_type: str
    num_parameters: int
    device: str
    dtype: str
    num_threads: int
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    load_s: float
    num_host_blocks: int = 0
    kernels: tuple[KernelBinding, ...] = ()


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start. kind: a class name of core.errors.START_ERRORS."""

    kind: str
    message: str
    details: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's counters at one moment, see core.plan.ControlStats."""

    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_steps: int = 0
    host_used_blocks: int = 0
    host_total_blocks: int = 0
    loaded_tokens: int = 0
    stored_blocks: int = 0


class Updates(msgspec.Struct, frozen=True, tag=True):
    """What a step changed, and the counters after it. An empty one with no running request is the heartbeat."""

    updates: tuple[SequenceUpdate, ...]
    stats: EngineStats


ToEngine = Start | Submit | Cancel | Finish | Retain | Release | Shutdown
FromEngine = Progress | EngineInfo | StartFailed | Updates

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """One frame, header included."""
    body = _encoder.encode(message)
    assert len(body) <= FRAME_LEN_MAX, f"frame of {len(body)} bytes exceeds {FRAME_LEN_MAX}"
    return _HEADER.pack(len(body)) + body


def decode_to_engine(body: bytes | memoryview) -> ToEngine:
    """A frame's body, as the engine reads it."""
    message: ToEngine = _to_engine.decode(body)
    return message


def decode_from_engine(body: bytes | memoryview) -> FromEngine:
    """A frame's body, as the API process reads it."""
    message: FromEngine = _from_engine.decode(body)
    return message


class FrameBuffer:
    """Collects bytes as they arrive and yields whole bodies."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add data and yield each body that is now complete."""
        self._bytes += data
        while len(self._bytes) >= _HEADER.size:
            (body_len,) = _HEADER.unpack_from(self._bytes)
            assert body_len <= FRAME_LEN_MAX, f"frame of {body_len} bytes exceeds {FRAME_LEN_MAX}"
            end = _HEADER.size + body_len
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_HEADER.size : end])
            del self._bytes[:end]
            yield body


def send(sock: socket.socket, message: ToEngine | FromEngine) -> None:
    """Write one frame to a blocking socket."""
    sock.sendall(encode_frame(message))
