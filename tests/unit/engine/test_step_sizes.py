# SPDX-License-Identifier: Apache-2.0
"""A step is counted under the first bound that it does not exceed."""

from __future__ import annotations

from tokenspeed.core.ipc import STEP_TOKEN_BOUNDS
from tokenspeed.engine.step_sizes import StepSizes


def test_a_bound_belongs_to_its_own_bucket() -> None:
    sizes = StepSizes()
    for num_tokens in (1, 2, 3, 4, 16_384, 16_385, 100_000):
        sizes.note(num_tokens)
    counts = dict(zip((*STEP_TOKEN_BOUNDS, None), sizes.counts, strict=True))
    assert {bound: count for bound, count in counts.items() if count} == {1: 1, 2: 1, 4: 2, 16_384: 1, None: 2}
    assert sizes.num_tokens == 1 + 2 + 3 + 4 + 16_384 + 16_385 + 100_000
