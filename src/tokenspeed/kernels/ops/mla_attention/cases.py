# SPDX-License-Identifier: Apache-2.0
"""Inputs of mla_attention: decodes, prefills, chunks over a cached prefix, over scattered pages of a poisoned pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Tolerance

TOLERANCE = {torch.float32: Tolerance(1e-4, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 2e-2)}


@dataclass(frozen=True, slots=True)
class _Shape:
    """rows: (query_len, seq_len). dims: latent, nope, rope, value. num_padding: query tokens that belong to no row."""

    rows: Sequence[tuple[int, int]]
    dims: tuple[int, int, int, int] = (32, 16, 8, 16)
    num_heads: int = 4
    block_size: int = 8
    num_padding: int = 0


_SHAPES: Mapping[str, _Shape] = {
    "no-rows": _Shape(()),
    "one-token": _Shape(((1, 1),)),
    "decode": _Shape(((1, 37), (1, 8), (1, 9), (1, 64))),
    "prefill": _Shape(((5, 5), (33, 33), (1, 1))),
    "over-a-prefix": _Shape(((7, 50), (40, 90), (2, 9))),
    "mixed": _Shape(((1, 50), (17, 40), (0, 12), (3, 19), (40, 40), (1, 2)), num_padding=3),
    "odd-dims": _Shape(((1, 21), (9, 30)), dims=(20, 5, 6, 7), num_heads=3),
    "one-head": _Shape(((1, 5), (4, 4)), dims=(1, 1, 2, 1), num_heads=1),
    "real-dims": _Shape(((1, 70), (5, 65)), dims=(512, 128, 64, 128), num_heads=2, block_size=64),
    "large-blocks": _Shape(((1, 129), (2, 128)), block_size=128),
}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        yield _case(name, shape, dtype)


def cost(pairs: int, kv_tokens: int, shape: tuple[int, int, int], itemsize: int) -> Cost:
    """Absorbed, products with the weights left out. pairs: (query, key) positions attended; kv_tokens: cached tokens
    read; shape: (H, C, E)."""
    num_heads, latent_dim, rope_dim = shape
    return Cost(2 * pairs * num_heads * (2 * latent_dim + rope_dim), kv_tokens * (latent_dim + rope_dim) * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """16 heads over a latent of 512 and 64: decodes, a whole prompt, and a turn over a cached prefix."""
    for name, num_rows, query_len, seq_len in (
        ("decode-1x1024", 1, 1, 1024),
        ("decode-1x32768", 1, 1, 32768),
        ("decode-16x8192", 16, 1, 8192),
        ("decode-64x8192", 64, 1, 8192),
        ("extend-1024-over-8192", 1, 1024, 9216),
        ("prefill-8192", 1, 8192, 8192),
    ):
        pairs = num_rows * (query_len * seq_len - query_len * (query_len - 1) // 2)
        make = functools.partial(_bench_case, (num_rows, query_len, seq_len), dtype, device)
        yield BenchCase(name, make, cost(pairs, num_rows * seq_len, (16, 512, 64), dtype.itemsize))


def _bench_case(rows: tuple[int, int, int], dtype: torch.dtype, device: str) -> Case:
    """Scattered pages of 64 tokens."""
    num_rows, query_len, seq_len = rows
    blocks = -(-seq_len // 64)
    tables_RB = (torch.randperm(num_rows * blocks, device=device) + 1).view(num_rows, blocks).int()
    keywords = {
        "query_start": torch.arange(num_rows + 1, device=device, dtype=torch.int32) * query_len,
        "seq_lens_R": torch.full((num_rows,), seq_len, device=device, dtype=torch.int32),
        "block_tables_RB": tables_RB,
        "scale": 192**-0.5,
    }
    q_THX = torch.randn(num_rows * query_len, 16, 192, dtype=dtype, device=device)
    weights_HXC = torch.randn(16, 256, 512, dtype=dtype, device=device) * 512**-0.5
    pages = torch.randn(num_rows * blocks + 1, 64, 1, 576, dtype=dtype, device=device)
    return Case(
        "bench", (q_THX[..., :128], q_THX[..., 128:], pages, weights_HXC[:, :128], weights_HXC[:, 128:]), keywords
    )


def _case(name: str, shape: _Shape, dtype: torch.dtype) -> Case:
    """Queries and weights are views side by side in one tensor each, as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    latent_dim, nope_dim, rope_dim, value_dim = shape.dims
    num_tokens = sum(query_len for query_len, _ in shape.rows) + shape.num_padding
    q_THX = torch.randn(num_tokens, shape.num_heads, nope_dim + rope_dim, generator=generator).to(dtype)
    weights_HXC = torch.randn(shape.num_heads, nope_dim + value_dim, latent_dim, generator=generator)
    weights_HXC = (weights_HXC * latent_dim**-0.5).to(dtype)
    tables_RB, pages = _pool(shape, dtype, generator)
    starts = [0]
    for query_len, _ in shape.rows:
        starts.append(starts[-1] + query_len)
    keywords = {
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "seq_lens_R": torch.tensor([seq_len for _, seq_len in shape.rows], dtype=torch.int32),
        "block_tables_RB": tables_RB,
        "scale": 1.3 * (nope_dim + rope_dim) ** -0.5,
    }
    queries = (q_THX[..., :nope_dim], q_THX[..., nope_dim:])
    return Case(name, (*queries, pages, weights_HXC[:, :nope_dim], weights_HXC[:, nope_dim:]), keywords)


def _pool(shape: _Shape, dtype: torch.dtype, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables and latent pages: scattered, NaN wherever no row has a token; pages lie in a wider pool."""
    blocks = [-(-seq_len // shape.block_size) for _, seq_len in shape.rows]
    num_pages = sum(blocks) + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    tables_RB = torch.zeros(len(blocks), max(blocks, default=0) + 1, dtype=torch.int32)
    width = shape.dims[0] + shape.dims[2]
    pool = torch.full((num_pages, shape.block_size, 2, width), float("nan"), dtype=dtype)
    for row, (_, seq_len) in enumerate(shape.rows):
        pages = [order.pop() for _ in range(blocks[row])]
        tables_RB[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for position in range(seq_len):
            values = torch.randn(width, generator=generator).to(dtype)
            pool[pages[position // shape.block_size], position % shape.block_size, 1] = values
    return tables_RB, pool[:, :, 1:]
