# SPDX-License-Identifier: Apache-2.0
"""Rank 0's runner as the loop sees it, with the other ranks behind it: each plan goes to all of them.

A step that one rank failed leaves the ranks out of step, and a rank that has gone leaves the others waiting: both end
the replica. Knows plans by their messages; knows neither what a step computes nor how ranks are started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tokenspeed.core.ipc import Step, Vocabulary, encode_frame
from tokenspeed.core.plan import Seating, StepPlan, StepResult
from tokenspeed.core.request import TokenLogprobs
from tokenspeed.engine.channel import ChannelClosedError
from tokenspeed.engine.failures import one_line
from tokenspeed.engine.replica import Replica
from tokenspeed.engine.sequences import PromptLogprobs
from tokenspeed.engine.step import Runner, StepHandle, StepOutput

if TYPE_CHECKING:
    from tokenspeed.execution import RunnerInfo


class LocalRunner(Runner, Protocol):
    """Rank 0's own runner."""

    @property
    def info(self) -> RunnerInfo: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Output:
    """A StepOutput whose transfers have ended on all ranks."""

    result: StepResult
    logprobs: Sequence[Sequence[TokenLogprobs] | None]
    prompt_logprobs: Sequence[PromptLogprobs | None]
    transfers: Sequence[tuple[int, bool]]


class RanksRunner:
    """A Runner. local: rank 0's own; replica: armed."""

    def __init__(self, local: LocalRunner, replica: Replica) -> None:
        self._local = local
        self._replica = replica

    @property
    def info(self) -> RunnerInfo:
        """Rank 0's."""
        return self._local.info

    def launch(self, plan: StepPlan, seatings: Sequence[Seating]) -> StepHandle:
        """Tell the other ranks, then launch here. Does not return where that fails."""
        frame = encode_frame(Step.of(plan, seatings))
        self._replica.watchdog.sent(plan.step_id)
        for follower in self._replica.followers:
            try:
                follower.stream.send_frame(frame)
            except ChannelClosedError:
                self._replica.give_up(f"rank {follower.rank} has gone: its connection is closed")
        try:
            handle = self._local.launch(plan, seatings)
        except (RuntimeError, MemoryError) as error:
            self._replica.give_up(f"rank 0 failed step {plan.step_id}: {one_line(error)}")
        return _Handle(plan.step_id, handle, self._replica)

    def know(self, vocabulary: Vocabulary) -> None:
        """Rank 0 samples, so it alone follows grammars."""
        self._local.know(vocabulary)

    def poll_transfers(self) -> tuple[tuple[int, bool], ...]:
        """As the loop asks, of all ranks together."""
        self._replica.ledger.note(0, self._local.poll_transfers())
        return self._replica.ledger.take()

    def close(self) -> None:
        """Finish the launched steps here, then end the other ranks. Idempotent."""
        self._local.close()
        self._replica.close(in_order=True)


def shape_of(info: RunnerInfo) -> str:
    """What a plan depends on: it has to be the same on all ranks."""
    groups = ", ".join(
        f"{group.num_blocks} blocks ({group.num_host_blocks} in the host tier) of {group.block_size} tokens"
        for group in info.groups
    )
    return f"a KV cache of {groups} and a context of {info.max_model_len} tokens"


class _Handle:
    """A step in flight on all ranks. It has run once rank 0 has: that one waits for the others wherever they meet."""

    def __init__(self, step_id: int, local: StepHandle, replica: Replica) -> None:
        self._step_id = step_id
        self._local = local
        self._replica = replica

    def wait(self) -> StepOutput:
        watchdog, ledger = self._replica.watchdog, self._replica.ledger
        watchdog.waiting(self._step_id)
        try:
            output = self._local.wait()
        except (RuntimeError, MemoryError) as error:
            self._replica.give_up(f"rank 0 failed step {self._step_id}: {one_line(error)}")
        watchdog.waiting(None)
        if output.result.fault:
            self._replica.give_up(f"rank 0 failed step {self._step_id}")
        ledger.note(0, output.transfers)
        return _Output(output.result, output.logprobs, output.prompt_logprobs, ledger.take())
