# SPDX-License-Identifier: Apache-2.0
"""What execution hands to the engine: facts about the runner, a handle on a launched step, what the step produced.

Knows no tensor and no model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tokenspeed.core.ipc import KernelBinding
from tokenspeed.core.plan import CacheGroup, StepResult
from tokenspeed.core.request import TokenLogprobs
from tokenspeed.transfer import FinishedMove


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What a model runner offers. num_kv_blocks counts usable pages: ids 1 to num_kv_blocks; page 0 is the null page.
    weight_bytes: of the parameters of this rank; packed_bytes: of these, what stays in the blocks of its file.
    groups: in the order of a plan's group numbers; num_kv_blocks is the first one's and
    kv_bytes that of all.
    max_model_len is already cut to the KV pool. max_num_batched_tokens: tokens that a step
    should have. load_s: seconds from the call of create until it could serve."""

    model_type: str
    num_parameters: int
    device: str
    dtype: str
    num_threads: int
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    vocab_size: int
    load_s: float
    groups: tuple[CacheGroup, ...]
    weight_bytes: int = 0
    packed_bytes: int = 0
    kernels: tuple[KernelBinding, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt positions start, start + 1, … of one row; position 0 has None (nothing
    precedes it). The chunks of a prompt join without gap; a preempted prompt is reported again from its start."""

    start: int
    entries: tuple[TokenLogprobs | None, ...]


class StepOutput(msgspec.Struct, frozen=True):
    """What one step produced. logprobs and prompt_logprobs have one entry a row, None where not asked for (or the row
    faulted); logprobs[r] has one entry for each token that row r accepted. Both are empty when the whole step
    faulted. transfers: (lease, ok) of those that finished since the last output, of this plan or an earlier one."""

    result: StepResult
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]
    prompt_logprobs: tuple[PromptLogprobs | None, ...]
    transfers: tuple[FinishedMove, ...] = ()


class StepHandle:
    """A launched step. Steps finish in the order in which they were launched."""

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self._launching = threading.Lock()  # several times as fast as an event; held until the step is launched
        self._launching.acquire()
        self._reading = threading.Lock()
        self._read: Callable[[], StepOutput] | None = None
        self._output: StepOutput | None = None

    @property
    def is_launched(self) -> bool:
        """Whether all of the step's work is on its way; on a CPU it is then done."""
        return self._read is not None

    def wait(self) -> StepOutput:
        """Block until the step has run. Never raises: a step that failed has result.fault set."""
        with self._launching:
            pass
        with self._reading:
            if self._output is None:
                assert self._read is not None, f"step {self.step_id} was launched without an output"
                self._output = self._read()
            return self._output

    def launched(self, read: Callable[[], StepOutput]) -> None:
        """Called once, by the runner. read: waits for the device and never raises."""
        assert self._read is None, f"step {self.step_id} was launched twice"
        self._read = read
        self._launching.release()
