# SPDX-License-Identifier: Apache-2.0
"""Full and window layers on pages of their own: blocks that a window has left go to others at once, evicted sequences
come back from host pages, and no token differs from the oracle's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tokenspeed.core.plan import GroupKind, RowKind, StepPlan
from tokenspeed.execution import ModelRunner

BLOCK_SIZE, WINDOW = 8, 19
CONFIG = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass
class LiveSequence:
    """A sequence as a planner sees it. tables: pages by group, 0 where the window has left the block."""

    seat: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[], []])


class Planner:
    """Pages of two groups, taken and given back at once: the page that was freed last is the first to be taken."""

    def __init__(self, runner: ModelRunner, tools: Any) -> None:
        self.runner = runner
        self.tools = tools
        self.free = [list(range(1, group.num_blocks + 1)) for group in runner.info.groups]
        self.least_free = [len(pages) for pages in self.free]
        self.step_id = 0

    def step(self, chunks: Sequence[tuple[LiveSequence, int]]) -> None:
        """One step of a chunk of each sequence's prompt, or of its next token; decoding sequences come first."""
        rows, token_ids, pages, seatings = [], [], [], []
        for sequence, length in chunks:
            start, end = sequence.num_computed, sequence.num_computed + length
            if start == 0:
                seatings.append(self.tools.make_seating(sequence.seat, sequence.prompt))
            pages += self._page_delta(sequence, start, end)
            if start < len(sequence.prompt):
                kind = RowKind.PREFILL_LAST if end == len(sequence.prompt) else RowKind.PREFILL
                token_ids += sequence.prompt[start:end]
            else:
                kind = RowKind.DECODE
            rows.append((sequence.seat, kind, start, length))
            sequence.num_computed = end
        output = self.launch(rows, token_ids, seated=[each.seat for each in seatings], pages=pages, seatings=seatings)
        offsets = output.result.accepted_offsets
        for (sequence, _), start, end in zip(chunks, offsets[:-1], offsets[1:], strict=True):
            sequence.tokens += output.result.token_ids[start:end].tolist()

    def launch(self, rows: Any, token_ids: Sequence[int] = (), *, seatings: Sequence[Any] = (), **plan: Any) -> Any:
        self.step_id += 1
        made: StepPlan = self.tools.make_plan(self.step_id, rows, token_ids, **plan)
        output = self.runner.launch(made, seatings).wait()
        assert not output.result.fault
        return output

    def evict(self, sequence: LiveSequence) -> None:
        for group, table in enumerate(sequence.tables):
            self.free[group] += [page for page in table if page]
        sequence.tables = [[], []]

    def _page_delta(self, sequence: LiveSequence, start: int, end: int) -> list[tuple[int, ...]]:
        delta = []
        for group, table in enumerate(sequence.tables):
            for index in range((start - WINDOW + 1) // BLOCK_SIZE if group == 1 and start >= WINDOW else 0):
                if table[index]:
                    self.free[group].append(table[index])
                    table[index] = 0
                    delta.append((sequence.seat, group, index, 0))
            while len(table) * BLOCK_SIZE < end:
                table.append(self.free[group].pop())
                delta.append((sequence.seat, group, len(table) - 1, table[-1]))
            self.least_free[group] = min(self.least_free[group], len(self.free[group]))
        return delta


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model("gemma3_text", **CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture
def runner(oracle: transformers.PreTrainedModel, tmp_path: Path, tools: Any) -> Iterator[ModelRunner]:
    tensors = {name: tensor for name, tensor in oracle.state_dict().items() if not name.startswith("lm_head")}
    path = tools.write_checkpoint(tmp_path / "tiny", {"model_type": "gemma3_text", **CONFIG}, [tensors])
    made = tools.new_runner(
        tools.engine_config(path, max_num_seqs=2, max_num_batched_tokens=40, kv_tokens=1024, host_tokens=400),
    )
    yield made
    made.close()


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, length).tolist()


def assert_told_by(oracle: transformers.PreTrainedModel, sequence: LiveSequence) -> None:
    """The oracle's most likely token after each prefix is the next one."""
    with torch.inference_mode():
        logits = oracle(torch.tensor([sequence.prompt + sequence.tokens]), use_cache=False).logits[0]
    assert logits[len(sequence.prompt) - 1 : -1].argmax(-1).tolist() == sequence.tokens


def test_the_runner_says_which_groups_it_has(runner: ModelRunner) -> None:
    full, window = runner.info.groups
    assert (full.kind, full.num_blocks, full.num_host_blocks, full.window) == (GroupKind.FULL, 128, 50, None)
    assert (window.kind, window.num_blocks, window.num_host_blocks, window.window) == (GroupKind.WINDOW, 44, 50, WINDOW)
    assert runner.info.num_kv_blocks == 128
    assert runner.info.kv_bytes == (129 + 3 * 45) * BLOCK_SIZE * 2 * 2 * 24 * 4


def test_blocks_that_a_window_has_left_serve_others(
    runner: ModelRunner, tools: Any, oracle: transformers.PreTrainedModel
) -> None:
    """Two sequences, each cut into chunks shorter and longer than the window, take pages from each other's past."""
    planner = Planner(runner, tools)
    first, second = LiveSequence(0, prompt_of(90, 1)), LiveSequence(1, prompt_of(75, 2))
    for chunks in (
        [(first, 31)],
        [(first, 9), (second, 25)],
        [(first, 40)],
        [(first, 10), (second, 3)],
        [(first, 1), (second, 37)],
        [(first, 1), (second, 10)],
        *([(first, 1), (second, 1)] for _ in range(30)),
    ):
        planner.step(chunks)
    assert (len(first.tokens), len(second.tokens)) == (33, 31)
    assert_told_by(oracle, first)
    assert_told_by(oracle, second)
    assert sum(page == 0 for page in first.tables[1]) == (121 - WINDOW + 1) // BLOCK_SIZE
    assert 42 - planner.least_free[1] < 128 - planner.least_free[0] - 10, "the window held no fewer blocks"


def test_an_evicted_sequence_comes_back_from_host_pages(
    runner: ModelRunner, tools: Any, oracle: transformers.PreTrainedModel
) -> None:
    planner = Planner(runner, tools)
    first, second = LiveSequence(0, prompt_of(64, 3)), LiveSequence(1, prompt_of(64, 4))
    planner.step([(first, 40)])
    planner.step([(first, 24)])
    kept = [
        (group, index, page) for group, table in enumerate(first.tables) for index, page in enumerate(table) if page
    ]
    assert len(kept) == 8 + 6
    store = [(7, group, page, 50 - number) for number, (group, _, page) in enumerate(kept)]
    output = planner.launch([], store=store)
    assert output.transfers == ((7, True),)
    assert output.result.accepted_offsets.tolist() == [0]
    planner.evict(first)
    planner.step([(second, 40)])  # takes the very pages that held the first
    planner.step([(second, 24)])
    planner.step([(second, 1)])
    for group in range(2):
        first.tables[group] = [0] * 8
    load, pages = [], []
    for number, (group, index, _) in enumerate(kept):
        first.tables[group][index] = planner.free[group].pop()
        load.append((8, group, first.tables[group][index], 50 - number))
        pages.append((0, group, index, first.tables[group][index]))
    assert planner.launch([], load=load).transfers == ((8, True),)
    seating = tools.make_seating(0, first.prompt, generated=first.tokens)
    # Seated again with 64 tokens in the cache: the last one's input is given as a prefill of one token.
    sequence_pages = [*pages, *planner._page_delta(first, 64, 65)]
    rows = [(0, RowKind.PREFILL_LAST, 64, 1)]
    output = planner.launch(rows, first.tokens[-1:], seated=[0], pages=sequence_pages, seatings=[seating])
    first.tokens += output.result.token_ids.tolist()
    first.num_computed = 65
    for _ in range(20):
        planner.step([(first, 1)])
    assert len(first.tokens) == 22
    assert_told_by(oracle, first)
