# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a replica find each other: by a communicator, which also carries the address of rank 0's control
socket and the token that a connection must present. Knows neither what is said there nor what ranks compute.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tokenspeed.core.config import DeviceConfig, LaunchedRank
from tokenspeed.core.errors import ConfigError, StartError
from tokenspeed.core.ipc import Hello, decode_from_rank, decode_to_rank, encode_frame
from tokenspeed.engine.channel import Stream

if TYPE_CHECKING:
    from tokenspeed.core.ipc import FromRank, ToRank
    from tokenspeed.kernels.ops.collective import Communicator

JOIN_TIMEOUT_S = 600.0
"""How long a rank waits for others in the communicator: loading may take one much longer than another. Whether ranks
live, and how long a step may take, is watched apart from it."""
_HELLO_BYTES_MAX = 1024
_HELLO_TIMEOUT_S = 1.0
_ACCEPT_EVERY_S = 0.1
_HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place in its replica. address: "host:port" where rank 0 listens for the communicator, None where a
    launcher has set the environment; store: what serves there, on rank 0."""

    rank: int
    num_ranks: int
    local_rank: int
    address: str | None
    device: DeviceConfig
    store: Any = None


M = TypeVar("M")
Host = Callable[[], tuple[Any, str]]
Join = Callable[[Place], "Communicator"]


def host() -> tuple[Any, str]:
    """Open the address where the ranks of this machine meet; before they are started, since they need it."""
    from tokenspeed.kernels.ops.collective import open_store

    return open_store("127.0.0.1:0")


def join(place: Place) -> Communicator:
    """Meet the other ranks; blocks until all are there."""
    import torch

    from tokenspeed.execution import placement
    from tokenspeed.kernels import platform, registry
    from tokenspeed.kernels.ops.collective import Rendezvous

    device = placement.resolve_device(place.device).type
    num_devices = len(platform.describe().cuda_devices)
    if device == "cuda" and place.local_rank >= num_devices:
        raise ConfigError(
            f"rank {place.rank} needs GPU {place.local_rank} of its machine, which has {num_devices}; lower --tp or "
            "--dp-attention, start more nodes, or use --device cpu"
        )
    overrides = dict(place.device.kernel_overrides)
    collective = registry.bind("collective", registry.KernelContext(device, torch.float32, overrides))
    own_device = f"cuda:{place.local_rank}" if device == "cuda" else device
    rendezvous = Rendezvous(place.rank, place.num_ranks, place.address, own_device, JOIN_TIMEOUT_S, store=place.store)
    communicator: Communicator = collective.call(rendezvous)
    return communicator


class ControlSocket:
    """Rank 0's listening socket. invitation: address and token, for the other ranks."""

    def __init__(self, launched: LaunchedRank | None) -> None:
        bound, told = _hosts(launched)
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        self._listener = socket.create_server((bound, 0), family=family)
        self._listener.settimeout(_ACCEPT_EVERY_S)
        self._token = secrets.token_hex(16)
        self.invitation = f"{told}:{self._listener.getsockname()[1]} {self._token}"

    def accept(self, num_ranks: int, check: Callable[[], None]) -> dict[int, Stream[FromRank]]:
        """The streams of ranks 1 to num_ranks - 1. check is called now and then; strangers are turned away."""
        streams: dict[int, Stream[FromRank]] = {}
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while len(streams) < num_ranks - 1:
            check()
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, num_ranks)) - set(streams))
                raise StartError(f"ranks {missing} did not connect to rank 0 within {JOIN_TIMEOUT_S:.0f} s")
            with contextlib.suppress(TimeoutError):
                sock, _ = self._listener.accept()
                rank = self._rank_of(sock)
                if rank is None or rank in streams or not 0 < rank < num_ranks:
                    sock.close()
                    continue
                streams[rank] = _stream(sock, decode_from_rank)
        return streams

    def close(self) -> None:
        """No further rank comes. Idempotent."""
        self._listener.close()

    def _rank_of(self, sock: socket.socket) -> int | None:
        """The rank at the other end; None for whoever does not present the token at once."""
        deadline = time.monotonic() + _HELLO_TIMEOUT_S
        try:
            (length,) = _HEADER.unpack(_read_exactly(sock, _HEADER.size, deadline))
            hello = decode_from_rank(_read_exactly(sock, length, deadline)) if length <= _HELLO_BYTES_MAX else None
        except (OSError, msgspec.DecodeError):
            return None
        if isinstance(hello, Hello) and secrets.compare_digest(hello.token.encode(), self._token.encode()):
            return hello.rank
        return None


def accept_invitation(invitation: str, rank: int) -> Stream[ToRank]:
    """Connect to rank 0's control socket. OSError when nobody listens there."""
    address, token = invitation.split()
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_TIMEOUT_S)
    sock.sendall(encode_frame(Hello(rank, token)))
    return _stream(sock, decode_to_rank)


def _stream(sock: socket.socket, decode: Callable[[bytes], M]) -> Stream[M]:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Stream(sock, decode)


def _read_exactly(sock: socket.socket, length: int, deadline: float) -> bytes:
    """So many bytes. OSError when they have not come by the deadline, however slowly they drip."""
    data = b""
    while len(data) < length:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(length - len(data))
        if not piece:
            raise OSError("end of stream")
        data += piece
    return data


def _hosts(launched: LaunchedRank | None) -> tuple[str, str]:
    """Where to listen, and the host to tell: loopback on one machine, else the interface of the launcher's master
    host; all interfaces where this machine knows that name by its loopback only."""
    if launched is None or launched.world_size == launched.local_world_size:
        return "127.0.0.1", "127.0.0.1"
    host = launched.master_host
    try:
        found = str(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror:
        raise ConfigError(f"the launcher's MASTER_ADDR {host} is no address that this machine knows") from None
    if not ipaddress.ip_address(found).is_loopback or host in (found, "localhost"):
        return found, f"[{found}]" if ":" in found else found
    return "0.0.0.0", host
