# SPDX-License-Identifier: Apache-2.0
"""What gateways ask over HTTP, and the numbers of a load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes import engine_info
from tokenspeed.core.config import EngineConfig, ParallelConfig
from tokenspeed.core.ipc import EngineStats
from tokenspeed.server.load import LoadMeter


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_described(shared: Any, path: str) -> None:
    facts = shared.client.get(path).json()
    assert facts["served_model_name"] == facts["model_path"] == "fake-model"
    assert (facts["max_context_length"], facts["max_req_input_len"], facts["is_generation"]) == (512, 511, True)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_the_server_is_described(shared: Any, path: str) -> None:
    facts = shared.client.get(path).json()
    assert (facts["max_total_num_tokens"], facts["block_size"], facts["max_num_seqs"]) == (512, 16, 64)


def test_the_load_is_told_for_the_one_rank(shared: Any) -> None:
    (load,) = shared.client.get("/v1/loads?include=all").json()["loads"]
    assert load["dp_rank"] == 0
    assert load["max_running_requests"] == 64
    assert shared.client.get("/v1/loads?dp_rank=0").status_code == 200
    assert shared.client.get("/v1/loads?dp_rank=1").status_code == 400


def test_a_load_counts_all_partitions_and_only_what_is_held() -> None:
    stats = EngineStats(
        num_running=3, num_waiting=2, used_blocks=8, cached_blocks=20, prefix_query_tokens=100, prefix_hit_tokens=25
    )
    config = EngineConfig(parallel=ParallelConfig(dp_attention=2))
    llm: Any = SimpleNamespace(stats=stats, info=engine_info(num_kv_blocks=32), config=config)
    load = LoadMeter(llm).read()
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (128, 1024, 0.125)
    assert (load.max_running_requests, load.utilization, load.cache_hit_rate) == (128, 3 / 128, 0.25)


def test_the_throughput_is_that_of_the_last_window() -> None:
    times = iter([10.0, 10.5, 12.0, 12.5, 14.0])
    llm: Any = SimpleNamespace(stats=EngineStats(), info=engine_info(), config=EngineConfig())
    meter = LoadMeter(llm, lambda: next(times))
    llm.stats = EngineStats(generated_tokens=100)
    assert [meter.read().gen_throughput for _ in range(3)] == [0.0, 50.0, 50.0]
    llm.stats = EngineStats(generated_tokens=7)
    assert meter.read().gen_throughput == 0.0
