# SPDX-License-Identifier: Apache-2.0
"""Scripted models: forced ids come back through the real planner, seats and sampler."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.core.errors import CheckpointError
from tokenspeed.core.plan import FinishCode
from tokenspeed.core.request import SamplingParams
from tokenspeed.execution.scripted import ScriptedModel


def scripted_folder(path: Path, **fields: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "script.json").write_text(json.dumps({"vocab_size": 300, "context_length": 256, "replies": [], **fields}))
    return path


@pytest.fixture
def loop(tmp_path: Path, tools: Any) -> Any:
    made = tools.Loop(tools.engine_config(scripted_folder(tmp_path / "s"), load_format="scripted", kv_tokens=400))
    yield made
    made.close()


def test_forced_ids_come_back_with_finite_log_probabilities(loop: Any, tools: Any) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3, logprobs=2)
    forced = [[7, 8, 9, 299], [5, 5, 299], [1, 2, 3, 4, 5, 6, 299]]
    wishes = [
        tools.Wish(list(range(50)), 60, sampling, end_token_ids=(299,), forced=ids, arrives=index)
        for index, ids in enumerate(forced)
    ]
    for request, ids in zip(loop.run(wishes), forced, strict=True):
        assert request.token_ids == ids
        assert request.finish == FinishCode.STOP
        assert [entry.token_id for entry in request.logprobs] == ids
        assert all(-9999 < entry.logprob <= 0 for entry in request.logprobs)


def test_preempted_requests_go_on_where_they_were(loop: Any, tools: Any) -> None:
    forced = [[(7 * index + step) % 290 for step in range(60)] for index in range(8)]
    wishes = [tools.Wish(list(range(index, index + 30)), 60, forced=ids) for index, ids in enumerate(forced)]
    assert [request.token_ids for request in loop.run(wishes)] == forced
    assert loop.control.stats().num_preemptions > 0


def test_ids_repeat_when_nothing_may_end_the_request(loop: Any, tools: Any) -> None:
    request = loop.run([tools.Wish([4, 5, 6], 10, forced=[1, 2, 3])])[0]
    assert request.token_ids == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_without_forced_ids_a_request_ends_or_repeats_its_prompt(loop: Any, tools: Any) -> None:
    ended, repeated = loop.run([tools.Wish([4, 5, 6], 7, end_token_ids=(42,)), tools.Wish([4, 5, 6], 7)])
    assert ended.token_ids == [42]
    assert repeated.token_ids == [4, 5, 6, 4, 5, 6, 4]


def test_it_holds_no_kv_and_delays_each_step(tmp_path: Path, tools: Any) -> None:
    loop = tools.Loop(
        tools.engine_config(scripted_folder(tmp_path / "slow", step_s=0.02), load_format="scripted", kv_tokens=None)
    )
    started = time.monotonic()
    loop.run([tools.Wish([1], 5, forced=[1, 2, 3, 4, 5])])
    assert time.monotonic() - started >= 0.1
    assert (loop.runner.info.kv_bytes, loop.runner.info.num_parameters) == (0, 0)
    assert loop.runner.info.num_kv_blocks == 8 * 256 // 8
    loop.close()


def test_a_script_without_sizes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="vocab_size is None"):
        ScriptedModel({"max_position_embeddings": 4}, 0.0)
