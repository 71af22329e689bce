# SPDX-License-Identifier: Apache-2.0
"""Whole messages in and out of a stream that cuts where it likes."""

from __future__ import annotations

import socket
import time

import pytest

from tokenspeed.core.ipc import Cancel, EngineStats, Updates, encode_frame
from tokenspeed.engine.channel import Channel, ChannelClosedError


def test_messages_arrive_whole_however_they_are_cut() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    frames = encode_frame(Cancel("first")) + encode_frame(Cancel("second"))
    for begin in range(0, len(frames) - 1, 5):
        ours.sendall(frames[begin : begin + 5])
        if begin == 0:
            assert channel.receive(0.0) == []
    ours.sendall(frames[len(frames) // 5 * 5 :] if len(frames) % 5 == 1 else b"")
    assert channel.receive(1.0) == [Cancel("first"), Cancel("second")]


def test_receive_waits_no_longer_than_told() -> None:
    _ours, theirs = socket.socketpair()
    began = time.monotonic()
    assert Channel(theirs).receive(0.05) == []
    assert 0.04 < time.monotonic() - began < 1.0


def test_a_peer_that_went_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    ours.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(1.0)
    with pytest.raises(ChannelClosedError):
        for _ in range(100):
            channel.send(Updates((), EngineStats()))
