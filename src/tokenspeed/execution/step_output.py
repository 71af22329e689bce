# SPDX-License-Identifier: Apache-2.0
"""What is told of a step, made of the rows that it had and of what was sampled for them.

Knows neither how a step is run nor where: all of this is on the host, and any thread may do it.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array, StepPlan, StepResult
from tokenspeed.core.request import TokenLogprobs
from tokenspeed.execution.drawn import SamplerOutput
from tokenspeed.execution.input_buffers import StepInputs
from tokenspeed.execution.outputs import PromptLogprobs, StepOutput


def without_tokens(plan: StepPlan, *, fault: bool) -> StepOutput:
    """Of a step that has no rows, or that failed."""
    nothing = np.zeros(0, dtype=np.int32)
    num_rows = len(plan.rows)
    offsets, row_faults = np.zeros(num_rows + 1, dtype=np.int32), np.zeros(num_rows, dtype=np.int32)
    return StepOutput(StepResult(plan.step_id, offsets, nothing, row_faults, fault=fault), (), ())


def output_of(
    step_id: int,
    inputs: StepInputs,
    sampled: SamplerOutput,
    prompt_logprobs: tuple[PromptLogprobs | None, ...],
    is_spoilt_R: NDArray[np.bool_] | None,
) -> StepOutput:
    """One token for each sampled row that is not faulty; a seat that an earlier failed step left behind is. Rows are
    put back into the order of the plan."""
    if (
        inputs.is_plain
        and sampled.logprobs is None
        and is_spoilt_R is None
        and not np.count_nonzero(sampled.is_faulty_S)
    ):
        return _plain_output(step_id, sampled.token_ids_S)
    rows_S = inputs.sampled_rows_S
    is_faulty_R = np.zeros(len(inputs.seats_R), dtype=np.bool_) if is_spoilt_R is None else is_spoilt_R
    is_faulty_R[rows_S] |= sampled.is_faulty_S
    tokens_R, is_told_R = np.zeros(len(is_faulty_R), dtype=np.int32), np.zeros(len(is_faulty_R), dtype=np.bool_)
    tokens_R[rows_S], is_told_R[rows_S] = sampled.token_ids_S, True
    is_told_R &= ~is_faulty_R
    rows_in_plan = np.argsort(inputs.order_R)
    is_told = is_told_R[rows_in_plan]
    offsets = np.zeros(len(is_told) + 1, dtype=np.int32)
    np.cumsum(is_told, out=offsets[1:])
    token_ids, row_faults = tokens_R[rows_in_plan][is_told], is_faulty_R[rows_in_plan].astype(np.int32)
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = (None,) * len(is_told)
    if sampled.logprobs is not None:
        entries = dict(zip(rows_S.tolist(), sampled.logprobs, strict=True))
        logprobs = tuple(_entry(entries.get(row)) if is_told_R[row] else None for row in rows_in_plan.tolist())
    result = StepResult(step_id, offsets, token_ids, row_faults)
    return StepOutput(result, logprobs, tuple(prompt_logprobs[row] for row in rows_in_plan.tolist()))


def _plain_output(step_id: int, token_ids_R: Int32Array) -> StepOutput:
    """As _output: a token of each row in the order of the plan, and nothing else."""
    offsets, row_faults, nothing = _plain_rows(len(token_ids_R))
    return StepOutput(StepResult(step_id, offsets, token_ids_R, row_faults), nothing, nothing)


@functools.lru_cache(maxsize=8)
def _plain_rows(num_rows: int) -> tuple[Int32Array, Int32Array, tuple[None, ...]]:
    """Of any step of so many rows."""
    offsets, row_faults = np.arange(num_rows + 1, dtype=np.int32), np.zeros(num_rows, dtype=np.int32)
    offsets.flags.writeable = row_faults.flags.writeable = False
    return offsets, row_faults, (None,) * num_rows


def _entry(logprobs: TokenLogprobs | None) -> tuple[TokenLogprobs, ...] | None:
    return None if logprobs is None else (logprobs,)
