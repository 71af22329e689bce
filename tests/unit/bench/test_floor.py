# SPDX-License-Identifier: Apache-2.0
"""Floors: what a step must read and compute, against sums done by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tokenspeed.bench.floor import Ceilings, ModelCost

DENSE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
    "sliding_window": None,
}
NUM_PARAMETERS = 8_190_735_360
KV_BYTES = 36 * 2 * 8 * 128 * 2


def cost(**changes: Any) -> ModelCost:
    return ModelCost.of({**DENSE, **changes}, NUM_PARAMETERS, "bfloat16", KV_BYTES)


def test_a_decode_reads_all_weights_but_the_embedding_and_its_context() -> None:
    num_bytes, flop = cost().decode((1152,))
    read = NUM_PARAMETERS - 151936 * 4096
    assert num_bytes == read * 2 + 1152 * KV_BYTES
    assert flop == 2 * read + 1152 * 36 * 4 * 32 * 128
    many, _ = cost().decode((1152,) * 16)
    assert many == read * 2 + 16 * 1152 * KV_BYTES


def test_a_tied_embedding_is_read_as_the_head() -> None:
    num_bytes, _ = cost(tie_word_embeddings=True).decode((0,))
    assert num_bytes == NUM_PARAMETERS * 2


def test_a_prompt_attends_what_is_cached_and_what_came_before() -> None:
    _, whole = cost().prefill(100)
    _, first = cost().prefill(60)
    _, rest = cost().prefill(40, 60)
    head = 2 * 151936 * 4096
    assert whole - head == (first - head) + (rest - head)


@pytest.mark.parametrize("window", [1, 7, 50, 99, 100, 200])
def test_a_window_bounds_what_a_token_attends(window: int) -> None:
    layers = ["sliding_attention", "full_attention"] * 18
    plain, windowed = cost(), cost(sliding_window=window, layer_types=layers)
    num_new, num_cached = 60, 40
    seen = [min(window, num_cached + place + 1) for place in range(num_new)]
    full = [num_cached + place + 1 for place in range(num_new)]
    missing = 18 * (sum(full) - sum(seen)) * plain.pair_flop
    assert plain.prefill(num_new, num_cached)[1] - windowed.prefill(num_new, num_cached)[1] == missing
    assert plain.decode((100,))[0] - windowed.decode((100,))[0] == 18 * (100 - min(100, window)) * KV_BYTES / 36


def test_a_window_that_is_switched_off_is_none() -> None:
    assert cost(sliding_window=64, use_sliding_window=False).windows == (None,) * 36


def test_only_the_experts_that_are_met_are_read() -> None:
    config = {**DENSE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    model = ModelCost.of(config, NUM_PARAMETERS, "bfloat16", KV_BYTES)
    assert model.experts is not None
    assert model.experts.num_layers == 35
    assert model.experts.expected(1) == pytest.approx(2.0)
    pairs = list(itertools.combinations(range(8), 2))
    met = [len({*a, *b}) for a in pairs for b in pairs]
    assert model.experts.expected(2) == pytest.approx(sum(met) / len(met))
    size = 3 * 4096 * 64
    routed = 35 * 8 * size
    read = NUM_PARAMETERS - routed - 151936 * 4096
    assert model.decode((0,))[0] == (read + 35 * 2 * size) * 2
    assert model.decode((0,))[1] == 2 * (read + 35 * 2 * size)


def test_a_latent_is_multiplied_whole_heads() -> None:
    mla = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert cost(**mla).pair_flop == 2 * 32 * (128 + 64 + 128)


def test_the_floor_is_what_takes_longer() -> None:
    ceilings = Ceilings("x", read_bytes_s=100.0, flop_s=10.0, cache_bytes=1)
    assert ceilings.floor_s(200, 10) == 2.0
    assert ceilings.floor_s(200, 30) == 3.0
