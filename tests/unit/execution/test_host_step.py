# SPDX-License-Identifier: Apache-2.0
"""On a CPU a step that only decodes is one call, and gives the tokens of the layers; ops that somebody chose run one by
one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tiny_gguf import write_gguf
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.plan import StepPlan
from tokenspeed.core.request import SamplingParams
from tokenspeed.execution.host_step import HostStep
from tokenspeed.execution.model_runner import _copy
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok

pytestmark = pytest.mark.skipif(
    compiled_cpu(KernelContext("cpu", torch.float32)) != Ok(), reason="the compiled CPU kernels are not built"
)


def wishes_of(tools: Any) -> list[Any]:
    """Requests that come and go, some of which draw their tokens."""
    drawn = (
        SamplingParams(temperature=1.0, seed=1, top_p=0.95),
        SamplingParams(temperature=1.4, seed=2),
        SamplingParams(temperature=0.7, seed=3, top_k=20, min_p=0.01),
    )
    params = (tools.GREEDY, *drawn, tools.GREEDY)
    return [tools.Wish(list(range(row, 20 + row)), 12 + row, each, arrives=2 * row) for row, each in enumerate(params)]


def served(tools: Any, config: EngineConfig, *, whole: bool) -> tuple[list[list[int]], int]:
    """Tokens of some requests, and how many sizes of steps were one call."""
    loop = tools.Loop(config)
    runner, sizes = loop.runner, []
    assert runner._host_step is not None
    step = runner._host_step._step

    def counted(batch: Any) -> torch.Tensor:
        sizes.append(len(batch.token_ids_R))
        return step(batch)  # type: ignore[no-any-return]

    runner._host_step._step = counted
    if not whole:
        runner._host_step = None
    try:
        return [request.token_ids for request in loop.run(wishes_of(tools))], len(set(sizes))
    finally:
        loop.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_that_only_decode_are_one_call(tiny_path: Path, tools: Any, dtype: str) -> None:
    config = tools.engine_config(tiny_path, dtype=dtype)
    tokens, num_sizes = served(tools, config, whole=True)
    assert num_sizes >= 4
    assert served(tools, config, whole=False) == (tokens, 0)


def test_the_most_likely_token_is_asked_for_where_nothing_else_is_needed(
    tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head in planes: rows that need more, alone or beside rows that do not, get logits; tokens are the same."""
    path = write_gguf(tmp_path / "a.gguf", {"token_embd": "Q8_0"})
    params = (
        tools.GREEDY,
        SamplingParams(temperature=0.0, repetition_penalty=1.8),
        SamplingParams(temperature=0.0, frequency_penalty=1.5),
        SamplingParams(temperature=0.0, logit_bias=((7, 100.0),)),
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=4),
        tools.GREEDY,
        tools.GREEDY,
    )
    wishes = [tools.Wish([3 + row, 9, 30], 10, each, arrives=6 * row) for row, each in enumerate(params)]
    found = []
    for in_part in (True, False):
        calls: list[int] = []
        most_likely, finds = HostStep.most_likely, HostStep.finds_most_likely
        with monkeypatch.context() as patch:
            patch.setattr(HostStep, "most_likely", lambda *args: calls.append(0) or most_likely(*args))  # noqa: B023
            patch.setattr(HostStep, "finds_most_likely", lambda *args: in_part and finds(*args))  # noqa: B023
            loop = tools.Loop(tools.engine_config(path))
            try:
                found.append([request.token_ids for request in loop.run(wishes)])
            finally:
                loop.close()
        assert (len(calls) > 12) is in_part
    assert found[0] == found[1]
    assert set(found[0][3]) == {7}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_drawn_reply_is_the_same_alone_and_on_any_number_of_threads(
    tiny_path: Path, tools: Any, num_threads: int
) -> None:
    together, _ = served(tools, tools.engine_config(tiny_path, num_threads=2), whole=True)
    loop = tools.Loop(tools.engine_config(tiny_path, num_threads=num_threads))
    try:
        alone = [loop.run([dataclasses.replace(wish, arrives=0)])[0].token_ids for wish in wishes_of(tools)]
    finally:
        loop.close()
    assert alone == together
    assert all(len(set(tokens)) > 4 for tokens in alone)


def test_chosen_ops_run_one_by_one(tiny_path: Path, tools: Any) -> None:
    config = tools.engine_config(tiny_path)
    chosen = msgspec.structs.replace(config.device, kernel_overrides=(("silu_mul", "reference"),))
    runner = tools.new_runner(msgspec.structs.replace(config, device=chosen))
    assert runner._host_step is None
    runner.close()


def test_a_step_keeps_no_memory_of_the_planners(tools: Any) -> None:
    plan = tools.make_plan(3, [(0, 2, 4, 1)])
    views = StepPlan(3, *(getattr(plan, name)[:] for name in StepPlan.__struct_fields__[1:]))
    copied = _copy(views)
    for name in StepPlan.__struct_fields__[1:]:
        assert getattr(views, name).base is not None, name
        assert getattr(copied, name).base is None, name
