# SPDX-License-Identifier: Apache-2.0
"""The op decode_step on a CUDA device: every solution agrees with the reference, eagerly and from a graph whose rows
have moved on since it was captured."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drawn_dense import SHAPES, Drawn, Shape, agreement, copied, poison_unseen, solution
from tokenspeed.kernels.ops.decode_step import DecodeBatch, Prepare
from tokenspeed.kernels.ops.decode_step.cuda import persistent
from tokenspeed.kernels.ops.decode_step.reference import prepare as reference
from tokenspeed.kernels.registry import KernelContext, Reason, solutions_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SOLUTIONS = ("triton", "cuda")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
WIDE = {
    "wide": Shape(hidden_size=1024, ff_size=3072, vocab_size=4096, num_heads=16, num_kv_heads=4, head_dim=128,
                  block_size=64, rotary_dim=128),
    "biases-64": Shape(hidden_size=896, ff_size=4864, vocab_size=2048, num_heads=14, num_kv_heads=2, head_dim=64,
                       rotary_dim=64, qk_norm=False, biases=True, tied=True),
    "window-256": Shape(hidden_size=640, ff_size=2048, vocab_size=2048, num_heads=4, num_kv_heads=1, head_dim=256,
                        rotary_dim=256, window=100, activation="gelu_tanh_mul", weight_offset=1.0, embed_scale=25.0),
    "group-16": Shape(hidden_size=512, ff_size=14352, vocab_size=2048, num_heads=32, num_kv_heads=2, head_dim=128,
                      block_size=32, rotary_dim=32, interleaved=True, qk_norm=False),
    "group-1": Shape(hidden_size=2560, ff_size=1024, vocab_size=512, num_heads=20, num_kv_heads=20, head_dim=64,
                     block_size=64, rotary_dim=0),
}  # fmt: skip
POSITIONS = {
    "start": [0],
    "short": [70],
    "long": [3001],
    "rows": [0, 33, 1500, 64],
    "full": [900 + 7 * i for i in range(16)],
}


def prepare_of(name: str, dtype: torch.dtype) -> Prepare:
    """Of the solution, where it runs here."""
    ctx = KernelContext("cuda", dtype)
    support = next(item for item in solutions_of("decode_step") if item.name == name).supports(ctx)
    if isinstance(support, Reason):
        pytest.skip(support.text)
    return solution(name, "cuda", dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("shape", (SHAPES | WIDE).values(), ids=SHAPES | WIDE)
def test_the_chain_agrees_with_the_reference(shape: Shape, positions: list[int], dtype: torch.dtype) -> None:
    drawn = Drawn(shape, dtype, "cuda")
    agreement(prepare_of("triton", dtype), drawn, positions, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("positions", [[0], [1], [70], [129], [3001], [70, 33]], ids=str)
@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_the_persistent_kernel_agrees_with_the_reference(shape: Shape, positions: list[int]) -> None:
    drawn, prepare = Drawn(shape, torch.bfloat16, "cuda"), prepare_of("cuda", torch.bfloat16)
    assert not isinstance(persistent(drawn.model(2)), Reason)
    agreement(prepare, drawn, positions, tolerance=TOLERANCE[torch.bfloat16])


def test_the_persistent_kernel_leaves_small_heads_to_the_chain() -> None:
    prepare_of("cuda", torch.bfloat16)
    refused = persistent(Drawn(SHAPES["qk-norm"], torch.bfloat16, "cuda").model(2))
    assert isinstance(refused, Reason)
    assert "heads of 16" in refused.text


@pytest.mark.parametrize("name", SOLUTIONS)
@pytest.mark.parametrize("start", [[5], [5, 300]], ids=["one-row", "two-rows"])
def test_a_graph_serves_other_positions_than_those_it_was_captured_with(start: list[int], name: str) -> None:
    drawn = Drawn(WIDE["wide"], torch.bfloat16, "cuda")
    model = drawn.model(150)
    clean = copied(model, torch.bfloat16)
    step = prepare_of(name, torch.bfloat16)(model, 16)
    assert not isinstance(step, Reason)
    buffers = drawn.batch([2000] * len(start), 150)
    show(buffers, drawn.batch(start, 150))
    step(buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits_RV = step(buffers)
    for positions in ([1999, 3], [0, 1000], [64, 63], [1024, 1025]):
        show(buffers, drawn.batch(positions[: len(start)], 150))
        for ours, theirs in zip(model.layers, clean.layers, strict=True):
            ours.k_pages.copy_(theirs.k_pages)
            ours.v_pages.copy_(theirs.v_pages)
        poison_unseen(model, buffers)
        oracle = reference(copied(model, torch.float32), 16)
        assert not isinstance(oracle, Reason)
        logits_RV.fill_(float("nan"))
        graph.replay()
        expected_RV = oracle(buffers)
        assert float((logits_RV - expected_RV).norm() / expected_RV.norm()) < TOLERANCE[torch.bfloat16], positions


def show(buffers: DecodeBatch, batch: DecodeBatch) -> None:
    """Write a batch into the buffers that a graph reads."""
    for field in ("token_ids_R", "positions_R", "seq_lens_R"):
        getattr(buffers, field).copy_(getattr(batch, field))
    for ours, theirs in zip(buffers.block_tables, batch.block_tables, strict=True):
        ours.zero_()
        ours[:, : theirs.shape[1]] = theirs


def test_padded_rows_leave_the_others_as_they_are() -> None:
    drawn = Drawn(dataclasses.replace(WIDE["wide"], num_layers=1), torch.bfloat16, "cuda")
    model, batch = drawn.model(60), drawn.batch([130, 40], 60)
    step = prepare_of("triton", torch.bfloat16)(model, 16)
    assert not isinstance(step, Reason)
    pad = torch.zeros(2, dtype=torch.int64, device="cuda")
    tables = tuple(torch.cat((table, torch.zeros_like(table))) for table in batch.block_tables)
    padded = DecodeBatch(
        torch.cat((batch.token_ids_R, pad)), torch.cat((batch.positions_R, pad)),
        torch.cat((batch.seq_lens_R, pad.int())), tables,
    )  # fmt: skip
    torch.testing.assert_close(step(padded)[:2], step(batch), rtol=1e-3, atol=1e-3)
