# SPDX-License-Identifier: Apache-2.0
"""Whole messages in and out of a stream that cuts where it likes."""

from __future__ import annotations

import socket
import time

import pytest

from tokenspeed.core.ipc import Cancel, EngineStats, Updates, encode_frame
from tokenspeed.engine.channel import Channel, ChannelClosedError


def test_messages_arrive_whole_however_they_are_cut() -> None:
    frames = encode_frame(Cancel("first")) + encode_frame(Cancel("second"))
    for size in (1, 5, len(frames)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            channel, messages = Channel(theirs), []
            for begin in range(0, len(frames), size):
                ours.sendall(frames[begin : begin + size])
                messages += channel.receive(0.0)
            assert messages == [Cancel("first"), Cancel("second")]


def test_receive_waits_no_longer_than_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
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
        channel.send(Updates(stats=EngineStats()))
    channel.close()


def test_what_a_peer_said_before_it_went_is_received() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    ours.sendall(encode_frame(Cancel("last words")))
    ours.close()
    assert channel.receive(1.0) == [Cancel("last words")]
    with pytest.raises(ChannelClosedError):
        channel.receive(1.0)
    channel.close()
