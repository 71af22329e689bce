# SPDX-License-Identifier: Apache-2.0
"""Typed messages between the API process and the engine and between rank 0 and the other ranks, and their framing on a
stream socket.

A frame is a little-endian uint32 length and a msgpack body. Knows no socket library beyond `socket`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from tokenspeed.core.config import EngineConfig
from tokenspeed.core.plan import Int32Array, Seating, StepPlan
from tokenspeed.core.request import EngineRequest, SamplingParams, SequenceUpdate

FRAME_LEN_MAX = 256 * 1024 * 1024
NUM_RETAINED_MAX = 16_384
"""Ended requests that Retain and Release may still name; the oldest is forgotten, and its pages then go in their own
time."""
STEP_TOKEN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
_HEADER = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message, to the engine and from rank 0 to each other rank: build the engine to this configuration."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request. handle: its short name in Updates, which no other live request has."""

    request: EngineRequest
    handle: int = 0


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


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """What grammars need of the tokenizer; sent once, before the first request that has a grammar. tokens: the bytes of
    each id, none for an id that only pads. special_ids: control tokens. end_ids: those that end a sequence. tokenizer:
    the JSON of a `tokenizers` engine, which cuts forced text into tokens as the model is used to."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    tokenizer: str


class WatchCache(msgspec.Struct, frozen=True, tag=True):
    """Send CacheChanges from now on, or no more. Only to an engine whose cache configuration has events."""

    on: bool


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the engine; running requests are dropped. From rank 0: the replica ends in order."""


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
    """Sent once when the engine can serve. max_num_mixed_prefill_tokens: of prompts, in a step that also decodes.
    weight_bytes: of the parameters of rank 0; packed_bytes: of these, what stays in the blocks of its file."""

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
    max_num_mixed_prefill_tokens: int
    vocab_size: int
    load_s: float
    num_host_blocks: int = 0
    weight_bytes: int = 0
    packed_bytes: int = 0
    kernels: tuple[KernelBinding, ...] = ()


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, or this rank of it. kind: a class name of core.errors.START_ERRORS."""

    kind: str
    message: str
    details: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The engine's counters at one moment, see core.plan.ControlStats. step_tokens: how many steps computed so many
    tokens, by STEP_TOKEN_BOUNDS and above; empty before the first step. num_step_tokens: of all steps."""

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
    step_tokens: tuple[int, ...] = ()
    num_step_tokens: int = 0


class Updates(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """What a step changed. An empty one with no running request is the heartbeat.

    handles, token_ids, counts: the i-th sequence got counts[i] more tokens of token_ids, at least one, or one each
    where counts is empty, and there is no other news of it. They come before `updates`, which holds all other
    sequences. stats: the counters now; None where there is no news but such tokens and they were told a moment ago.
    """

    handles: list[int] = []
    token_ids: list[int] = []
    updates: tuple[SequenceUpdate, ...] = ()
    stats: EngineStats | None = None
    counts: list[int] = []


class CacheChanges(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the prefix index gained and lost since the last such message, in order; the first after WatchCache is empty.

    rows: packed int64, five columns: whether it was stored (1) or removed (0), the place (two tiers a partition), the
    block's hash, its parent's hash, number of tokens; the last two only where it was stored on a device. token_ids:
    packed int32, of all rows. root: the parent of each first block. has_missed: blocks had been stored before the
    watch began, and not all of them can be told.
    """

    root: int
    has_missed: bool = False
    rows: bytes = b""
    token_ids: bytes = b""


class SeatingFields(msgspec.Struct, frozen=True, array_like=True):
    """A core.plan.Seating; token ids are packed little-endian int32."""

    seat: int
    request_id: str
    sampling: SamplingParams
    end_token_ids: tuple[int, ...]
    token_ids: bytes
    prompt_len: int
    forced_token_ids: bytes | None


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run this plan. arrays: those of a core.plan.StepPlan in the order of its fields, packed little-endian int32."""

    step_id: int
    arrays: tuple[bytes, ...]
    seatings: tuple[SeatingFields, ...]

    @classmethod
    def of(cls, plan: StepPlan, seatings: Sequence[Seating]) -> Step:
        """Copies the plan's arrays."""
        arrays = tuple(_packed(getattr(plan, name)) for name in _PLAN_WIDTHS)
        return cls(plan.step_id, arrays, tuple(_seating_fields(seating) for seating in seatings))

    def plan(self) -> StepPlan:
        """The plan; its arrays are read-only."""
        arrays = zip(_PLAN_WIDTHS.items(), self.arrays, strict=True)
        return StepPlan(self.step_id, **{name: _unpacked(data, width) for (name, width), data in arrays})

    def seats(self) -> tuple[Seating, ...]:
        """The seatings; their arrays are read-only."""
        return tuple(_seating(fields) for fields in self.seatings)


_PLAN_WIDTHS: dict[str, int | None] = {
    "rows": 5,
    "token_ids": None,
    "seated": 3,
    "page_delta": 4,
    "zero": 2,
    "copy": 3,
    "load": 4,
    "store": 4,
}
"""Columns of a plan's arrays, None for those of one dimension; in the order of StepPlan's fields."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a rank: who it is, and the token that rank 0 told the ranks."""

    rank: int
    token: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank can run steps. shape: what a plan depends on, in words; the same on all ranks."""

    shape: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The rank has run a step. transfers: (lease, ok) of those that ended and were not told yet."""

    step_id: int
    transfers: tuple[tuple[int, bool], ...] = ()
    fault: bool = False


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Transfers of the rank that ended while no step ran."""

    transfers: tuple[tuple[int, bool], ...]


ToEngine = Start | Vocabulary | Submit | Cancel | Finish | Retain | Release | WatchCache | Shutdown
FromEngine = Progress | EngineInfo | StartFailed | Updates | CacheChanges
ToRank = Start | Step | Shutdown
FromRank = Hello | Ready | StartFailed | Done | Moved
Message = ToEngine | FromEngine | ToRank | FromRank

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode_frame(message: Message) -> bytes:
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


def decode_to_rank(body: bytes | memoryview) -> ToRank:
    """A frame's body, as a rank reads what rank 0 says."""
    message: ToRank = _to_rank.decode(body)
    return message


def decode_from_rank(body: bytes | memoryview) -> FromRank:
    """A frame's body, as rank 0 reads what another rank says."""
    message: FromRank = _from_rank.decode(body)
    return message


class FrameBuffer:
    """Collects bytes as they arrive and yields whole bodies."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add data and yield each body that is now complete."""
        if not self._bytes and len(data) >= _HEADER.size and _HEADER.unpack_from(data)[0] == len(data) - _HEADER.size:
            yield data[_HEADER.size :]  # most often a message comes whole and alone
            return
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


def send(sock: socket.socket, message: Message) -> None:
    """Write one frame to a blocking socket."""
    sock.sendall(encode_frame(message))


def _packed(array: Int32Array) -> bytes:
    return array.astype("<i4", copy=False).tobytes()


def _unpacked(data: bytes, width: int | None = None) -> Int32Array:
    flat = np.frombuffer(data, "<i4").astype(np.int32, copy=False)
    return flat if width is None else flat.reshape(-1, width)


def _seating_fields(seating: Seating) -> SeatingFields:
    forced = seating.forced_token_ids
    return SeatingFields(
        seat=seating.seat,
        request_id=seating.request_id,
        sampling=seating.sampling,
        end_token_ids=seating.end_token_ids,
        token_ids=_packed(seating.token_ids),
        prompt_len=seating.prompt_len,
        forced_token_ids=None if forced is None else _packed(forced),
    )


def _seating(fields: SeatingFields) -> Seating:
    forced = fields.forced_token_ids
    return Seating(
        seat=fields.seat,
        request_id=fields.request_id,
        sampling=fields.sampling,
        end_token_ids=fields.end_token_ids,
        token_ids=_unpacked(fields.token_ids),
        prompt_len=fields.prompt_len,
        forced_token_ids=None if forced is None else _unpacked(forced),
    )
