# SPDX-License-Identifier: Apache-2.0
"""Scores prompt tokens as prefill chunks pass: position p + 1 is scored by the logits of position p.

Knows seats that asked for it and nothing else of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.core.plan import Int32Array, RowKind, Seating
from tokenspeed.core.request import TokenLogprobs
from tokenspeed.execution.input_buffers import StepInputs
from tokenspeed.execution.logprobs import rows_per_chunk, token_logprobs, touch
from tokenspeed.execution.outputs import PromptLogprobs
from tokenspeed.kernels.ops.logprobs import LogprobsFn

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: Int32Array
    num_top: int


class PromptScorer:
    """Prompts by seat, of the seats that asked for prompt log-probabilities."""

    def __init__(self, logprobs: LogprobsFn, vocab_size: int) -> None:
        self._logprobs, self._vocab_size = logprobs, vocab_size
        self._rows_per_chunk = rows_per_chunk(vocab_size)
        self._prompts: dict[int, _Prompt] = {}

    def touch(self, device: torch.device) -> None:
        """Call all that scoring calls, of tokens that are sampled too."""
        touch(self._logprobs, self._vocab_size, device)

    def seat(self, seating: Seating) -> None:
        """A request takes a seat."""
        num_top = seating.sampling.prompt_logprobs
        self._prompts.pop(seating.seat, None)
        if num_top is not None:
            self._prompts[seating.seat] = _Prompt(seating.token_ids[: seating.prompt_len].copy(), num_top)

    def has_work(self, inputs: StepInputs) -> bool:
        """Whether a row of this step is part of a prompt to score."""
        if not self._prompts:
            return False
        return bool(np.isin(inputs.seats_R[inputs.kinds_R != RowKind.DECODE], list(self._prompts)).any())

    def score(
        self, inputs: StepInputs, hidden_TD: torch.Tensor, compute_logits: ComputeLogits
    ) -> tuple[PromptLogprobs | None, ...]:
        """One entry a row. Logits are made a chunk of positions at a time, so that memory stays bounded."""
        scores: list[PromptLogprobs | None] = [None] * len(inputs.seats_R)
        for row, seat in enumerate(inputs.seats_R.tolist()):
            prompt = self._prompts.get(seat)
            if prompt is None or inputs.kinds_R[row] == RowKind.DECODE:
                continue
            start, end = int(inputs.query_start[row]), int(inputs.query_start[row + 1])
            context_len = int(inputs.context_lens_R[row])
            entries: list[TokenLogprobs | None] = [None] if context_len == 0 else []
            num_scored = min(end - start, len(prompt.token_ids) - 1 - context_len)
            for done in range(0, num_scored, self._rows_per_chunk):
                stop = min(done + self._rows_per_chunk, num_scored)
                targets = prompt.token_ids[context_len + done + 1 : context_len + stop + 1].astype("int64")
                logits_NV = compute_logits(hidden_TD[start + done : start + stop])
                targets_N = torch.from_numpy(targets).to(logits_NV.device)
                entries.extend(token_logprobs(self._logprobs, logits_NV, targets_N, [prompt.num_top] * len(targets)))
            if entries:
                scores[row] = PromptLogprobs(0 if context_len == 0 else context_len + 1, tuple(entries))
        return tuple(scores)
