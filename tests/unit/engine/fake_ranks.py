# SPDX-License-Identifier: Apache-2.0
"""Ranks without a model, as real processes: a communicator of plain sockets, and runners that do as they are told.

What a rank is to do is a word "rank:deed", carried where rank 0 can put it: in the name of the model (done while
building), in a kernel override (done instead of joining) and in the id of a request (done in its step). As a program:
a follower, or, after the word `replica`, rank 0 of two ranks that runs steps until it is ended.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from tokenspeed.core.config import DeviceConfig, EngineConfig, ModelConfig, ParallelConfig
from tokenspeed.core.errors import CapacityError
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.plan import RowKind, Seating, StepPlan, StepResult
from tokenspeed.core.request import SamplingParams
from tokenspeed.engine import follower
from tokenspeed.engine.meeting import Place
from tokenspeed.engine.ranks import RanksRunner
from tokenspeed.engine.replica import Replica

FOLLOWER = (sys.executable, str(Path(__file__)))
FOREVER = threading.Event()


class SocketCommunicator:
    """Words only. Rank 0 holds a socket to each other rank, these one to it."""

    def __init__(self, rank: int, world_size: int, socks: Sequence[socket.socket]) -> None:
        self.rank, self.world_size = rank, world_size
        self._socks = socks
        self._files = [sock.makefile("rw") for sock in socks]

    def gather(self, word: str) -> tuple[str, ...]:
        if self.rank > 0:
            self._say(json.dumps(word))
            return tuple(json.loads(self._files[0].readline()))
        words = (word, *(json.loads(file.readline()) for file in self._files))
        self._say(json.dumps(words))
        return words

    def group(self, members: Sequence[Sequence[int]]) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        for file, sock in zip(self._files, self._socks, strict=True):
            file.close()
            sock.close()

    def _say(self, text: str) -> None:
        for file in self._files:
            file.write(f"{text}\n")
            file.flush()


def host() -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


def join(place: Place) -> Any:
    do(dict(place.device.kernel_overrides).get("join", ""), place.rank)
    if place.rank == 0:
        with place.store as listener:
            socks = {}
            while len(socks) < place.num_ranks - 1:
                sock, _ = listener.accept()
                socks[int(sock.recv(1))] = sock
        return SocketCommunicator(0, place.num_ranks, [socks[rank] for rank in sorted(socks)])
    assert place.address is not None
    name, _, port = place.address.rpartition(":")
    sock = socket.create_connection((name, int(port)))
    sock.sendall(str(place.rank).encode())
    return SocketCommunicator(place.rank, place.num_ranks, [sock])


def do(word: str, rank: int) -> str:
    """Do it, if it is this rank's; what is left to the caller to do."""
    who, _, deed = word.partition(":")
    if who != str(rank):
        return ""
    match deed:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang":
            FOREVER.wait()
        case "capacity":
            raise CapacityError("too small by far")
        case "bug":
            raise ZeroDivisionError("a bug")
    return deed


@dataclass(frozen=True)
class Output:
    """As execution.StepOutput."""

    result: StepResult
    transfers: tuple[tuple[int, bool], ...] = ()
    logprobs: tuple[()] = ()
    prompt_logprobs: tuple[()] = ()


@dataclass
class Handle:
    finish: Callable[[], Output]

    def wait(self) -> Output:
        return self.finish()


@dataclass
class DeedRunner:
    """A step's token is its number. Transfers of a step end with it, or at the next poll where the deed says `late`;
    `lose` fails them."""

    rank: int
    info: Any = None
    late: list[tuple[int, bool]] = field(default_factory=list)
    closed: bool = False

    def launch(self, plan: StepPlan, seatings: Sequence[Seating]) -> Handle:
        words = [seating.request_id for seating in seatings]
        if any(do(word.removesuffix("-launch"), self.rank) == "break" for word in words if word.endswith("-launch")):
            raise RuntimeError("cannot launch")
        return Handle(lambda: self._run(plan, [word for word in words if not word.endswith("-launch")]))

    def know(self, vocabulary: Vocabulary) -> None:
        raise AssertionError("no grammar is spoken of here")

    def poll_transfers(self) -> tuple[tuple[int, bool], ...]:
        ended, self.late = tuple(self.late), []
        return ended

    def close(self) -> None:
        self.closed = True

    def _run(self, plan: StepPlan, words: Sequence[str]) -> Output:
        deeds = {do(word, self.rank) for word in words}
        ended = tuple((lease, "lose" not in deeds) for lease in dict.fromkeys(plan.load[:, 0].tolist()))
        if "late" in deeds:
            self.late.extend(ended)
            ended = ()
        token_ids = np.array([plan.step_id], np.int32)
        offsets = np.array([0, 1], np.int32)
        return Output(StepResult(plan.step_id, offsets, token_ids, offsets[:1], fault="fault" in deeds), ended)


def build(config: EngineConfig, communicator: Any) -> tuple[DeedRunner, str]:
    deed = do(config.model.model, communicator.rank)
    return DeedRunner(communicator.rank), "another shape" if deed == "shape" else "the shape"


def config(*, building: str = "", joining: str = "", num_ranks: int = 2, rank_timeout_s: float = 60.0) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=building),
        device=DeviceConfig(device="cpu", kernel_overrides=(("join", joining),) if joining else ()),
        parallel=ParallelConfig(tp=num_ranks, rank_timeout_s=rank_timeout_s),
    )


def step(step_id: int, word: str = "", leases: Sequence[int] = ()) -> tuple[StepPlan, tuple[Seating, ...]]:
    """A plan of one row whose request's id is the word, and its seating."""
    prompt = np.zeros(1, np.int32)
    nothing = [np.zeros((0, width), np.int32) for width in (4, 2, 3)]
    load = np.array([(lease, 0, 1, 1) for lease in leases], np.int32).reshape(-1, 4)
    rows = np.array([[0, RowKind.PREFILL_LAST, 0, 1, 0]], np.int32)
    plan = StepPlan(step_id, rows, prompt, np.zeros((1, 3), np.int32), *nothing, load, np.zeros((0, 4), np.int32))
    return plan, (Seating(0, word, SamplingParams(), (), prompt, 1),)


def new_replica(config: EngineConfig, **options: Any) -> Replica:
    return Replica(config, host=host, join=join, command=FOLLOWER, **options)


def start(replica: Replica) -> RanksRunner:
    """Meet, build, arm."""
    config = replica.meet()
    runner, _ = replica.create(lambda communicator: build(config, communicator), lambda built: built[1])
    replica.arm()
    return RanksRunner(cast("Any", runner), replica)


def run_replica(word: str, rank_timeout_s: float) -> None:
    """Two steps, the second with the word; then whatever the others say."""
    runner = start(new_replica(config(rank_timeout_s=rank_timeout_s)))
    runner.launch(*step(1)).wait()
    print("serving", *(each.process.pid for each in runner._replica.followers if each.process), flush=True)
    runner.launch(*step(2, word)).wait()
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    if sys.argv[1] == "replica":
        run_replica(sys.argv[2], float(sys.argv[3]))
    follower.main(sys.argv[1:], join=join, build=cast("Any", build))
