# SPDX-License-Identifier: Apache-2.0
"""A driver that plays engine and execution to a control plane: the next token is a function of all tokens so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tokenspeed.control import ControlPlane, Refusal
from tokenspeed.core.plan import CacheGroup, FinishCode, GroupKind, RequestKey, RowKind, StepPlan, StepResult

END = 1


def next_token(token_ids: list[int]) -> int:
    """Never END: a test says itself when a sequence ends."""
    return 2 + (len(token_ids) * 7919 + sum(token_ids[-5:]) * 31) % 9973


def expected(prompt: list[int], count: int) -> list[int]:
    """The first `count` tokens that follow the prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class Sequence:
    prompt: list[int]
    generated: list[int] = field(default_factory=list)
    finish: FinishCode = FinishCode.NONE
    cached_len: int = 0
    computed: int = 0
    num_seatings: int = 0


@dataclass
class Driver:
    """depth 1 plans a step while another is in flight. acks: transfers are acknowledged before the next plan."""

    plane: ControlPlane
    depth: int = 0
    acks: bool = True
    sequences: dict[RequestKey, Sequence] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    plans: list[list[list[int]]] = field(default_factory=list)
    finished: list[RequestKey] = field(default_factory=list)
    forced: dict[RequestKey, dict[int, int]] = field(default_factory=dict)
    bad_rows: set[RequestKey] = field(default_factory=set)
    bad_step: bool = False
    loads: list[list[int]] = field(default_factory=list)
    stores: list[list[int]] = field(default_factory=list)
    unanswered: list[int] = field(default_factory=list)
    _seats: dict[int, tuple[RequestKey, list[int]]] = field(default_factory=dict)
    _in_flight: deque[tuple[StepResult, list[RequestKey]]] = field(default_factory=deque)

    def submit(
        self, index: int, prompt: Iterable[int], max_new_tokens: int = 8, *, generation: int = 0, **options
    ) -> RequestKey:
        key = RequestKey(index, generation)
        sequence = Sequence(list(prompt))
        self.plane.submit(key, np.array(sequence.prompt, np.int32), max_new_tokens=max_new_tokens, **options)
        self.sequences[key] = sequence
        return key

    def apply(self) -> None:
        if self.acks:
            for lease in self.unanswered:
                self.plane.transfer_done(lease, True)
            self.unanswered.clear()
        self.refusals += self.plane.apply()
        self.take_events()

    def plan(self) -> StepPlan | None:
        plan = self.plane.next_plan()
        if plan is not None:
            self.plans.append(plan.rows.tolist())
            self._run(plan)
        return plan

    def advance(self) -> None:
        result, _ = self._in_flight.popleft()
        self.plane.advance(result)
        self.take_events()

    def step(self) -> StepPlan | None:
        """Events, a plan, and the result of the oldest step once `depth` further ones are in flight."""
        self.apply()
        plan = self.plan()
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            self.advance()
        return plan

    def run(self, num_steps_max: int = 20_000) -> None:
        self.apply()
        for _ in range(num_steps_max):
            if not self.plane.has_work() and not self._in_flight:
                self.apply()
                return
            self.step()
        raise AssertionError(f"work left after {num_steps_max} steps: {self.plane.stats()}")

    def take_events(self) -> None:
        events = self.plane.take_events()
        start = 0
        for index, generation, num_tokens, finish, cached_len in events.rows:
            key = RequestKey(index, generation)
            sequence = self.sequences[key]
            assert sequence.finish is FinishCode.NONE, key
            sequence.generated += events.token_ids[start : start + num_tokens]
            start += num_tokens
            sequence.finish = FinishCode(finish)
            sequence.cached_len = cached_len
            if finish:
                self.finished.append(key)
        assert start == len(events.token_ids)

    def _run(self, plan: StepPlan) -> None:
        self.loads += plan.load.tolist()
        self.stores += plan.store.tolist()
        self.unanswered += sorted({row[0] for row in [*plan.load.tolist(), *plan.store.tolist()]})
        for seat, index, generation in plan.seated.tolist():
            key = RequestKey(index, generation)
            sequence = self.sequences[key]
            sequence.num_seatings += 1
            self._seats[seat] = (key, sequence.prompt + sequence.generated)
        offsets, token_ids, faults, keys, start = [0], [], [], [], 0
        for seat, kind, context_len, query_len, _ in plan.rows.tolist():
            key, known = self._seats[seat]
            self.sequences[key].computed += query_len
            if kind != RowKind.DECODE:
                assert (
                    plan.token_ids[start : start + query_len].tolist() == known[context_len : context_len + query_len]
                )
                start += query_len
            if kind != RowKind.PREFILL and key not in self.bad_rows:
                num_generated = len(known) - len(self.sequences[key].prompt)
                known.append(self.forced.get(key, {}).get(num_generated, next_token(known)))
                token_ids.append(known[-1])
            offsets.append(len(token_ids))
            faults.append(int(key in self.bad_rows))
            keys.append(key)
        result = StepResult(
            plan.step_id,
            np.array(offsets, np.int32),
            np.array(token_ids, np.int32),
            np.array(faults, np.int32),
            self.bad_step,
        )
        self._in_flight.append((result, keys))


@pytest.fixture
def new_driver() -> Callable[..., Driver]:
    """Makes a driver; options not given are those of a small plane with room to spare: without groups, one of full
    attention."""

    def make(
        depth: int = 0, *, num_blocks: int = 256, block_size: int = 16, num_host_blocks: int = 0, **options
    ) -> Driver:
        defaults = {
            "groups": (CacheGroup(GroupKind.FULL, block_size, num_blocks, num_host_blocks),),
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 4096,
        }
        return Driver(ControlPlane(**(defaults | options)), depth)

    return make


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def depth(request: pytest.FixtureRequest) -> int:
    """Steps planned ahead of the last result."""
    return request.param


@pytest.fixture
def after() -> Callable[[list[int], int], list[int]]:
    """after(prompt, n): the n tokens that the driver's model says after a prompt."""
    return expected
