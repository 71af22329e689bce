# SPDX-License-Identifier: Apache-2.0
"""A step of one token a row in one call has the bits of the layers run one by one, in logits and in pages; models that
are not dense are refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tokenspeed.kernels.ops.decode_step import DecodeBatch
from tokenspeed.kernels.platform import compiled_cpu
from tokenspeed.kernels.registry import KernelContext, Ok, Reason, bind
from tokenspeed.layers.decoder import TOKEN_IDS
from tokenspeed.spmd.step import StepInput

pytestmark = pytest.mark.skipif(
    compiled_cpu(KernelContext("cpu", torch.float32)) != Ok(), reason="the compiled CPU kernels are not built"
)
DENSE = (
    "llama", "llama-biases-mha-tied", "llama-wide-heads", "llama-yarn-mscale", "qwen2", "qwen2-windows", "qwen3",
    "qwen3-biases-yarn", "mistral-window", "smollm3-windows", "phi3", "gemma3",
)  # fmt: skip
OTHERS = {
    "mixtral": "more than attention of grouped heads and a gated feed-forward",
    "deepseek_v3": "more than attention of grouped heads and a gated feed-forward",
    "olmo3": "its norms stand elsewhere",
    "gemma3-untied-linear": "its logits have a soft cap",
}


class _Whole:
    """In place of the Forward of a session."""

    def __init__(self, session: Any, model: Any) -> None:
        dense, self._layers, self.num_steps = model.dense(session.kv_layers), session.forward, 0
        assert not isinstance(dense, str), dense
        step = bind("decode_step", KernelContext("cpu", torch.float32)).call(dense, 3)
        assert not isinstance(step, Reason), step
        self._step = step

    def logits(self, step: StepInput) -> torch.Tensor:
        batch = step.context
        if batch.max_query_len > 1:
            return self._layers.logits(step)  # type: ignore[no-any-return]
        self.num_steps += 1
        tables = tuple(group.block_tables_RB for group in batch.groups)
        return self._step(  # type: ignore[no-any-return]
            DecodeBatch(step.sources[TOKEN_IDS], batch.positions_T, batch.seq_lens_R, tables)
        )


@pytest.mark.parametrize("name", DENSE)
def test_a_whole_step_has_the_bits_of_the_layers(
    name: str, new_twin: Callable[..., Any], new_session: Callable[..., Any]
) -> None:
    model = new_twin(name).ours
    ids = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    one_by_one, whole = (new_session(model, 3, 48) for _ in range(2))
    whole.forward = _Whole(whole, model)
    steps = [{0: ids[:17], 2: ids[:3]}, {0: ids[20:21]}, {0: ids[21:22], 1: ids[:1], 2: ids[3:4]}, {1: ids[1:9]}]
    steps += [{1: [ids[9 + index]], 2: [ids[20 + index]]} for index in range(12)]
    for chunks in steps:
        expected, actual = one_by_one.step(chunks), whole.step(chunks)
        assert all(torch.equal(expected[row], actual[row]) for row in chunks), chunks
    assert whole.forward.num_steps == 14
    for theirs, ours in zip(one_by_one.kv_layers, whole.kv_layers, strict=True):
        torch.testing.assert_close((ours.k, ours.v), (theirs.k, theirs.v), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_parts_are_refused(
    name: str, new_twin: Callable[..., Any], new_session: Callable[..., Any]
) -> None:
    model = new_twin(name).ours
    assert OTHERS[name] in model.dense(new_session(model, 1, 8).kv_layers)
