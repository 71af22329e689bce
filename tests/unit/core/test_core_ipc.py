# SPDX-License-Identifier: Apache-2.0
"""Messages arrive as they were sent, in whatever pieces the stream cuts them."""

from __future__ import annotations

import pytest

from tokenspeed.core.config import CacheConfig, EngineConfig
from tokenspeed.core.ipc import (
    EngineStats,
    FrameBuffer,
    FromEngine,
    Release,
    Retain,
    Start,
    Submit,
    ToEngine,
    Updates,
    decode_from_engine,
    decode_to_engine,
    encode_frame,
)
from tokenspeed.core.request import ContentSpan, EngineRequest, Retention, SamplingParams, pack_ids

REQUEST = EngineRequest(
    request_id="r",
    token_ids=pack_ids([1, 2, 3]),
    sampling=SamplingParams(max_tokens=4, seed=1),
    adapter="lora",
    spans=(ContentSpan(0, 2, 2**63, 2**64 - 1),),
    retain=Retention("session", 30.0, -1),
    timeout_s=2.5,
)
STATS = EngineStats(num_held=1, host_used_blocks=2, host_total_blocks=3, loaded_tokens=4, stored_blocks=5)


@pytest.mark.parametrize(
    "message",
    [
        Start(EngineConfig(cache=CacheConfig(host_tokens=64, host_store="pressure"))),
        Submit(REQUEST),
        Retain("r", 1.5),
        Release("r"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_engine_is_told(message: ToEngine) -> None:
    (body,) = FrameBuffer().feed(encode_frame(message))
    assert decode_to_engine(body) == message


def test_what_the_engine_says() -> None:
    message: FromEngine = Updates((), STATS)
    (body,) = FrameBuffer().feed(encode_frame(message))
    assert decode_from_engine(body) == message


@pytest.mark.parametrize("piece_len", [1, 3, 1000])
def test_frames_are_whole_however_they_are_cut(piece_len: int) -> None:
    frames = b"".join(encode_frame(Retain(f"r{number}", 1.0)) for number in range(5))
    buffer = FrameBuffer()
    bodies = [
        body for start in range(0, len(frames), piece_len) for body in buffer.feed(frames[start : start + piece_len])
    ]
    assert [decode_to_engine(body) for body in bodies] == [Retain(f"r{number}", 1.0) for number in range(5)]
