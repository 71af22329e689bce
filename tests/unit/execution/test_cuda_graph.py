# SPDX-License-Identifier: Apache-2.0
"""Steps padded to a prepared size give the tokens that plain ones give. Run op by op here; tests/gpu captures them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from every_seventh import EverySeventh
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.request import Grammar, SamplingParams
from tokenspeed.execution.constraints import Constraints
from tokenspeed.execution.cuda_graph import StepGraphs, StepSize, step_sizes
from tokenspeed.execution.model_runner import ModelRunner
from tokenspeed.kernels.ops.decode_step import DenseModel
from tokenspeed.kernels.ops.decode_step.reference import prepare
from tokenspeed.kernels.registry import Reason
from tokenspeed.layers.decoder import Decoder

NewLoop = Callable[..., Any]
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9, "top_p": 0.9, "top_k": 40}


def prepared(
    runner: ModelRunner, max_num_seqs: int, max_num_tokens: int, *, samples: bool, whole_steps: bool = False
) -> StepGraphs:
    """whole_steps: a small decode step is one op, the reference of decode_step."""
    sampler, decode_step = runner._sampling._sampler, None
    sizes = step_sizes(max_num_seqs, max_num_tokens)
    if whole_steps:
        assert isinstance(runner._model, Decoder)
        dense = runner._model.dense(runner._buffers.kv_layers)
        assert isinstance(dense, DenseModel), dense
        step = prepare(dense, 16)
        assert not isinstance(step, Reason), step
        decode_step = step
    graphs = StepGraphs(
        runner._forward,
        runner._buffers,
        sampler._sample,
        sampler.penalties,
        sizes,
        captures=False,
        samples=samples,
        decode_step=decode_step,
    )
    runner._on_thread(lambda: graphs.prepare(None))
    return graphs


def with_grammars(loop: Any) -> Any:
    """The same loop, whose grammars are of the kind above."""
    sampler = loop.runner._sampling._sampler
    sampler._constraints.close()
    sampler._constraints = Constraints(8, 97, backend=lambda _name, _vocabulary: EverySeventh())
    sampler.know(Vocabulary((), (), (), ""))
    return loop


@pytest.mark.parametrize(("overlap_depth", "max_num_tokens"), [(0, 512), (1, 512), (1, 16)])
def test_prepared_steps_edit_logits_as_plain_ones_do(
    new_loop: NewLoop, tools: Any, overlap_depth: int, max_num_tokens: int
) -> None:
    """Masks, penalties, biases, bans of end tokens and log-probabilities, of some rows and of all; steps of more tokens
    than are prepared, too."""
    generator = np.random.default_rng(6)
    kinds: list[dict[str, Any]] = [
        GREEDY,
        {**DRAWN, "frequency_penalty": 0.7, "logit_bias": ((4, 3.0), (9, -2.0))},
        {**DRAWN, "grammar": Grammar("regex", "3")},
        {**GREEDY, "repetition_penalty": 1.6, "logprobs": 3, "prompt_logprobs": 2},
        {**GREEDY, "grammar": Grammar("regex", "5"), "presence_penalty": 0.4, "logprobs": 0},
        {**GREEDY, "min_tokens": 9, "logit_bias": tuple((token_id, 2.0) for token_id in range(0, 90, 3))},
        {"temperature": 1.1, "logit_bias": tuple((token_id % 97, 0.01) for token_id in range(300))},
    ]
    wishes = [
        tools.Wish(
            generator.integers(0, 95, 30 - 3 * index).tolist(),
            5 if index == 6 else 18,
            SamplingParams(seed=index, **kind),
            end_token_ids=(96,),
            arrives=2 * index,
        )
        for index, kind in enumerate(kinds)
    ]
    plain, loop = with_grammars(new_loop(overlap_depth=0)), with_grammars(new_loop(overlap_depth=overlap_depth))
    loop.runner._graphs = graphs = prepared(loop.runner, 8, max_num_tokens, samples=True)
    used: list[bool | None] = []
    num_behind = 0

    def spied(sampling: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*arguments: Any) -> Any:
            nonlocal num_behind
            sample = sampling(*arguments)
            num_behind += len(arguments) > 1

            def sampled(edits: Any) -> Any:
                told = sample(edits)
                used.append(None if told is None else edits is not None)
                return told

            return sampled

        return spy

    graphs.sampling = spied(graphs.sampling)  # type: ignore[method-assign]
    graphs.sampling_behind = spied(graphs.sampling_behind)  # type: ignore[method-assign]
    for _ in range(2):  # again, in seats that others had
        expected, found = plain.run(wishes), loop.run(wishes)
        assert [request.token_ids for request in found] == [request.token_ids for request in expected]
        assert [request.logprobs for request in found] == [request.logprobs for request in expected]
        assert [request.prompt_logprobs for request in found] == [request.prompt_logprobs for request in expected]
        assert all(token_id % 7 == (3 + index) % 7 for index, token_id in enumerate(found[2].token_ids))
    assert set(used) == {True, False, None}, "all of: edited, not edited, more values than there is room for"
    assert used.count(True) > 2 * used.count(None)
    assert num_behind > (0 if max_num_tokens == 512 else 5)


@pytest.mark.parametrize(("samples", "whole_steps"), [(True, False), (False, False), (True, True)])
def test_padded_steps_change_no_token(new_loop: NewLoop, tools: Any, samples: bool, whole_steps: bool) -> None:
    generator = np.random.default_rng(5)
    kinds = (GREEDY, DRAWN, {**DRAWN, "presence_penalty": 0.5}, GREEDY, {"temperature": 1.2}, GREEDY)
    wishes = [
        tools.Wish(
            generator.integers(0, 97, 40 - 5 * index).tolist(),
            20,
            SamplingParams(seed=index, logprobs=2 if index == 3 else None, **kinds[index]),
            arrives=2 * index,
        )
        for index in range(6)
    ]
    expected = new_loop().run(wishes)
    for options in ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 37}, {"overlap_depth": 0}, {"kv_tokens": 200}):
        loop = new_loop(**options)
        graphs = prepared(
            loop.runner,
            options.get("max_num_seqs", 8),
            options.get("max_num_batched_tokens", 512),
            samples=samples,
            whole_steps=whole_steps,
        )
        loop.runner._graphs = graphs
        launched: list[StepSize] = []
        forward = graphs.forward

        def spy(inputs: Any, size: StepSize, columns: Any, forward: Any = forward, seen: Any = launched) -> Any:
            seen.append(size)
            return forward(inputs, size, columns)

        graphs.forward = spy  # type: ignore[method-assign]
        found = loop.run(wishes)
        assert [request.token_ids for request in found] == [request.token_ids for request in expected], options
        assert [entry.token_id for entry in found[3].logprobs] == found[3].token_ids
        assert {size.decodes for size in launched} == {True, False}


def test_sizes_cover_what_may_come_and_waste_little() -> None:
    for max_num_seqs, max_num_tokens in ((1, 16), (3, 37), (64, 8192), (300, 2048)):
        sizes = step_sizes(max_num_seqs, max_num_tokens)
        decode = [size.rows for size in sizes if size.decodes]
        assert decode == sorted(set(decode))
        assert decode[-1] == max_num_seqs
        assert all(size.tokens == size.rows for size in sizes if size.decodes)
        mixed = [size for size in sizes if not size.decodes]
        tokens = sorted({size.tokens for size in mixed})
        assert all(after <= 1.5 * before for before, after in itertools.pairwise(tokens[1:]))
        assert tokens[-1] <= min(max_num_tokens, 2048)
        assert len(sizes) <= 64


def test_a_step_that_fits_no_size_is_left_to_others(tiny_path: Path, tools: Any) -> None:
    runner = tools.new_runner(tools.engine_config(tiny_path))
    graphs = prepared(runner, 2, 32, samples=True)
    buffers = runner._buffers
    for rows, fits in (([(0, 1, 0, 33)], False), ([(0, 1, 0, 32)], True), ([(s, 2, 3, 1) for s in range(3)], False)):
        num_given = sum(row[3] for row in rows if row[1] != 2)
        inputs = buffers.read(tools.make_plan(0, rows, [1] * num_given))
        assert (graphs.fitting(inputs) is not None) == fits
    runner.close()
