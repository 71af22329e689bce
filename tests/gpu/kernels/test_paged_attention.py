# SPDX-License-Identifier: Apache-2.0
"""Attention on a CUDA device at the sizes of real models: agreement, captured launches whose rows move on, and answers
that do not depend on the batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tokenspeed.kernels.ops.paged_attention.reference import paged_attention as reference
from tokenspeed.kernels.registry import KernelContext, Reason, solutions_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CAPTURED = ("triton", "triton_invariant", "gluon", "flash_attn")
SOLUTIONS = (*CAPTURED, "flashinfer")


@dataclass(frozen=True)
class Shape:
    """rows: (query_len, seq_len). options: keywords of the op."""

    rows: Sequence[tuple[int, int]]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 64
    is_head_major: bool = True
    pages_dtype: torch.dtype = torch.bfloat16
    num_padding: int = 0
    has_sinks: bool = False
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


MIXED = ((1, 50), (1, 3001), (300, 300), (701, 5003), (0, 0), (67, 67), (2, 997))
SHAPES = {
    "decode": Shape(((1, 100), (1, 4003), (1, 64), (1, 1))),
    "one-long-row": Shape(((1, 3), (1, 40009), (1, 5))),
    "verify": Shape(((5, 4000), (2, 77), (4, 9001), (3, 3))),
    "empty-rows": Shape(((1, 100), (1, 0), (0, 0), (0, 7), (1, 1)), num_padding=3),
    "mixed": Shape(MIXED, num_padding=7),
    "prefill": Shape(((1, 3000), (4099, 8209))),
    "long-extend": Shape(((65, 30011),)),
    "few-long": Shape(((1, 4003), (17, 3001), (65, 9011), (0, 0)), num_padding=3),
    "few-long-window": Shape(((37, 20011), (1, 7)), options={"window": 5000}, has_sinks=True),
    "many-rows": Shape(tuple((17 + 37 * row, 500 + 91 * row) for row in range(40))),
    "window": Shape(MIXED, options={"window": 512}),
    "narrow-window": Shape(((1, 3000), (4099, 8209)), options={"window": 100}),
    "soft-cap": Shape(MIXED, options={"soft_cap": 30.0}),
    "sinks": Shape(((1, 3000), (4099, 8209)), has_sinks=True),
    "head-64": Shape(((1, 3000), (4099, 8209)), head_dim=64, num_heads=64),
    "head-80": Shape(MIXED, head_dim=80, num_heads=8),
    "head-96": Shape(MIXED, head_dim=96, num_heads=32, num_kv_heads=32),
    "head-256": Shape(MIXED, head_dim=256, num_heads=8, num_kv_heads=4),
    "prefill-head-256": Shape(((1, 3000), (4099, 8209)), head_dim=256, num_heads=8, num_kv_heads=4),
    "prefill-soft-cap": Shape(
        ((1, 3000), (4099, 8209)), head_dim=256, num_heads=8, num_kv_heads=4, options={"soft_cap": 30.0}
    ),
    "one-kv-head": Shape(MIXED, head_dim=64, num_heads=71, num_kv_heads=1),
    "seven-a-head": Shape(MIXED, num_heads=28, num_kv_heads=4),
    "small-blocks": Shape(MIXED, block_size=16),
    "large-blocks": Shape(MIXED, block_size=128),
    "token-major": Shape(MIXED, is_head_major=False),
    "fp8": Shape(MIXED, pages_dtype=torch.float8_e4m3fn),
    "fp8-prefill": Shape(((1, 3000), (4099, 8209)), pages_dtype=torch.float8_e4m3fn),
}


def built(name: str) -> Any:
    ctx = KernelContext("cuda", torch.bfloat16)
    solution = next(solution for solution in solutions_of("paged_attention") if solution.name == name)
    support = solution.supports(ctx)
    return pytest.skip(support.text) if isinstance(support, Reason) else solution.build(ctx)


def drawn(shape: Shape, num_pages: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """A call. Pages that no row has, and slots past a row's end, are NaN; the tables' unused entries lead nowhere."""
    torch.manual_seed(0)
    size, heads = shape.block_size, (shape.num_kv_heads, shape.head_dim)
    blocks = [-(-seq_len // size) for _, seq_len in shape.rows]
    num_pages = max(num_pages, sum(blocks) + 2)
    layout = (num_pages, heads[0], size, heads[1]) if shape.is_head_major else (num_pages, size, *heads)
    pools = [torch.full(layout, float("nan"), device="cuda").to(shape.pages_dtype) for _ in range(2)]
    pages = [pool.transpose(1, 2) if shape.is_head_major else pool for pool in pools]
    tables_RB = torch.full((len(blocks), max(blocks) + 100), 2**31 - 1, dtype=torch.int32, device="cuda")
    free = (num_pages - 1 - torch.randperm(sum(blocks), device="cuda")).int()
    for row, (_, seq_len) in enumerate(shape.rows):
        own, free = free[: blocks[row]], free[blocks[row] :]
        tables_RB[row, : blocks[row]] = own
        for pool in pages:
            values = torch.randn(blocks[row] * size, *heads, device="cuda")
            values[seq_len:] = float("nan")
            pool[own.long()] = values.view(blocks[row], size, *heads).to(shape.pages_dtype)
    starts = [0, *itertools.accumulate(query_len for query_len, _ in shape.rows)]
    fused = torch.randn(starts[-1] + shape.num_padding, shape.num_heads + 2, shape.head_dim, device="cuda").bfloat16()
    keywords = {
        "query_start": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "seq_lens_R": torch.tensor([seq_len for _, seq_len in shape.rows], dtype=torch.int32, device="cuda"),
        "block_tables_RB": tables_RB,
        "scale": shape.head_dim**-0.5,
        "window": None,
        "soft_cap": None,
        "max_query_len": max(query_len for query_len, _ in shape.rows),
        **shape.options,
    }
    if shape.has_sinks:
        keywords["sinks_H"] = torch.randn(shape.num_heads, device="cuda") * 3
    return (fused[:, : shape.num_heads], *pages), keywords


def expected(args: tuple[torch.Tensor, ...], keywords: Mapping[str, Any]) -> torch.Tensor:
    q_THK, k_pages, v_pages = args
    return reference(q_THK.float(), k_pages, v_pages, **keywords)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), wanted, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SOLUTIONS)
def test_agrees_with_the_reference(name: str, shape: Shape) -> None:
    args, keywords = drawn(shape)
    assert_close(built(name)(*args, **keywords), expected(args, keywords))


@pytest.mark.parametrize("name", SOLUTIONS)
def test_reads_pages_past_two_to_the_31_numbers(name: str) -> None:
    args, keywords = drawn(Shape(((1, 300), (300, 600), (2, 2))), num_pages=2**31 // (64 * 8 * 128) + 64)
    assert args[1].numel() > 2**31
    assert_close(built(name)(*args, **keywords), expected(args, keywords))


@pytest.mark.parametrize("name", CAPTURED)
@pytest.mark.parametrize("max_query_len", [1, 4100])
def test_a_captured_launch_serves_rows_of_other_lengths(name: str, max_query_len: int) -> None:
    kernel = built(name)
    num_rows = 4
    first, second = (
        (((1, 40), (1, 7), (0, 0), (1, 1)), ((1, 20011), (0, 1), (1, 999), (1, 1)))
        if max_query_len == 1
        else (((4000, 4001), (1, 8), (50, 50), (0, 0)), ((1, 9001), (2, 60), (4000, 12007), (1, 1)))
    )
    calls = [drawn(Shape(rows, num_padding=4100 - sum(n for n, _ in rows) if max_query_len > 1 else 1)) for rows in
             (first, second)]  # fmt: skip
    (args, keywords), (moved_args, moved) = calls
    num_tokens, num_pages = max(call[0][0].shape[0] for call in calls), max(call[0][1].shape[0] for call in calls)
    q_THK = torch.zeros(num_tokens, *args[0].shape[1:], dtype=torch.bfloat16, device="cuda")
    pages = [torch.zeros(num_pages, 8, 64, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(2)]
    columns = max(call[1]["block_tables_RB"].shape[1] for call in calls)
    static = {**keywords, "max_query_len": max_query_len, "query_start": torch.zeros_like(keywords["query_start"]),
              "seq_lens_R": torch.zeros_like(keywords["seq_lens_R"]),
              "block_tables_RB": torch.zeros(num_rows, columns, dtype=torch.int32, device="cuda")}  # fmt: skip

    def load(source: tuple[torch.Tensor, ...], words: Mapping[str, Any]) -> None:
        q_THK[: len(source[0])] = source[0]
        for pool, theirs in zip(pages, source[1:], strict=True):
            pool[: len(theirs)] = theirs
        for key in ("query_start", "seq_lens_R"):
            static[key].copy_(words[key])
        static["block_tables_RB"][:, : words["block_tables_RB"].shape[1]] = words["block_tables_RB"]

    load(args, keywords)
    kernel(q_THK, *pages, **static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THK = kernel(q_THK, *pages, **static)
    for theirs, words in ((moved_args, moved), (args, keywords)):
        load(theirs, words)
        out_THK.fill_(float("nan"))
        graph.replay()
        assert_close(out_THK, expected((q_THK, *pages), static))


@pytest.mark.parametrize("name", SOLUTIONS)
def test_gives_the_same_bits_again(name: str) -> None:
    kernel = built(name)
    args, keywords = drawn(SHAPES["mixed"])
    assert torch.equal(kernel(*args, **keywords), kernel(*args, **keywords))


@pytest.mark.parametrize("option", ["decode", "window", "soft-cap", "fp8", "small-blocks", "head-64"])
def test_a_token_has_the_same_bits_however_its_row_is_cut(option: str) -> None:
    kernel = built("triton_invariant")
    rows = ((1, 5000), (3, 4100), (300, 4000), (5000, 9000), (1, 40000))
    args, keywords = drawn(dataclasses.replace(SHAPES[option], rows=rows))
    whole_THK = kernel(*args, **keywords)
    starts = keywords["query_start"].tolist()
    for row, low, high in ((0, 0, 1), (1, 1, 3), (2, 17, 18), (2, 100, 300), (3, 0, 1), (3, 777, 3001), (4, 0, 1)):
        first, last = starts[row] + low, starts[row] + high
        alone = {
            **keywords,
            "query_start": torch.tensor([0, high - low], dtype=torch.int32, device="cuda"),
            "seq_lens_R": keywords["seq_lens_R"][row : row + 1] - (starts[row + 1] - last),
            "block_tables_RB": keywords["block_tables_RB"][row : row + 1],
            "max_query_len": high - low,
        }
        out_THK = kernel(args[0][first:last], *args[1:], **alone)
        assert torch.equal(out_THK, whole_THK[first:last]), (row, low, high)
