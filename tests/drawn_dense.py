# SPDX-License-Identifier: Apache-2.0
"""Dense models with random weights, of the op decode_step, and how a solution is held to the reference on them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from tokenspeed.kernels.kv_pages import from_codes, to_codes
from tokenspeed.kernels.ops.decode_step import GELU_TANH, SILU, DecodeBatch, DenseLayer, DenseModel, Prepare
from tokenspeed.kernels.ops.decode_step.reference import prepare as reference
from tokenspeed.kernels.registry import KernelContext, Reason, solutions_of


@dataclass(frozen=True)
class Shape:
    """A small model. rotary_dim 0: no positions."""

    hidden_size: int = 32
    ff_size: int = 48
    vocab_size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_layers: int = 2
    block_size: int = 16
    qk_norm: bool = True
    biases: bool = False
    tied: bool = False
    rotary_dim: int = 16
    interleaved: bool = False
    window: int | None = None
    embed_scale: float | None = None
    activation: str = SILU
    weight_offset: float = 0.0
    head_major: bool = True
    closing_norms: bool = False


SHAPES = {
    "qk-norm": Shape(),
    "biases": Shape(num_layers=1, qk_norm=False, biases=True, tied=True, num_heads=6),
    "window": Shape(window=20, num_kv_heads=1, block_size=64, weight_offset=1.0),
    "interleaved": Shape(
        num_layers=1, interleaved=True, rotary_dim=8, embed_scale=2.5, activation=GELU_TANH, head_major=False
    ),
    "no-positions": Shape(rotary_dim=0, hidden_size=48, ff_size=80, num_layers=1, qk_norm=False),
}


class Drawn:
    """Models and batches with random numbers, equal for equal seeds. page_dtype: of pages, None for the model's."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: str = "cpu",
        seed: int = 0,
        *,
        page_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.page_dtype = page_dtype or dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *size: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        values = torch.randn(size, generator=self.generator) * std + mean
        return values.to(self.dtype).to(self.device)

    def pages(self, num_pages: int) -> torch.Tensor:
        shape = self.shape
        extent = (num_pages, shape.num_kv_heads, shape.block_size, shape.head_dim)
        if shape.head_major:
            return self.kept(self.normal(*extent)).transpose(1, 2)
        return self.kept(self.normal(extent[0], extent[2], extent[1], extent[3]))

    def kept(self, numbers: torch.Tensor) -> torch.Tensor:
        """As pages keep them."""
        return to_codes(numbers) if self.page_dtype is torch.int8 else numbers.to(self.page_dtype)

    def layer(self, num_pages: int, window: int | None, group: int) -> DenseLayer:
        shape = self.shape
        hidden, ff = shape.hidden_size, shape.ff_size
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        gain = 1.0 - shape.weight_offset
        angles = torch.rand(4096, max(shape.rotary_dim // 2, 1), generator=self.generator) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)

        def bias(size: int) -> torch.Tensor | None:
            return self.normal(size, std=0.3) if shape.biases else None

        def closing_norm() -> torch.Tensor | None:
            return self.normal(hidden, std=0.2, mean=gain) if shape.closing_norms else None

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return self.normal(rows, columns, std=columns**-0.5)

        return DenseLayer(
            norm_before_attention=self.normal(hidden, std=0.2, mean=gain),
            qkv=matrix(q_size + 2 * kv_size, hidden),
            qkv_bias=bias(q_size + 2 * kv_size),
            q_norm=self.normal(shape.head_dim, std=0.2, mean=gain) if shape.qk_norm else None,
            k_norm=self.normal(shape.head_dim, std=0.2, mean=gain) if shape.qk_norm else None,
            out=matrix(hidden, q_size),
            out_bias=bias(hidden),
            norm_before_mlp=self.normal(hidden, std=0.2, mean=gain),
            gate_up=matrix(2 * ff, hidden),
            gate_up_bias=bias(2 * ff),
            down=matrix(hidden, ff),
            down_bias=bias(hidden),
            k_pages=self.pages(num_pages),
            v_pages=self.pages(num_pages),
            table_PR=table if shape.rotary_dim else None,
            interleaved=shape.interleaved,
            group=group,
            window=window,
            norm_after_attention=closing_norm(),
            norm_after_mlp=closing_norm(),
        )

    def model(self, num_pages: int) -> DenseModel:
        """With two cache groups where there is a window: of it, and of all tokens."""
        shape = self.shape
        windows = [shape.window if index % 2 == 0 else None for index in range(shape.num_layers)]
        layers = [self.layer(num_pages, window, index % 2) for index, window in enumerate(windows)]
        embed = self.normal(shape.vocab_size, shape.hidden_size)
        return DenseModel(
            embed=embed,
            embed_scale=shape.embed_scale,
            layers=tuple(layers),
            norm=self.normal(shape.hidden_size, std=0.2, mean=1.0 - shape.weight_offset),
            head=embed if shape.tied else self.normal(shape.vocab_size, shape.hidden_size, std=0.2),
            eps=1e-5,
            weight_offset=shape.weight_offset,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            activation=shape.activation,
        )

    def batch(self, positions: list[int], num_pages: int) -> DecodeBatch:
        """Pages dealt at random, no two rows with the same; rows at position 0 of a table of zeros are padded."""
        blocks = max(positions) // self.shape.block_size + 1
        tables = []
        for _ in range(2):
            pages = torch.randperm(num_pages - 1, generator=self.generator)[: len(positions) * blocks] + 1
            tables.append(pages.view(len(positions), blocks).int().to(self.device))
        tokens = torch.randint(0, self.shape.vocab_size, (len(positions),), generator=self.generator)
        places = torch.tensor(positions)
        lengths = (places + 1).int()
        return DecodeBatch(tokens.to(self.device), places.to(self.device), lengths.to(self.device), tuple(tables))


def copied(model: DenseModel, dtype: torch.dtype) -> DenseModel:
    """The model with pages of its own, all in a dtype; the tables of angles stay as they are, and so do pages of a
    dtype of their own."""

    def taken(name: str, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        is_apart = name in ("k_pages", "v_pages") and value.dtype is not model.embed.dtype
        return value.clone() if is_apart or name == "table_PR" else value.to(dtype, copy=True)

    def fields(part: DenseModel | DenseLayer) -> dict[str, object]:
        return {field.name: taken(field.name, getattr(part, field.name)) for field in dataclasses.fields(part)}

    layers = tuple(DenseLayer(**fields(layer)) for layer in model.layers)  # type: ignore[arg-type]
    return DenseModel(**{**fields(model), "layers": layers})  # type: ignore[arg-type]


def poison_unseen(model: DenseModel, batch: DecodeBatch) -> None:
    """NaN in every place of the pages that no row's token attends, the places of the new tokens included."""
    for layer in model.layers:
        seen = torch.zeros(layer.k_pages.shape[:2], dtype=torch.bool)
        block_size = layer.k_pages.shape[1]
        for row, position in enumerate(batch.positions_R.tolist()):
            first = 0 if layer.window is None else max(0, position - layer.window + 1)
            places = torch.arange(first, position)
            pages = batch.block_tables[layer.group][row].cpu()[places // block_size].long()
            seen[pages, places % block_size] = True
        unseen = ~seen[:, :, None, None].to(layer.k_pages.device)
        for pages in (layer.k_pages, layer.v_pages):
            if pages.dtype is torch.int8:
                nothing = to_codes(torch.full_like(from_codes(pages), float("nan")))
                pages.copy_(torch.where(unseen, nothing, pages))
            else:
                pages.masked_fill_(unseen, float("nan"))


def numbers_of(pages: torch.Tensor) -> torch.Tensor:
    """What pages keep, in float32."""
    return from_codes(pages) if pages.dtype is torch.int8 else pages.float()


def solution(name: str, device: str, dtype: torch.dtype) -> Prepare:
    found = next(item for item in solutions_of("decode_step") if item.name == name)
    return found.build(KernelContext(device, dtype))


def agreement(prepare: Prepare, drawn: Drawn, positions: list[int], *, tolerance: float) -> None:
    """A step on poisoned pages: logits and pages as the reference has them in float32, and on a device equal bits."""
    num_pages = 2 + len(positions) * (max(positions) // drawn.shape.block_size + 1)
    model, batch = drawn.model(num_pages), drawn.batch(positions, num_pages)
    poison_unseen(model, batch)
    expected_model = copied(model, torch.float32)
    step, oracle = prepare(model, 16), reference(expected_model, 16)
    assert not isinstance(step, Reason), step
    assert not isinstance(oracle, Reason), oracle
    logits_RV = step(batch)
    assert logits_RV.dtype is torch.float32
    if logits_RV.is_cuda:  # an interpreted step is slow, and does nothing at once
        assert torch.equal(logits_RV, step(batch))
    expected_RV = oracle(batch)
    error = float((logits_RV - expected_RV).norm() / expected_RV.norm())
    assert error < tolerance, f"logits differ by {error:.1e}"
    for ours, theirs in zip(model.layers, expected_model.layers, strict=True):
        for actual, expected in ((ours.k_pages, theirs.k_pages), (ours.v_pages, theirs.v_pages)):
            torch.testing.assert_close(
                numbers_of(actual), numbers_of(expected), rtol=tolerance, atol=tolerance * 4, equal_nan=True
            )
