# SPDX-License-Identifier: Apache-2.0
"""Messages arrive as they were sent, in whatever pieces the stream cuts them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tokenspeed.core.config import CacheConfig, EngineConfig, ParallelConfig
from tokenspeed.core.ipc import (
    Done,
    EngineStats,
    FrameBuffer,
    FromEngine,
    FromRank,
    Hello,
    Moved,
    Ready,
    Release,
    Retain,
    Shutdown,
    Start,
    StartFailed,
    Step,
    Submit,
    ToEngine,
    ToRank,
    Updates,
    decode_from_engine,
    decode_from_rank,
    decode_to_engine,
    decode_to_rank,
    encode_frame,
)
from tokenspeed.core.plan import Seating, StepPlan
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
    message: FromEngine = Updates(stats=STATS)
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


@pytest.mark.parametrize(
    "message",
    [Start(EngineConfig(parallel=ParallelConfig(tp=2))), Shutdown()],
    ids=lambda message: type(message).__name__,
)
def test_what_a_rank_is_told(message: ToRank) -> None:
    (body,) = FrameBuffer().feed(encode_frame(message))
    assert decode_to_rank(body) == message


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "token"),
        Ready("shape"),
        StartFailed("ConfigError", "no", "where"),
        Done(7, ((1, True), (2, False)), True),
        Moved(((3, True),)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_a_rank_says(message: FromRank) -> None:
    (body,) = FrameBuffer().feed(encode_frame(message))
    assert decode_from_rank(body) == message


WIDTHS = {"rows": 5, "seated": 3, "page_delta": 4, "zero": 2, "copy": 3, "load": 4, "store": 4}


def plan_of(num_rows: int) -> StepPlan:
    """Every array has other numbers, and num_rows rows."""
    arrays, start = {}, -2_000_000_000
    for name in StepPlan.__struct_fields__[1:]:
        width = WIDTHS.get(name, 1)
        flat = np.arange(start, start + num_rows * width, dtype=np.int32)
        arrays[name] = flat if name == "token_ids" else flat.reshape(num_rows, width)
        start += 1_000
    return StepPlan(11, **arrays)


def sent(step: Step) -> Step:
    (body,) = FrameBuffer().feed(encode_frame(step))
    received = decode_to_rank(body)
    assert isinstance(received, Step)
    return received


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_a_plan_arrives_exactly(num_rows: int) -> None:
    plan = plan_of(num_rows)
    arrived = sent(Step.of(plan, ())).plan()
    assert arrived.step_id == 11
    for name in StepPlan.__struct_fields__[1:]:
        ours, theirs = getattr(plan, name), getattr(arrived, name)
        assert theirs.dtype == np.int32 and theirs.shape == ours.shape, name
        assert (theirs == ours).all(), name


def test_a_plan_that_was_sent_does_not_change_with_the_buffers_it_came_from() -> None:
    plan = plan_of(2)
    step = Step.of(plan, ())
    plan.rows[:] = 0
    assert (step.plan().rows == plan_of(2).rows).all()


@pytest.mark.parametrize("forced", [None, [], [5, 6]])
def test_a_seating_arrives_exactly(forced: list[int] | None) -> None:
    sampling = SamplingParams(temperature=0.5, seed=2**63, logit_bias=((3, -1.5),))
    forced_token_ids = None if forced is None else np.array(forced, np.int32)
    seating = Seating(3, "r", sampling, (1, 2), np.array([1, 2**31 - 1], np.int32), 1, forced_token_ids)
    (arrived,) = sent(Step.of(plan_of(0), (seating,))).seats()
    assert dataclasses.replace(arrived, token_ids=0, forced_token_ids=0) == dataclasses.replace(  # type: ignore[arg-type]
        seating, token_ids=0, forced_token_ids=0
    )
    assert arrived.token_ids.tolist() == [1, 2**31 - 1]
    assert (None if arrived.forced_token_ids is None else arrived.forced_token_ids.tolist()) == forced
