# SPDX-License-Identifier: Apache-2.0
"""Inputs of rotary_kv_write: with and without norms and positions, pairs of both kinds, parts of a fused projection,
pages with the block or the head outside."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance
from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops.rotary_kv_write import BF16_PAGES, FP8_PAGES, INT8_PAGES

TOLERANCE = {torch.float32: Tolerance(1e-5, 1e-5), torch.bfloat16: Tolerance(3.2e-2, 2e-2)}
_NUM_POSITIONS = 3000


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    plain = ((0, 2, 1, 8, 8), (1, 1, 1, 2, 2), (3, 10, 2, 20, 12), (7, 4, 1, 64, 64), (2, 5, 5, 48, None))
    for sizes in plain:
        name = "x".join(str(size) for size in sizes)
        yield _case(name, sizes, dtype, generator)
        if sizes[0] > 1:
            yield _case(f"{name}-normed", sizes, dtype, generator, eps=1e-6)
    sizes = (3, 4, 2, 16, 16)
    yield _case("interleaved", sizes, dtype, generator, interleaved=True)
    yield _case("interleaved-part-offset", (3, 4, 2, 16, 6), dtype, generator, interleaved=True, eps=1e-5, offset=1.0)
    yield _case("heads-outside", sizes, dtype, generator, heads_outside=True, eps=1e-5, offset=1.0)
    if dtype is torch.float32:  # what is rounded to 16 bits first too often lies halfway between two numbers of 8
        yield _in_fp8(_case("fp8-pages", sizes, dtype, generator, eps=1e-5, heads_outside=True))
        yield _in_bf16(_case("bf16-pages", sizes, dtype, generator, eps=1e-5, heads_outside=True))
        yield _in_bf16(_case("bf16-pages-odd", (3, 4, 2, 20, 12), dtype, generator))
    yield _in_fp8(_case("fp8-pages-loud", (3, 4, 2, 20, None), dtype, generator), scale=900.0)
    yield _in_int8(_case("int8-pages", sizes, dtype, generator, heads_outside=True))
    yield _in_int8(_case("int8-pages-odd", (3, 4, 2, 20, 12), dtype, generator, interleaved=True))
    apart = _case("apart", sizes, dtype, generator)
    q_THK, k_TGK, *others = apart.args
    assert isinstance(q_THK, torch.Tensor)
    assert isinstance(k_TGK, torch.Tensor)
    yield dataclasses.replace(apart, args=(q_THK.contiguous(), k_TGK.contiguous(), *others), rows=())
    yield _case("padded", (3, 3, 1, 16, 16), dtype, generator, num_padded=2)


def cost(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> Cost:
    elements = num_tokens * (num_heads + 2 * num_kv_heads) * head_dim
    return Cost(8 * elements, 2 * elements * itemsize + 4 * num_tokens * head_dim)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """The heads of an 8B decoder, normalised."""
    for num_tokens in (1, 16, 64, 8192):
        make = functools.partial(_bench_case, num_tokens, dtype, device)
        yield BenchCase(f"8b-{num_tokens}", make, cost(num_tokens, 32, 8, 128, dtype.itemsize))


def _case(
    name: str,
    sizes: tuple[int, int, int, int, int | None],
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    interleaved: bool = False,
    eps: float | None = None,
    offset: float = 0.0,
    heads_outside: bool = False,
    num_padded: int = 0,
) -> Case:
    """sizes: tokens, heads, K/V heads, dimensions of a head, those that turn (None without positions)."""
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim = sizes
    block_size, num_pages = 16, 2 + num_tokens // 8
    extent = (num_pages, num_kv_heads, block_size, head_dim)
    pages = [torch.zeros(extent, dtype=dtype).transpose(1, 2) for _ in range(2)]
    if not heads_outside:
        pages = [tensor.contiguous() for tensor in pages]
    qkv_TXK = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    num_live = num_tokens - num_padded
    slots_T = torch.randperm((num_pages - 1) * block_size, generator=generator)[:num_tokens] + block_size
    slots_T[num_live:] = torch.arange(num_padded)
    keywords: dict[str, object] = {"interleaved": interleaved, "slots_T": slots_T, "table_PR": None}
    keywords["positions_T"] = torch.randint(0, _NUM_POSITIONS, (num_tokens,), generator=generator)
    if rotary_dim is not None:
        keywords["table_PR"] = _table(rotary_dim)
    if eps is not None:
        weights = {f"{part}_norm_K": torch.randn(head_dim, generator=generator).to(dtype) for part in "qk"}
        keywords |= {**weights, "eps": eps, "weight_offset": offset}
    q_THK, k_TGK, v_TGK = qkv_TXK.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    args = (q_THK, k_TGK, v_TGK, *pages)
    rows = tuple(_row(args, keywords, index) for index in range(min(num_live, 2)))
    return Case(name, args, keywords, mutated=(3, 4), scratch=(0, 1), rows=rows)


def _in_fp8(case: Case, scale: float = 1.0) -> Case:
    """The same with pages of 8 bits. scale: of what is written."""
    q_THK, k_TGK, v_TGK, *pages = (tensor for tensor in case.args if isinstance(tensor, torch.Tensor))
    args = (q_THK, k_TGK * scale, v_TGK * scale, *(each.to(torch.float8_e4m3fn) for each in pages))
    return dataclasses.replace(case, args=args, rows=(), features=frozenset({FP8_PAGES}))


def _in_bf16(case: Case) -> Case:
    """The same with pages of 16 bits."""
    pages = [each.to(torch.bfloat16) for each in case.args[3:] if isinstance(each, torch.Tensor)]
    return dataclasses.replace(case, args=(*case.args[:3], *pages), rows=(), features=frozenset({BF16_PAGES}))


def _in_int8(case: Case) -> Case:
    """The same with pages of codes and scales. Heads turn by quarters, which rounds nothing, so that nothing near the
    middle of two codes falls to different sides."""
    pages = [
        each.new_zeros(*each.shape[:3], page_dim(each.shape[3], torch.int8), dtype=torch.int8)
        for each in case.args[3:]
        if isinstance(each, torch.Tensor)
    ]
    table_PR = case.keywords["table_PR"]
    assert isinstance(table_PR, torch.Tensor)
    quarters = torch.arange(table_PR.shape[0])[:, None] + torch.arange(table_PR.shape[1] // 2)
    turns = torch.tensor([1.0, 0.0, -1.0, 0.0])
    keywords = {**case.keywords, "table_PR": torch.cat((turns[quarters % 4], turns[(quarters + 3) % 4]), dim=1)}
    args = (*case.args[:3], *pages)
    return dataclasses.replace(case, args=args, keywords=keywords, rows=(), features=frozenset({INT8_PAGES}))


def _row(args: tuple[torch.Tensor, ...], keywords: dict[str, object], index: int) -> Row:
    row = slice(index, index + 1)
    cut = {name: value[row] if name.endswith("_T") else value for name, value in keywords.items()}  # type: ignore[index]
    inputs = tuple(part.clone()[row] for part in args[:3])
    return Row((*inputs, *(pages.clone() for pages in args[3:])), cut, lambda q_THK: q_THK[row])


def _bench_case(num_tokens: int, dtype: torch.dtype, device: str) -> Case:
    qkv_TXK = torch.randn(num_tokens, 48, 128, dtype=dtype, device=device)
    pages = torch.zeros(2, -(-num_tokens // 64) + 1, 8, 64, 128, dtype=dtype, device=device).transpose(2, 3)
    keywords = {
        "slots_T": torch.randperm(num_tokens, device=device) + 64,
        "positions_T": torch.randint(0, _NUM_POSITIONS, (num_tokens,), device=device),
        "table_PR": _table(128).to(device),
        "q_norm_K": torch.randn(128, dtype=dtype, device=device),
        "k_norm_K": torch.randn(128, dtype=dtype, device=device),
        "eps": 1e-6,
    }
    parts = qkv_TXK.split_with_sizes((32, 8, 8), dim=1)
    return Case("bench", (*parts, pages[0], pages[1]), keywords, mutated=(3, 4), scratch=(0, 1))


@functools.cache
def _table(rotary_dim: int) -> torch.Tensor:
    angles = torch.arange(_NUM_POSITIONS)[:, None] * torch.linspace(1.0, 0.01, rotary_dim // 2)
    return torch.cat((angles.cos(), angles.sin()), dim=1)
