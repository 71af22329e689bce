# SPDX-License-Identifier: Apache-2.0
"""A rank other than 0: `python -m tokenspeed.engine.follower …` as rank 0 starts it, or the program under a launcher.

Meets rank 0, builds what it is told, runs the plans that come and answers each. Decides nothing: the configuration and
every step come from rank 0, and with rank 0 it ends. Knows no scheduler and no text.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import DeviceConfig, EngineConfig, LaunchedRank
from tokenspeed.core.ipc import Done, Moved, Ready, Shutdown, Start, StartFailed, Step, ToRank
from tokenspeed.core.plan import Seating, StepPlan
from tokenspeed.engine import meeting
from tokenspeed.engine.channel import ChannelClosedError, Stream
from tokenspeed.engine.failures import one_line, say, set_up_log, start_failed
from tokenspeed.engine.lane import Lane
from tokenspeed.engine.meeting import Join, Place
from tokenspeed.engine.process import leave
from tokenspeed.engine.ranks import shape_of
from tokenspeed.engine.step import StepHandle, leases_of
from tokenspeed.observability.stacks import answer_stacks_signal

if TYPE_CHECKING:
    from tokenspeed.kernels.ops.collective import Communicator

_WAIT_S = 1.0
_TRANSFER_POLL_S = 0.001
_FAREWELL_S = 10.0


class RankRunner(Protocol):
    """Execution, as a rank uses it; see tokenspeed.execution."""

    def launch(self, plan: StepPlan, seatings: Sequence[Seating]) -> StepHandle: ...
    def poll_transfers(self) -> Sequence[tuple[int, bool]]: ...


Build = Callable[[EngineConfig, "Communicator"], tuple[RankRunner, str]]


def main(argv: list[str] | None = None, *, join: Join = meeting.join, build: Build | None = None) -> NoReturn:
    """One rank of those that rank 0 starts on its machine. Its stdin ends when rank 0 goes."""
    parser = argparse.ArgumentParser(prog="tokenspeed.engine.follower")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the replica")
    parser.add_argument("--address", required=True, help="host:port where the ranks meet")
    parser.add_argument("--device", required=True)
    parser.add_argument("--kernel", action="append", default=[], metavar="OP=SOLUTION")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer_stacks_signal()
    threading.Thread(target=_leave_with_parent, name="parent", daemon=True).start()
    overrides = tuple(tuple(text.partition("=")[::2]) for text in options.kernel)
    device = msgspec.convert({"device": options.device, "kernel_overrides": overrides}, DeviceConfig)
    leave(follow(Place(options.rank, options.ranks, options.rank, options.address, device), join=join, build=build))


def follow_launched(launched: LaunchedRank, device: DeviceConfig) -> NoReturn:
    """This process as a rank that a launcher has started. Signals are rank 0's to answer, which has got them too."""
    place = Place(launched.rank, launched.world_size, launched.local_rank, None, device)
    leave(follow(place, on_met=_ignore_signals))


def follow(
    place: Place,
    *,
    join: Join = meeting.join,
    build: Build | None = None,
    on_met: Callable[[], None] = lambda: None,
) -> int:
    """Serve rank 0 until it goes. The exit code: 0 when it ended in order. Threads may be left behind that wait for
    other ranks, see process.leave."""
    lane = Lane(f"rank-{place.rank}")  # all that touches the communicator
    try:
        communicator = lane.run(lambda: join(place), lambda: None)
        invitation = lane.run(lambda: communicator.gather(""), lambda: None)[0]
        stream = meeting.accept_invitation(invitation, place.rank)
    except Exception as error:  # noqa: BLE001 whatever went wrong, there is nobody else to tell it
        say(f"rank {place.rank} could not meet the others: {one_line(error)}")
        return 1
    on_met()
    try:
        return _Rank(stream, lane, communicator, build or _build).run()
    except ChannelClosedError:
        say(f"rank {place.rank} ends, since rank 0 has gone")
        return 1
    except Exception as error:  # noqa: BLE001 a bug ends the rank, and rank 0 sees it end
        say(f"rank {place.rank}: {one_line(error)}")
        return 1
    finally:
        stream.close()


class _Rank:
    """A rank that has met rank 0."""

    def __init__(self, stream: Stream[ToRank], lane: Lane, communicator: Communicator, build: Build) -> None:
        self._stream = stream
        self._lane = lane
        self._communicator = communicator
        self._build = build
        self._early: list[ToRank] = []

    def run(self) -> int:
        """The exit code. Raises ChannelClosedError when rank 0 has gone."""
        config = self._await_start()
        set_up_log(config.debug)
        try:
            runner, shape = self._lane.run(lambda: self._build(config, self._communicator), self._listen)
        except ChannelClosedError:
            raise
        except Exception as error:  # noqa: BLE001 whatever went wrong, rank 0 tells it
            return self._fail(start_failed(error))
        self._stream.send(Ready(shape))
        return self._serve(runner)

    def _await_start(self) -> EngineConfig:
        while not (messages := self._stream.receive(_WAIT_S)):
            pass
        first, *self._early = messages
        assert isinstance(first, Start), f"the first message is {type(first).__name__}, not Start"
        return first.config

    def _listen(self) -> None:
        """Whether rank 0 is still there while the model is built."""
        self._early += self._stream.receive(0.0)

    def _fail(self, failure: StartFailed) -> int:
        """Rank 0 hangs up when it has read it."""
        self._stream.send(failure)
        self._stream.receive(_FAREWELL_S)
        return 1

    def _serve(self, runner: RankRunner) -> int:
        reporter = _Reporter(self._stream, runner)
        messages, self._early = self._early, []
        while True:
            for message in messages:
                match message:
                    case Step():
                        reporter.launch(message)
                    case Shutdown():
                        self._communicator.close()
                        return 0
                    case Start():
                        raise AssertionError("a second Start")
            messages = self._stream.receive(_WAIT_S)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight; handle is None when it could not be launched."""

    step_id: int
    handle: StepHandle | None
    leases: tuple[int, ...]


class _Reporter:
    """Launches steps and tells rank 0, on a thread of its own, what becomes of them."""

    def __init__(self, stream: Stream[ToRank], runner: RankRunner) -> None:
        self._stream = stream
        self._runner = runner
        self._launched: queue.SimpleQueue[_Launched] = queue.SimpleQueue()
        self._leases: set[int] = set()
        threading.Thread(target=self._run, name="reporter", daemon=True).start()

    def launch(self, step: Step) -> None:
        """Run the step after those before it."""
        plan, handle = step.plan(), None
        try:
            handle = self._runner.launch(plan, step.seats())
        except (RuntimeError, MemoryError) as error:
            say(f"step {plan.step_id} could not be launched: {one_line(error)}")
        self._launched.put(_Launched(plan.step_id, handle, leases_of(plan)))

    def _run(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # who reads the stream sees it too
            while True:
                launched = self._next()
                if launched is not None:
                    self._stream.send(self._result(launched))
                elif ended := self._ended(self._runner.poll_transfers()):
                    self._stream.send(Moved(ended))

    def _next(self) -> _Launched | None:
        """The next step; None where there is none yet and transfers are open."""
        try:
            return self._launched.get(timeout=_TRANSFER_POLL_S if self._leases else None)
        except queue.Empty:
            return None

    def _result(self, launched: _Launched) -> Done:
        self._leases.update(launched.leases)
        if launched.handle is None:
            return Done(launched.step_id, fault=True)
        try:
            output = launched.handle.wait()
        except Exception as error:  # noqa: BLE001 the replica ends with it, whatever it is
            say(f"step {launched.step_id} failed: {one_line(error)}")
            return Done(launched.step_id, fault=True)
        return Done(launched.step_id, self._ended(output.transfers), output.result.fault)

    def _ended(self, transfers: Sequence[tuple[int, bool]]) -> tuple[tuple[int, bool], ...]:
        self._leases.difference_update(lease for lease, _ in transfers)
        return tuple(transfers)


def _build(config: EngineConfig, communicator: Communicator) -> tuple[RankRunner, str]:
    source = open_model(config.model)

    from tokenspeed.execution import ModelRunner

    runner = ModelRunner.create(config, source, None, communicator)
    return runner, shape_of(runner.info)


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    leave(1)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
