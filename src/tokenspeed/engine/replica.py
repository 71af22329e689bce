# SPDX-License-Identifier: Apache-2.0
"""The ranks of a replica, as rank 0 owns them: starts those of this machine, meets all, watches, ends them.

Knows processes, sockets and the order in which ranks start; does not know steps or what a rank computes.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from tokenspeed.core.config import EngineConfig, LaunchedRank, child_environment, launched_rank
from tokenspeed.core.errors import ConfigError, StartError
from tokenspeed.core.ipc import Shutdown, Start
from tokenspeed.engine import meeting
from tokenspeed.engine.channel import ChannelClosedError
from tokenspeed.engine.failures import say, start_error
from tokenspeed.engine.lane import Lane
from tokenspeed.engine.meeting import ControlSocket, Host, Join, Place
from tokenspeed.engine.process import describe_exit, leave
from tokenspeed.engine.transfers import TransferLedger
from tokenspeed.engine.watch import Follower, Loss, Watchdog

if TYPE_CHECKING:
    from tokenspeed.kernels.ops.collective import Communicator

T = TypeVar("T")
FOLLOWER_COMMAND = (sys.executable, "-P", "-m", "tokenspeed.engine.follower")
_CAUSE_WAIT_S = 2.0
_END_GRACE_S = 2.0
_LAST_WORDS_S = 1.0


class ReplicaLostError(Exception):
    """A rank is lost, and the replica with it."""


class Replica:
    """Make it, `meet`, `create` rank 0's part, `arm`, and `close` it in the end, whatever became of it. One thread,
    apart from `end`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        host: Host = meeting.host,
        join: Join = meeting.join,
        command: Sequence[str] = FOLLOWER_COMMAND,
        leave: Callable[[int], object] = leave,
    ) -> None:
        """Raises ConfigError when a launcher has started another number of ranks."""
        self.config = config
        self.num_ranks = config.parallel.num_ranks
        self.ledger = TransferLedger(self.num_ranks)
        self.followers: tuple[Follower, ...] = ()
        self._launched = _checked(launched_rank(), config)
        self._host, self._join, self._command, self._leave = host, join, command, leave
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._communicator: Communicator | None = None
        self._watchdog: Watchdog | None = None
        self._lane = Lane("rank-0")
        self._ending, self._has_ended = threading.Lock(), False

    @property
    def watchdog(self) -> Watchdog:
        """It watches from the meeting on."""
        assert self._watchdog is not None, "the ranks have not met"
        return self._watchdog

    @property
    def num_local_ranks(self) -> int:
        """Ranks that share this machine."""
        return self.num_ranks if self._launched is None else self._launched.local_world_size

    def meet(self, share: Callable[[EngineConfig, int], EngineConfig] = lambda config, _: config) -> EngineConfig:
        """Start the other ranks and meet them; the configuration that each has got, which is
        share(config, ranks that share a machine). Raises StartError when one of them dies meanwhile."""
        store, address = None, None
        if self._launched is None:
            store, address = self._host()
            for rank in range(1, self.num_ranks):
                self._processes[rank] = self._spawn(rank, address)
        place = Place(0, self.num_ranks, 0, address, self.config.device, store)
        communicator = self._run(lambda: self._join(place), self._check_processes)
        self._communicator = communicator
        with contextlib.closing(ControlSocket(self._launched)) as control:
            self._run(lambda: communicator.gather(control.invitation), self._check_processes)
            streams = control.accept(self.num_ranks, self._check_processes)
        self.followers = tuple(Follower(rank, streams[rank], self._processes.get(rank)) for rank in sorted(streams))
        self._watchdog = Watchdog(self.followers, self.ledger, self.config.parallel.rank_timeout_s)
        self._watchdog.start()
        config = share(self.config, self.num_local_ranks)
        for follower in self.followers:
            with contextlib.suppress(ChannelClosedError):  # the watchdog tells
                follower.stream.send(Start(config))
        return config

    def create(self, build: Callable[[Communicator], T], shape: Callable[[T], str]) -> T:
        """What rank 0 builds while the others build theirs. Raises the StartError that any of them met, and one when
        the shapes differ."""
        communicator = self._communicator
        assert communicator is not None, "the ranks have not met"
        built = self._run(lambda: build(communicator), self._check_loss)
        shapes = self.watchdog.wait_shapes()
        self._check_loss()
        for rank, other in (shapes or {}).items():
            if other != shape(built):
                raise StartError(f"rank {rank} has {other}, but rank 0 has {shape(built)}; give --kv-tokens")
        return built

    def arm(self) -> None:
        """The ranks serve: from now on a loss ends this process."""
        self.watchdog.arm(self.end)
        if self.watchdog.loss is not None:
            self.end(self.watchdog.loss)

    def give_up(self, message: str) -> NoReturn:
        """End the process, with what the watchdog sees in the next moments or else this message."""
        loss = self.watchdog.wait_loss(_CAUSE_WAIT_S) or Loss(message)
        self.end(loss)
        raise ReplicaLostError(loss.message)

    def end(self, loss: Loss) -> None:
        """Say it, kill the ranks of this machine and leave, whatever other threads wait for. Any thread; the first has
        its say, and further ones wait for the end."""
        with self._ending:
            if not self._has_ended:
                _say_if_heard(loss.message)
                self._kill()
                self._await_ends()
                self._leave(1)
                self._has_ended = True

    def close(self, *, in_order: bool) -> None:
        """End the other ranks: in order, when none of them is in a step, or at once. Idempotent."""
        if self._watchdog is not None:
            self._watchdog.close()
        if in_order:
            for follower in self.followers:
                with contextlib.suppress(ChannelClosedError):
                    follower.stream.send(Shutdown())
            self._await_ends()
        self._kill()
        for process in self._processes.values():
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if in_order and self._communicator is not None:
            self._communicator.close()  # else another thread may be in it
        for follower in self.followers:
            follower.stream.close()
        self._lane.close()

    def _spawn(self, rank: int, address: str) -> subprocess.Popen[bytes]:
        device = self.config.device
        place = ["--rank", str(rank), "--ranks", str(self.num_ranks), "--address", address, "--device", device.device]
        kernels = [word for op, solution in device.kernel_overrides for word in ("--kernel", f"{op}={solution}")]
        return subprocess.Popen(
            [*self._command, *place, *kernels],
            env=child_environment(device.num_threads),
            stdin=subprocess.PIPE,  # its end tells the rank that we have gone
            process_group=0,
        )

    def _run(self, work: Callable[[], T], check: Callable[[], None]) -> T:
        """The work's result. A rank that is lost ends the waiting, and is the reason where the work fails for it."""
        try:
            return self._lane.run(work, check)
        except StartError:
            raise
        except Exception:
            deadline = time.monotonic() + _CAUSE_WAIT_S
            while time.monotonic() < deadline:
                check()
                time.sleep(0.02)
            raise

    def _check_processes(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() is not None:
                raise StartError(f"rank {rank} ended {describe_exit(process.returncode)} before it began")

    def _check_loss(self) -> None:
        loss = self.watchdog.loss
        if loss is not None:
            raise start_error(loss.failure) if loss.failure else StartError(f"{loss.message} while starting")

    def _await_ends(self) -> None:
        deadline = time.monotonic() + _END_GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()


def share_of_machine(config: EngineConfig, num_local_ranks: int, num_cores: int, on_cpu: bool) -> EngineConfig:
    """The configuration of each of several ranks on a machine: they share its cores and, without GPUs of their own, its
    memory."""
    num_threads = config.device.num_threads or max(1, num_cores // num_local_ranks)
    fraction = config.cache.memory_fraction
    if on_cpu:
        fraction = (fraction or 0.5) / num_local_ranks
    return msgspec.structs.replace(
        config,
        device=msgspec.structs.replace(config.device, num_threads=num_threads),
        cache=msgspec.structs.replace(config.cache, memory_fraction=fraction),
    )


def _checked(launched: LaunchedRank | None, config: EngineConfig) -> LaunchedRank | None:
    parallel = config.parallel
    if launched is None:
        return None
    if launched.rank > 0:
        raise ConfigError(
            f"a launcher has started this process as rank {launched.rank}, and only rank 0 starts an engine; run "
            "`tokenspeed` itself under the launcher, or a script without one"
        )
    if launched.world_size != parallel.num_ranks:
        raise ConfigError(
            f"the launcher has started {launched.world_size} ranks, but --tp {parallel.tp} times --dp-attention "
            f"{parallel.dp_attention} are {parallel.num_ranks}; make both the same"
        )
    return launched


def _say_if_heard(text: str) -> None:
    """Say it, but for no longer than a moment: a log that nobody reads, or that has gone, must not keep ranks alive."""

    def speak() -> None:
        with contextlib.suppress(OSError, ValueError):
            say(text)

    speaking = threading.Thread(target=speak, name="tokenspeed-last-words", daemon=True)
    speaking.start()
    speaking.join(_LAST_WORDS_S)
