# SPDX-License-Identifier: Apache-2.0
"""Rank 0's control socket: where it listens, and whom it lets in."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tokenspeed.core.config import LaunchedRank
from tokenspeed.core.errors import ConfigError, StartError
from tokenspeed.core.ipc import Done, Hello, Ready, encode_frame
from tokenspeed.engine.meeting import ControlSocket, accept_invitation


@pytest.fixture
def control() -> Iterator[ControlSocket]:
    control = ControlSocket(None)
    yield control
    control.close()


def call(control: ControlSocket, first_words: bytes) -> socket.socket:
    port = int(control.invitation.split()[0].rpartition(":")[2])
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(first_words)
    return sock


def test_ranks_come_in_any_order(control: ControlSocket) -> None:
    theirs = {rank: accept_invitation(control.invitation, rank) for rank in (2, 1)}
    ours = control.accept(3, lambda: None)
    assert sorted(ours) == [1, 2]
    for rank, stream in theirs.items():
        stream.send(Ready(f"of {rank}"))
        assert ours[rank].receive(10.0) == [Ready(f"of {rank}")]
    for stream in (*theirs.values(), *ours.values()):
        stream.close()


@pytest.mark.parametrize(
    "first_words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\x7f",
        b"\x03\x00\x00\x00abc",
        encode_frame(Hello(1, "a guess")),
        encode_frame(Done(1)),
    ],
    ids=["silence", "http", "huge", "garbage", "wrong token", "no hello"],
)
def test_strangers_are_turned_away(control: ControlSocket, first_words: bytes) -> None:
    stranger = call(control, first_words)
    if not first_words:
        stranger.shutdown(socket.SHUT_WR)
    rank = accept_invitation(control.invitation, 1)
    ours = control.accept(2, lambda: None)
    rank.send(Ready("the rank"))
    assert ours[1].receive(10.0) == [Ready("the rank")]
    stranger.settimeout(10.0)
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    rank.close()
    ours[1].close()


@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_rank_that_is_none_of_ours_is_turned_away(control: ControlSocket, number: int) -> None:
    other, rank = (accept_invitation(control.invitation, each) for each in (number, 1))
    (ours,) = control.accept(2, lambda: None).values()
    rank.send(Ready("ours"))
    assert ours.receive(10.0) == [Ready("ours")]
    for stream in (other, rank, ours):
        stream.close()


def test_a_check_ends_the_waiting(control: ControlSocket) -> None:
    calls = threading.Semaphore(3)

    def check() -> None:
        if not calls.acquire(blocking=False):
            raise StartError("rank 1 ended")

    with pytest.raises(StartError, match="rank 1 ended"):
        control.accept(2, check)


def host_of(control: ControlSocket) -> tuple[str, str]:
    """Where it listens, and which host it tells."""
    bound = control._listener.getsockname()[0]
    told = control.invitation.split()[0].rpartition(":")[0]
    control.close()
    return bound, told


def launched(num_local: int, master_host: str) -> LaunchedRank:
    return LaunchedRank(0, 2, 0, num_local, master_host)


def test_on_one_machine_only_loopback_listens() -> None:
    assert host_of(ControlSocket(None)) == ("127.0.0.1", "127.0.0.1")
    assert host_of(ControlSocket(launched(2, "no.such.host.invalid"))) == ("127.0.0.1", "127.0.0.1")


def test_on_several_machines_the_master_hosts_interface_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_of(ControlSocket(launched(1, "127.0.0.1"))) == ("127.0.0.1", "127.0.0.1")
    found = {"node-0": "127.0.1.1", "far": "127.0.0.2"}

    def look_up(host: str, *_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("ipaddress.IPv4Address.is_loopback", property(lambda address: str(address) == "127.0.1.1"))
    assert host_of(ControlSocket(launched(1, "node-0"))) == ("0.0.0.0", "node-0")
    assert host_of(ControlSocket(launched(1, "far"))) == ("127.0.0.2", "127.0.0.2")


def test_a_master_host_that_nobody_knows_is_told() -> None:
    with pytest.raises(ConfigError, match=r"MASTER_ADDR no\.such\.host\.invalid"):
        ControlSocket(launched(1, "no.such.host.invalid"))
