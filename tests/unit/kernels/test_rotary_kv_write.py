# SPDX-License-Identifier: Apache-2.0
"""The fused op gives the very bits that its parts give one after the other, on the CPU kernels."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.platform import cpu_module
from tokenspeed.kernels.registry import KernelContext, bind

pytestmark = [
    pytest.mark.skipif(cpu_module() is None, reason="the compiled CPU kernels are not built"),
    pytest.mark.usefixtures("cpu_isa"),
]

DTYPES = (torch.float32, torch.bfloat16)


def drawn(dtype: torch.dtype, page_dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A fused projection's output and two pools."""
    generator = torch.Generator().manual_seed(0)
    qkv_TXK = torch.randn(11, 12, 32, generator=generator).to(dtype)
    return qkv_TXK, [torch.zeros(4, 16, 3, page_dim(32, page_dtype), dtype=page_dtype) for _ in "kv"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 16, 32])
@pytest.mark.parametrize("has_codes", [False, True])
def test_is_norm_then_rotary_then_write(
    dtype: torch.dtype, has_norm: bool, rotary_dim: int | None, has_codes: bool
) -> None:
    rms_norm, rotary, kv_write, fused = (
        bind(op, KernelContext("cpu", dtype)).call for op in ("rms_norm", "rotary", "kv_write", "rotary_kv_write")
    )
    page_dtype = torch.int8 if has_codes else dtype
    (qkv_TXK, pages), (fused_TXK, fused_pages) = drawn(dtype, page_dtype), drawn(dtype, page_dtype)
    positions_T, slots_T = torch.arange(11) * 7, torch.randperm(48)[:11] + 16
    weights = {f"{part}_norm_K": torch.linspace(0.5, 1.5, 32).to(dtype) for part in "qk"} if has_norm else {}
    table_PR = None if rotary_dim is None else torch.rand(80, rotary_dim)

    q_THK, k_TGK, v_TGK = qkv_TXK.split_with_sizes((6, 3, 3), dim=1)
    if has_norm:
        q_THK, k_TGK = (rms_norm(x, weights["q_norm_K"], None, eps=1e-5, weight_offset=1.0)[0] for x in (q_THK, k_TGK))
    if table_PR is not None:
        rotary(q_THK, k_TGK, positions_T, table_PR)
    kv_write(k_TGK, v_TGK, *pages, slots_T)

    turned_THK = fused(
        *fused_TXK.split_with_sizes((6, 3, 3), dim=1),
        *fused_pages,
        slots_T=slots_T,
        positions_T=positions_T,
        table_PR=table_PR,
        eps=1e-5,
        weight_offset=1.0,
        **weights,
    )
    assert torch.equal(turned_THK, q_THK)
    assert torch.equal(fused_pages[0], pages[0])
    assert torch.equal(fused_pages[1], pages[1])


def test_a_norm_for_one_of_q_and_k_is_refused() -> None:
    qkv_TXK, pages = drawn(torch.float32, torch.float32)
    fused = bind("rotary_kv_write", KernelContext("cpu", torch.float32)).call
    with pytest.raises(AssertionError, match="one of q and k"):
        fused(
            *qkv_TXK.split_with_sizes((6, 3, 3), dim=1),
            *pages,
            slots_T=torch.arange(16, 27),
            positions_T=torch.arange(11),
            table_PR=None,
            q_norm_K=torch.ones(32),
        )
