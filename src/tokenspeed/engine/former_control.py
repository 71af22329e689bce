# SPDX-License-Identifier: Apache-2.0
"""The loop's face of a control plane that keeps nothing on request: no holds, time limits, adapters or transfers.

Knows only what is lacking. Goes as soon as the control plane lacks nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenspeed.core.plan import ControlStats, Int32Array, RequestKey, SequenceEvents, StepPlan, StepResult
from tokenspeed.core.request import ContentSpan, Retention
from tokenspeed.engine.step import Refusal

if TYPE_CHECKING:
    from tokenspeed.control import ControlPlane


class FormerControl:
    """Passes on what was always there."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def submit(
        self,
        key: RequestKey,
        token_ids: Int32Array,
        *,
        max_new_tokens: int,
        min_new_tokens: int,
        end_token_ids: tuple[int, ...],
        priority: int,
        namespace: str,
        match_limit: int | None,
        adapter: str,
        spans: tuple[ContentSpan, ...],
        retain: Retention | None,
        deadline_ms: int | None,
    ) -> None:
        self._plane.submit(
            key,
            token_ids,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            end_token_ids=end_token_ids,
            priority=priority,
            namespace=namespace,
            match_limit=match_limit,
        )

    def cancel(self, key: RequestKey) -> None:
        self._plane.cancel(key)

    def finish(self, key: RequestKey, keep_tokens: int) -> None:
        self._plane.finish(key, keep_tokens)

    def retain(self, key: RequestKey, deadline_ms: int) -> None:
        pass

    def release(self, key: RequestKey) -> None:
        pass

    def transfer_done(self, lease: int, ok: bool) -> None:
        raise AssertionError(f"transfer {lease} of a control plane that makes none")

    def tick(self, now_ms: int) -> None:
        self._plane.tick(now_ms)

    def apply(self) -> Sequence[Refusal]:
        return self._plane.apply()

    def next_plan(self) -> StepPlan | None:
        return self._plane.next_plan()

    def advance(self, result: StepResult) -> None:
        self._plane.advance(result)

    def take_events(self) -> SequenceEvents:
        return self._plane.take_events()

    def stats(self) -> ControlStats:
        return self._plane.stats()
