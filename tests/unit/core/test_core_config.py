# SPDX-License-Identifier: Apache-2.0
"""The configuration of the cache: what is refused, and in which words."""

from __future__ import annotations

import pytest

from tokenspeed.core.config import CacheConfig, EngineConfig
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
