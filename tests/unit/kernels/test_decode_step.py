# SPDX-License-Identifier: Apache-2.0
"""The op decode_step: the chain of Triton kernels, interpreted, agrees with the reference on small models of many
shapes, and touches nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from drawn_dense import SHAPES, Drawn, Shape, agreement, solution
from tokenspeed.kernels.ops.decode_step import DecodeStep, DenseModel
from tokenspeed.kernels.ops.decode_step._tiles import AttendTile, GemmTile, GemvTile, StepTiles
from tokenspeed.kernels.ops.decode_step.triton import TritonStep
from tokenspeed.kernels.registry import Reason

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it compiled")
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("positions", [[70], [0, 33, 69]], ids=["one-row", "rows"])
def test_triton_agrees_with_the_reference_where_it_is_interpreted(name: str, positions: list[int]) -> None:
    drawn = Drawn(SHAPES[name], torch.float32)
    agreement(solution("triton", "cpu", torch.float32), drawn, positions, tolerance=1e-5)


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it compiled")
@pytest.mark.parametrize("positions", [[70], [0, 33]], ids=["one-row", "rows"])
def test_other_tiles_compute_the_same(positions: list[int]) -> None:
    """Several programs share a product, a program has many tiles of weights, and no tile is loaded before the wait."""
    product = GemvTile(8, 16, 2, 4) if len(positions) == 1 else GemmTile(16, 16, 2, 3, 0, 4)
    whole = product if len(positions) == 1 else GemmTile(16, 16, 1, 3, 0, 4)
    tiles = StepTiles(product, product, whole, whole, whole, AttendTile(16, 3, 3, 4, first=False, min_tiles=2))

    def prepare(model: DenseModel, max_rows: int) -> DecodeStep | Reason:
        step = solution("triton", "cpu", torch.float32)(model, max_rows)
        assert isinstance(step, TritonStep)
        step.tiles[len(positions)] = tiles
        return step

    drawn = Drawn(Shape(num_layers=1, block_size=64), torch.float32)
    agreement(prepare, drawn, positions, tolerance=1e-5)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(head_dim=48, rotary_dim=16), "heads of 48"),
        (Shape(hidden_size=40), "not multiples of 16"),
        (Shape(num_heads=34), "34 heads on 2"),
        (Shape(activation="relu_mul"), "relu_mul"),
    ],
    ids=["head-dim", "hidden-size", "heads", "activation"],
)
@needs_triton
def test_what_the_chain_cannot_run_it_refuses_in_words(shape: Shape, words: str) -> None:
    refused = solution("triton", "cpu", torch.float32)(Drawn(shape, torch.float32).model(2), 16)
    assert isinstance(refused, Reason)
    assert words in refused.text


@needs_triton
def test_pages_that_lie_differently_are_refused() -> None:
    model = Drawn(Shape(num_layers=1), torch.float32).model(2)
    layer = dataclasses.replace(model.layers[0], v_pages=model.layers[0].v_pages.contiguous())
    refused = solution("triton", "cpu", torch.float32)(dataclasses.replace(model, layers=(layer,)), 16)
    assert isinstance(refused, Reason)
    assert "lie differently" in refused.text


@needs_triton
def test_pages_of_fewer_bits_than_the_weights_are_refused() -> None:
    model = Drawn(Shape(num_layers=1), torch.float32, page_dtype=torch.bfloat16).model(2)
    refused = solution("triton", "cpu", torch.float32)(model, 16)
    assert isinstance(refused, Reason)
    assert "pages of another dtype" in refused.text
