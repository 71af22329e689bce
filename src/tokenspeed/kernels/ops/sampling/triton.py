# SPDX-License-Identifier: Apache-2.0
"""Sampling in Triton: two launches, no sort, and nothing waits for the device, so that it can be captured.

Each row finds out on the device whether it is greedy, open or filtered, and pays for that alone. Knows the shapes and
the memory in between; the device code is in the file beside it.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenspeed.kernels.ops.sampling import GREEDY_BELOW, Draws, Sampled, SampleFn, SamplingInputs
from tokenspeed.kernels.platform import has_dependent_launch, triton_on_cuda
from tokenspeed.kernels.registry import Band, KernelContext, Solution

BLOCK = 2048
"""Tokens that a program of the first launch reads."""
GROUP = 128
"""Tokens of a group. A top-k above V / GROUP finds no bound among their maxima and reads the row again and again."""
CAPACITY = 1 << 13
"""Tokens in the list of a filtered row. It must not depend on the batch, lest a row's sums do."""
LIST_TILE = 1024
"""Tokens of the list that the one program of a filtered row takes at once."""
ROW_TILE = 4096
"""The same of the row, where the list is too short."""
ROWS_A_LAUNCH = 256
"""Bounds the memory in between: 8 · CAPACITY bytes a row, and a copy of the logits of rows with edits and filters."""
MAX_VOCAB_SIZE = 1 << 20
"""Tokens are counted in 20 bits."""
NUM_FACTS = 4
SURVEY_WARPS = 8
SETTLE_WARPS = 8


def build(ctx: KernelContext) -> SampleFn:
    """The op on one device. On the CPU Triton interprets it."""
    from tokenspeed.kernels.ops.sampling import _triton

    launch = _Launch(_triton, torch.device(ctx.device).type == "cuda", has_dependent_launch(ctx.device))

    def sample(logits_SV: torch.Tensor, inputs: SamplingInputs, into: Sampled | None = None) -> Sampled:
        assert logits_SV.dtype is torch.float32, logits_SV.dtype
        assert logits_SV.shape[1] < MAX_VOCAB_SIZE, logits_SV.shape
        num_rows = logits_SV.shape[0]
        sampled = into or Sampled.empty(num_rows, logits_SV.device)
        for first_row in range(0, num_rows, ROWS_A_LAUNCH):
            rows = slice(first_row, first_row + ROWS_A_LAUNCH)
            part = Sampled(sampled.token_ids_S[rows], sampled.is_faulty_S[rows])
            launch(logits_SV[rows], inputs, first_row, part)
        return sampled

    return sample


class _Launch:
    """The two kernels over some rows of a call."""

    def __init__(self, kernels: Any, on_cuda: bool, pdl: bool) -> None:
        self._kernels = kernels
        self._flags = {"FAST": on_cuda, "PDL": pdl}
        self._options = {"launch_pdl": True} if pdl else {}

    def __call__(self, logits_SV: torch.Tensor, inputs: SamplingInputs, first_row: int, sampled: Sampled) -> None:
        num_rows, vocab_size = logits_SV.shape
        num_blocks = -(-vocab_size // BLOCK)
        draws = _draws(inputs.draws, slice(first_row, first_row + num_rows))
        has_filters = inputs.draws is not None and inputs.draws.filters is not None
        has_edits = any(part is not None for part in (inputs.penalties, inputs.edits, inputs.masks))
        facts = logits_SV.new_empty(NUM_FACTS, num_rows, num_blocks)
        best_ids = logits_SV.new_empty(num_rows, num_blocks, dtype=torch.int32)
        num_groups = num_blocks * (BLOCK // GROUP)
        group_max = logits_SV.new_empty(num_rows, num_groups) if has_filters else None
        edited_SV = logits_SV.new_empty(num_rows, vocab_size) if has_filters and has_edits else None
        self._kernels.survey[num_blocks, num_rows](
            logits_SV,
            *logits_SV.stride(),
            first_row,
            VOCAB_SIZE=vocab_size,
            facts_ptr=facts,
            best_ids_ptr=best_ids,
            group_max_ptr=group_max,
            edited_ptr=edited_SV,
            HAS_DRAWS=inputs.draws is not None,
            HAS_FILTERS=has_filters,
            BLOCK=BLOCK,
            GROUP=GROUP,
            num_warps=SURVEY_WARPS,
            **draws,
            **_edits(inputs),
            **self._flags,
        )
        source_SV = logits_SV if edited_SV is None else edited_SV
        self._kernels.settle[(num_rows,)](
            source_SV,
            *source_SV.stride(),
            num_blocks,
            VOCAB_SIZE=vocab_size,
            facts_ptr=facts,
            best_ids_ptr=best_ids,
            group_max_ptr=group_max,
            groups_ptr=best_ids.new_empty(num_rows, num_groups) if has_filters else None,
            list_ptr=logits_SV.new_empty(num_rows, CAPACITY) if has_filters else None,
            list_ids_ptr=best_ids.new_empty(num_rows, CAPACITY) if has_filters else None,
            token_ids_ptr=sampled.token_ids_S,
            is_faulty_ptr=sampled.is_faulty_S,
            MAX_BLOCKS=1 << (num_blocks - 1).bit_length(),
            MAX_GROUPS=1 << (num_groups - 1).bit_length(),
            GROUP=GROUP,
            GROUPS_A_BLOCK=BLOCK // GROUP,
            CAPACITY=CAPACITY,
            LIST_TILE=LIST_TILE,
            ROW_TILE=ROW_TILE,
            HAS_FILTERS=has_filters,
            num_warps=SETTLE_WARPS if has_filters else 4,
            **draws,
            **self._flags,
            **self._options,
        )


def _draws(draws: Draws | None, rows: slice) -> dict[str, Any]:
    """The arguments that say how these rows are drawn."""
    filters = None if draws is None else draws.filters
    columns = {
        "temperature_ptr": None if draws is None else draws.temperature_S,
        "seed_ptr": None if draws is None else draws.seed_S,
        "position_ptr": None if draws is None else draws.position_S,
        "top_k_ptr": None if filters is None else filters.top_k_S,
        "top_p_ptr": None if filters is None else filters.top_p_S,
        "min_p_ptr": None if filters is None else filters.min_p_S,
    }
    found = {name: None if column is None else column[rows].contiguous() for name, column in columns.items()}
    return {**found, "GREEDY_BELOW": GREEDY_BELOW}


def _edits(inputs: SamplingInputs) -> dict[str, Any]:
    """The arguments that change logits. They name rows of the whole call."""
    penalties, edits, masks = inputs.penalties, inputs.edits, inputs.masks
    prompt_PV = None if penalties is None or penalties.prompt_mask_PV is None else _flat(penalties.prompt_mask_PV)
    counts_PV = None if penalties is None else _flat(penalties.output_counts_PV)
    bits_GW = None if masks is None else _flat(masks.bits_GW)
    return {
        "penalty_rows_ptr": None if penalties is None else penalties.rows_P.contiguous(),
        "num_penalties": 0 if penalties is None else len(penalties.rows_P),
        "counts_ptr": counts_PV,
        "counts_step": 0 if counts_PV is None else counts_PV.stride(0),
        "prompt_ptr": prompt_PV,
        "prompt_step": 0 if prompt_PV is None else prompt_PV.stride(0),
        "presence_ptr": None if penalties is None else penalties.presence_P.contiguous(),
        "frequency_ptr": None if penalties is None else penalties.frequency_P.contiguous(),
        "repetition_ptr": None if penalties is None else penalties.repetition_P.contiguous(),
        "edit_rows_ptr": None if edits is None else edits.rows_N.contiguous(),
        "edit_ids_ptr": None if edits is None else edits.token_ids_N.contiguous(),
        "edit_values_ptr": None if edits is None else edits.values_N.contiguous(),
        "num_edits": 0 if edits is None else len(edits.rows_N),
        "mask_rows_ptr": None if masks is None else masks.rows_G.contiguous(),
        "mask_bits_ptr": bits_GW,
        "mask_step": 0 if bits_GW is None else bits_GW.stride(0),
        "num_masks": 0 if masks is None else len(masks.rows_G),
        "HAS_PENALTIES": penalties is not None,
        "HAS_PROMPT": prompt_PV is not None,
        "HAS_EDITS": edits is not None,
        "HAS_MASKS": masks is not None,
    }


def _flat(rows_NV: torch.Tensor) -> torch.Tensor:
    """The same values, those of a row side by side."""
    return rows_NV if rows_NV.stride(-1) == 1 else rows_NV.contiguous()


SOLUTION = Solution(
    "triton", Band.PERFORMANT, triton_on_cuda, build, graph_safe=True, deterministic=True, batch_invariant=True
)
