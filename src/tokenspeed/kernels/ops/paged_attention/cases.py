# SPDX-License-Identifier: Apache-2.0
"""Inputs of paged_attention: rows of every kind side by side over scattered pages of a poisoned pool."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Row, Tolerance
from tokenspeed.kernels.kv_pages import to_codes
from tokenspeed.kernels.ops.paged_attention import BF16_PAGES, FP8_PAGES, INT8_PAGES

TOLERANCE = {torch.float32: Tolerance(1e-4, 1e-5), torch.bfloat16: Tolerance(1.6e-2, 1e-2)}


@dataclass(frozen=True, slots=True)
class _Shape:
    """rows: (query_len, seq_len). num_padding: query tokens that belong to no row. is_head_major: a head's part of a
    page is one run of memory. page_dtype: of pages, where it is not that of queries. num_columns: of the block tables,
    at least."""

    rows: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    window: int | None = None
    soft_cap: float | None = None
    num_padding: int = 0
    sinks: Sequence[float] | None = None
    is_head_major: bool = False
    page_dtype: torch.dtype | None = None
    num_columns: int = 0


_SHAPES: Mapping[str, _Shape] = {
    "no-rows": _Shape(()),
    "one-token": _Shape(((1, 1),)),
    "decode": _Shape(((1, 37), (1, 8), (1, 9), (1, 64))),
    "prefill": _Shape(((5, 5), (33, 33), (1, 1))),
    "mixed": _Shape(((1, 50), (17, 40), (0, 12), (3, 19), (40, 40), (1, 2)), num_padding=3),
    "odd-head": _Shape(((1, 21), (9, 30)), head_dim=20, num_heads=3, num_kv_heads=1),
    "tiny-head": _Shape(((1, 5), (4, 4)), head_dim=1, num_heads=1, num_kv_heads=1),
    "wide-head": _Shape(((1, 40), (6, 40)), head_dim=256, num_heads=4, num_kv_heads=1, block_size=16),
    "window-1": _Shape(((1, 40), (20, 33)), window=1),
    "window-7": _Shape(((1, 40), (20, 33), (1, 3)), window=7),
    "window-64": _Shape(((1, 300), (70, 200)), window=64, block_size=64),
    "soft-cap": _Shape(((1, 40), (20, 33)), soft_cap=3.0),
    "long": _Shape(((1, 2500), (33, 1100)), num_heads=3, num_kv_heads=1, block_size=16),
    "long-window": _Shape(((1, 2500), (3, 1100)), num_heads=3, num_kv_heads=1, window=700),
    "sinks": _Shape(((1, 40), (20, 33), (1, 1)), sinks=(0.5, -2.0, 30.0, -200.0), num_padding=1),
    "long-sinks-window": _Shape(((1, 1100), (3, 40)), num_heads=2, num_kv_heads=1, window=700, sinks=(1.0, 6.0)),
    "large-blocks": _Shape(((1, 129), (2, 128)), block_size=128),
    "head-major": _Shape(((1, 130), (70, 150), (1, 3)), head_dim=64, block_size=64, is_head_major=True),
    "padded-rows": _Shape(((1, 40), (3, 3), (1, 1), (0, 0), (0, 1)), num_padding=4, num_columns=50),
    "verify": _Shape(((2, 30), (3, 41), (4, 17), (5, 5), (1, 70)), num_heads=7, num_kv_heads=1),
    "one-long-row": _Shape(((1, 3), (1, 997), (2, 5)), block_size=16, is_head_major=True, num_columns=200),
    "fp8": _Shape(((1, 40), (20, 33)), page_dtype=torch.float8_e4m3fn),
}
_FEW_BITS_SHAPES = ("mixed", "odd-head", "wide-head", "window-7", "soft-cap", "sinks", "long", "head-major", "verify")
"""Those that queries meet in pages of int8 too, and of float32 also in such of bfloat16."""

_PAGES_FEATURES = {torch.float8_e4m3fn: FP8_PAGES, torch.bfloat16: BF16_PAGES, torch.int8: INT8_PAGES}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        yield _case(name, shape, dtype)
    for name in _FEW_BITS_SHAPES:
        yield _case(f"{name}-int8", dataclasses.replace(_SHAPES[name], page_dtype=torch.int8), dtype)
        if dtype is torch.float32:
            yield _case(f"{name}-bf16", dataclasses.replace(_SHAPES[name], page_dtype=torch.bfloat16), dtype)


def cost(pairs: int, kv_tokens: int, shape: tuple[int, int, int], itemsize: int) -> Cost:
    """pairs: (query, key) positions attended; kv_tokens: cached tokens read; shape: (H, G, K)."""
    num_heads, num_kv_heads, head_dim = shape
    return Cost(4 * pairs * num_heads * head_dim, 2 * kv_tokens * num_kv_heads * head_dim * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """32 query and 8 K/V heads of 128: decodes, a whole prompt, and a turn over a cached prefix."""
    shape = (32, 8, 128)
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
        yield BenchCase(name, make, cost(pairs, num_rows * seq_len, shape, dtype.itemsize))


def _bench_case(rows: tuple[int, int, int], dtype: torch.dtype, device: str) -> Case:
    """Scattered pages of 64 tokens, on a GPU with the tokens of a head together."""
    num_rows, query_len, seq_len = rows
    blocks = -(-seq_len // 64)
    k_pages, v_pages = torch.randn(2, num_rows * blocks + 1, 8, 64, 128, dtype=dtype, device=device).transpose(2, 3)
    if device == "cpu":
        k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
    tables_RB = (torch.randperm(num_rows * blocks, device=device) + 1).view(num_rows, blocks).int()
    keywords = {
        "query_start": torch.arange(num_rows + 1, device=device, dtype=torch.int32) * query_len,
        "seq_lens_R": torch.full((num_rows,), seq_len, device=device, dtype=torch.int32),
        "block_tables_RB": tables_RB,
        "scale": 128**-0.5,
        "window": None,
        "soft_cap": None,
        "max_query_len": query_len,
    }
    q_THK = torch.randn(num_rows * query_len, 32, 128, dtype=dtype, device=device)
    return Case("bench", (q_THK, k_pages, v_pages), keywords)


def _case(name: str, shape: _Shape, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(query_len for query_len, _ in shape.rows) + shape.num_padding
    fused = torch.randn(num_tokens, shape.num_heads + 2, shape.head_dim, generator=generator).to(dtype)
    tables_RB, k_pages, v_pages = _pool(shape, dtype, generator)
    starts = [0]
    for query_len, _ in shape.rows:
        starts.append(starts[-1] + query_len)
    keywords = {
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "seq_lens_R": torch.tensor([seq_len for _, seq_len in shape.rows], dtype=torch.int32),
        "block_tables_RB": tables_RB,
        "scale": 1.7 * shape.head_dim**-0.5,
        "window": shape.window,
        "soft_cap": shape.soft_cap,
    }
    if shape.sinks is not None:
        keywords["sinks_H"] = torch.tensor(shape.sinks)
    if shape.page_dtype is torch.int8:
        k_pages, v_pages = to_codes(k_pages), to_codes(v_pages)
    elif shape.page_dtype is not None:
        k_pages, v_pages = k_pages.to(shape.page_dtype), v_pages.to(shape.page_dtype)
    if shape.is_head_major:
        k_pages, v_pages = (pages.transpose(1, 2).contiguous().transpose(1, 2) for pages in (k_pages, v_pages))
    args = (fused[:, : shape.num_heads], k_pages, v_pages)
    rows = [_row(args, keywords, row, token) for row in range(len(shape.rows)) for token in range(shape.rows[row][0])]
    features = frozenset() if shape.page_dtype is None else frozenset({_PAGES_FEATURES[shape.page_dtype]})
    return Case(name, args, keywords, rows=tuple(rows[:: max(1, len(rows) // 24)]), features=features)


def _row(args: tuple[torch.Tensor, ...], keywords: Mapping[str, object], row: int, token: int) -> Row:
    """One token of a row as a decode of its own, as if the row had been cut just after it."""
    starts, seq_lens, tables = (keywords[name] for name in ("query_start", "seq_lens_R", "block_tables_RB"))
    assert isinstance(starts, torch.Tensor)
    assert isinstance(seq_lens, torch.Tensor)
    assert isinstance(tables, torch.Tensor)
    index = int(starts[row]) + token
    seq_len = int(seq_lens[row]) - (int(starts[row + 1]) - index) + 1
    alone = {
        **keywords,
        "query_start": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens_R": torch.tensor([seq_len], dtype=torch.int32),
        "block_tables_RB": tables[row : row + 1],
    }
    return Row((args[0][index : index + 1], *args[1:]), alone, lambda out_THK: out_THK[index : index + 1])


def _pool(
    shape: _Shape, dtype: torch.dtype, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block tables and K, V pages: scattered, NaN wherever no row has a token that some query may see."""
    blocks = [-(-seq_len // shape.block_size) for _, seq_len in shape.rows]
    num_pages = sum(blocks) + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    tables_RB = torch.zeros(len(blocks), max(shape.num_columns, max(blocks, default=0) + 1), dtype=torch.int32)
    tables_RB[:, max(blocks, default=0) + 1 :] = 2**31 - 1  # no row comes near: nobody may look there
    pool = torch.full((2, num_pages, shape.block_size, shape.num_kv_heads, shape.head_dim), float("nan"), dtype=dtype)
    for row, (query_len, seq_len) in enumerate(shape.rows):
        pages = [order.pop() for _ in range(blocks[row])]
        tables_RB[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        first_seen = 0 if shape.window is None else max(0, seq_len - query_len - shape.window + 1)
        for position in range(first_seen, seq_len):
            page, offset = pages[position // shape.block_size], position % shape.block_size
            values = torch.randn(2, shape.num_kv_heads, shape.head_dim, generator=generator)
            pool[:, page, offset] = values.to(dtype)
    return tables_RB, pool[0], pool[1]
