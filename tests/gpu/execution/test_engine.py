# SPDX-License-Identifier: Apache-2.0
"""An engine on a GPU: captured steps, steps op by op and the CPU give the same tokens; deterministic ones the same
whatever runs beside them."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tokenspeed.bench.streams import Streams, Timing
from tokenspeed.engine.process import InProcessEngine
from tokenspeed.llm.engine_client import EngineClient
from tokenspeed.llm.llm import engine_config

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LENGTHS = (5, 40, 64, 3, 300, 700, 17, 2100, 130)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def tokens(folder: Path, *, together: bool, temperature: float, again: bool = False, **options: object) -> list[object]:
    """What each prompt is answered with: one after the other, or all at once; `again` when they have been cached."""
    config = engine_config(
        model=str(folder), load_format="dummy", kv_tokens=16384, max_model_len=4096, max_num_seqs=16, **options
    )
    generator = np.random.default_rng(1)
    prompts = [generator.integers(1, 2000, length).tolist() for length in LENGTHS]

    async def run() -> list[Timing]:
        client = await EngineClient.start(InProcessEngine, config)
        try:
            if again:
                earlier = Streams(client)
                await asyncio.gather(*[earlier.run(prompt[:-2], 2, temperature) for prompt in prompts])
            streams = Streams(client)
            if together:
                return await asyncio.gather(*[streams.run(prompt, 24, temperature) for prompt in prompts])
            return [await streams.run(prompt, 24, temperature) for prompt in prompts]
        finally:
            await client.stop()

    return [timing.token_ids for timing in asyncio.run(run())]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_steps_steps_op_by_op_and_the_cpu_agree(folder: Path, temperature: float) -> None:
    run = partial(tokens, folder, together=True, temperature=temperature, dtype="float32")
    expected = run(device="cpu")
    assert run(device="cuda", graphs=False) == expected
    assert run(device="cuda") == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_tokens_depend_on_nothing_but_the_request(folder: Path, dtype: str) -> None:
    run = partial(tokens, folder, temperature=1.0, dtype=dtype, device="cuda", deterministic=True)
    alone = run(together=False)
    assert run(together=True) == alone
    assert run(together=True, again=True, max_num_batched_tokens=97) == alone
    assert run(together=True, graphs=False) == alone
