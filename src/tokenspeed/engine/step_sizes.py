# SPDX-License-Identifier: Apache-2.0
"""How many tokens the steps compute, as the counts of a histogram. Knows no plan and no metric."""

from __future__ import annotations

from bisect import bisect_left

from tokenspeed.core.ipc import STEP_TOKEN_BOUNDS


class StepSizes:
    """counts[i]: steps of at most STEP_TOKEN_BOUNDS[i] tokens and of more than the bound before; the last: of more
    than every bound. num_tokens: of all steps together."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._counts = [0] * (len(STEP_TOKEN_BOUNDS) + 1)

    @property
    def counts(self) -> tuple[int, ...]:
        """The counts so far."""
        return tuple(self._counts)

    def note(self, num_tokens: int) -> None:
        """A step of so many tokens was launched."""
        self._counts[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self.num_tokens += num_tokens
