# SPDX-License-Identifier: Apache-2.0
"""The configuration of cache and ranks: what is refused, and in which words; what a launcher says."""

from __future__ import annotations

import pytest

from tokenspeed.core.config import CacheConfig, EngineConfig, LaunchedRank, ParallelConfig, launched_rank
from tokenspeed.core.errors import ConfigError


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (CacheConfig(host_tokens=31, block_size=32), "--host-kv-tokens 31: .* at least 32, or 0 for none"),
        (CacheConfig(host_tokens=-1), "--host-kv-tokens -1"),
        (CacheConfig(host_tokens=64, prefix_caching=False), "--host-kv-tokens 64 with --no-prefix-caching"),
        (CacheConfig(host_store="pressure"), "--host-store pressure without a host tier"),
    ],
)
def test_a_host_tier_that_cannot_be_is_refused(cache: CacheConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(cache=cache).validate()


@pytest.mark.parametrize(
    "cache",
    [
        CacheConfig(),
        CacheConfig(prefix_caching=False),
        CacheConfig(host_tokens=32, block_size=32),
        CacheConfig(host_tokens=10**9, host_store="pressure"),
    ],
)
def test_a_host_tier_that_can_be_is_taken(cache: CacheConfig) -> None:
    assert EngineConfig(cache=cache).validate().cache == cache


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        (ParallelConfig(tp=0), "--tp 0: give at least 1"),
        (ParallelConfig(ep=0), "--ep 0: give at least 1"),
        (ParallelConfig(dp_attention=-1), "--dp-attention -1: give at least 1"),
        (ParallelConfig(moe_tp=0), "--moe-tp 0: give at least 1"),
        (ParallelConfig(rank_timeout_s=0.0), "--rank-timeout 0: give more than 0 seconds"),
    ],
)
def test_ranks_that_cannot_be_are_refused(parallel: ParallelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(parallel=parallel).validate()


def test_attention_decides_the_number_of_ranks() -> None:
    assert ParallelConfig().num_ranks == 1
    assert ParallelConfig(tp=2, dp_attention=3, ep=6, moe_tp=1).num_ranks == 6


LAUNCHER = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-0"}


def test_a_launcher_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    assert launched_rank() == LaunchedRank(3, 4, 1, 2, "node-0")


@pytest.mark.parametrize("missing", LAUNCHER)
def test_without_a_whole_launcher_there_is_none(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert launched_rank() is None


@pytest.mark.parametrize(("name", "value"), [("RANK", "4"), ("LOCAL_RANK", "2"), ("WORLD_SIZE", "many")])
def test_a_launcher_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for known, usual in LAUNCHER.items():
        monkeypatch.setenv(known, usual)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        launched_rank()
