# SPDX-License-Identifier: Apache-2.0
"""Latent attention in its two forms: one sum, and the cheaper of the two for each row."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.ops.mla_attention.portable import Row, absorbed, absorbs, expanded


def row(query_len: int, seq_len: int, dims: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> Row:
    latent_dim, nope_dim, rope_dim, value_dim = dims
    generator = torch.Generator().manual_seed(query_len * 1000 + seq_len)
    num_heads = 3

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Row(
        random(query_len, num_heads, nope_dim),
        random(query_len, num_heads, rope_dim),
        random(seq_len, latent_dim + rope_dim),
        random(num_heads, nope_dim, latent_dim),
        random(num_heads, value_dim, latent_dim),
        scale=0.3,
    )


@pytest.mark.parametrize(("query_len", "seq_len"), [(1, 1), (1, 40), (9, 9), (7, 31)])
@pytest.mark.parametrize("dims", [(24, 16, 8, 12), (5, 9, 2, 3)], ids=["wide-latent", "narrow-latent"])
def test_absorbed_and_expanded_are_the_same_sum(query_len: int, seq_len: int, dims: tuple[int, int, int, int]) -> None:
    torch.set_num_threads(1)
    one = row(query_len, seq_len, dims)
    torch.testing.assert_close(absorbed(one), expanded(one), rtol=1e-5, atol=1e-5)


def test_decodes_absorb_and_prefills_expand() -> None:
    real = (512, 128, 64, 128)
    assert absorbs(row(1, 1000, real))
    assert absorbs(row(8, 1000, real))
    assert not absorbs(row(300, 300, real))
    assert not absorbs(row(300, 1000, real))
