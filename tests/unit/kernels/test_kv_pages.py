# SPDX-License-Identifier: Apache-2.0
"""What codes and scales keep of a head."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.kv_pages import from_codes, page_dim, to_codes


def drawn(head_dim: int) -> torch.Tensor:
    return torch.randn(3, 50, head_dim, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("head_dim", [1, 20, 64, 80, 96, 128, 256])
def test_a_head_is_off_by_half_a_code_at_most(head_dim: int) -> None:
    x_K = drawn(head_dim)
    pages = to_codes(x_K)
    assert pages.dtype is torch.int8
    assert pages.shape == (3, 50, page_dim(head_dim, torch.int8)) == (3, 50, head_dim + 4)
    error = (from_codes(pages) - x_K).norm(dim=-1)
    run = head_dim & -head_dim
    scale = pages[..., -4:].contiguous().view(torch.float32)[..., 0]  # of the head; a code of its transform is sqrt(n)
    assert bool((error <= 0.5001 * scale * (run * head_dim) ** 0.5).all())
    assert bool((error <= 0.02 * x_K.norm(dim=-1)).all())
    assert bool((pages[..., :-4].abs().amax(dim=-1) == 127).all())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_channel_that_is_many_times_the_others_does_not_take_their_codes(head_dim: int) -> None:
    x_K = drawn(head_dim)
    x_K[..., 5] += 60.0
    off = (from_codes(to_codes(x_K)) - x_K).square().mean().sqrt()
    step = x_K.abs().amax(dim=-1, keepdim=True) / 127
    plain = ((x_K / step).round() * step - x_K).square().mean().sqrt()
    assert float(off) < float(plain) / 3


def test_nothing_stays_nothing_and_what_is_not_finite_says_so() -> None:
    heads = torch.zeros(4, 64)
    heads[1, 3], heads[2, 3], heads[3] = float("nan"), float("inf"), 1e-35
    kept = from_codes(to_codes(heads))
    assert not bool(kept[0].any())
    assert bool(kept[1:3].isnan().all())
    assert not bool(kept[3].any())
