# SPDX-License-Identifier: Apache-2.0
"""Inputs of kv_write: nothing to write, one token, heads inside a wider row, pages inside a wider pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Tolerance
from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops.kv_write import BF16_PAGES, FP8_PAGES, INT8_PAGES

TOLERANCE = {torch.float32: Tolerance(0.0, 0.0), torch.bfloat16: Tolerance(0.0, 0.0)}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for num_tokens, num_heads, head_dim, block_size in ((0, 1, 8, 8), (1, 1, 1, 8), (9, 3, 20, 16), (20, 2, 64, 32)):
        shape = (20, block_size, num_heads, head_dim)
        k_pages, v_pages = torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype)
        k_TGK, v_TGK = torch.randn(2, num_tokens, num_heads, head_dim, generator=generator).to(dtype)
        slots_T = torch.randperm(19 * block_size, generator=generator)[:num_tokens] + block_size
        name = f"{num_tokens}x{num_heads}x{head_dim}"
        yield Case(name, (k_TGK, v_TGK, k_pages, v_pages, slots_T), mutated=(2, 3))
    fused_TN = torch.randn(3, 5, 16, generator=generator).to(dtype)
    pool = torch.zeros(12, 8, 2, 3, 16, dtype=dtype)
    slots_T = torch.tensor([95, 8, 40])
    arguments = (fused_TN[:, 1:3], fused_TN[:, 3:5], pool[:, :, :, 0], pool[:, :, :, 2], slots_T)
    yield Case("fused-heads-strided-pages", arguments, mutated=(2, 3))
    kv_TX = torch.randn(6, 24, generator=generator).to(dtype)[:, None]
    pages = torch.full((5, 8, 1, 24), float("nan"), dtype=dtype)
    slots_T = torch.tensor([8, 39, 17, 9, 30, 25])
    arguments = (kv_TX[..., :17], kv_TX[..., 17:], pages[..., :17], pages[..., 17:], slots_T)
    yield Case("parts-of-a-latent", arguments, mutated=(2, 3))
    apart = (kv_TX[..., :17].contiguous(), *arguments[1:])
    yield Case("parts-from-two-places", apart, mutated=(2, 3))
    loud_TGK = 900 * torch.randn(3, 2, 2, 16, generator=generator).to(dtype)
    pages = torch.zeros(2, 4, 8, 2, 16).to(torch.float8_e4m3fn)
    arguments = (loud_TGK[:, 0], loud_TGK[:, 1] / 1000, pages[0], pages[1], torch.tensor([9, 31, 8]))
    yield Case("fp8-pages", arguments, mutated=(2, 3), features=frozenset({FP8_PAGES}))
    for head_dim in (37, 20, 256):
        yield _in_int8(head_dim, dtype, generator)
    if dtype is torch.float32:
        pages = torch.full((2, 4, 2, 8, 37), float("nan"), dtype=torch.bfloat16).transpose(2, 3)
        k_TGK, v_TGK = torch.randn(3, 4, 37, generator=generator).split_with_sizes((2, 2), dim=1)
        k_TGK[0, 0, :4] = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x3F808001], dtype=torch.int32).view(dtype)
        arguments = (k_TGK, v_TGK, pages[0], pages[1], torch.tensor([9, 31, 8]))
        yield Case("bf16-pages", arguments, mutated=(2, 3), features=frozenset({BF16_PAGES}))


def _in_int8(head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> Case:
    """Heads of zeros, too small for a scale, with numbers halfway between two codes where a head is its own transform,
    and with such as are not finite, into pages with room between heads."""
    k_TGK, v_TGK = torch.randn(7, 4, head_dim, generator=generator).split_with_sizes((2, 2), dim=1)
    k_TGK[0, 0], k_TGK[0, 1], v_TGK[2, 1] = 0.0, 1e-38, 3e38 * v_TGK[2, 1].sign()
    k_TGK[1, 0] = torch.arange(head_dim) - 0.5
    k_TGK[1, 0, 5] = -127.0
    k_TGK[3, 0, -1], v_TGK[4, 1, 0], v_TGK[5, 0, 7] = float("nan"), float("inf"), -float("inf")
    extent = (2, 4, 2, 8, page_dim(head_dim, torch.int8) + 3)
    pages = torch.full(extent, 77, dtype=torch.int8)[..., :-3].transpose(2, 3)
    slots_T = torch.tensor([9, 31, 8, 14, 25, 17, 30])
    arguments = (k_TGK.to(dtype), v_TGK.to(dtype), pages[0], pages[1], slots_T)
    return Case(f"int8-pages-{head_dim}", arguments, mutated=(2, 3), features=frozenset({INT8_PAGES}))


def cost(num_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int) -> Cost:
    return Cost(0, 4 * num_tokens * num_kv_heads * head_dim * itemsize)


def bench_cases(dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """8 K/V heads of 128 into pages of 64 tokens."""

    def make(num_tokens: int) -> Case:
        heads_TNK = torch.randn(num_tokens, 48, 128, dtype=dtype, device=device)
        k_pages, v_pages = torch.zeros(2, 256, 8, 64, 128, dtype=dtype, device=device).transpose(2, 3)
        slots_T = torch.randperm(255 * 64, device=device)[:num_tokens] + 64
        return Case("bench", (heads_TNK[:, 32:40], heads_TNK[:, 40:], k_pages, v_pages, slots_T), mutated=(2, 3))

    for num_tokens in (1, 16, 64, 8192):
        yield BenchCase(str(num_tokens), functools.partial(make, num_tokens), cost(num_tokens, 8, 128, dtype.itemsize))
