# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernels (csrc/cpu), one after the other. Turns in place what was not normalised into new memory."""

from __future__ import annotations

from types import ModuleType

import torch

from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.kernels.ops.rotary_kv_write import BF16_PAGES, INT8_PAGES
from tokenspeed.kernels.platform import CPU_DTYPES, CPU_PAGE_DTYPES, compiled_cpu, require_cpu_module
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution


def build(_ctx: KernelContext) -> Kernel:
    module = require_cpu_module()

    def rotary_kv_write(
        q_THK: torch.Tensor,
        k_TGK: torch.Tensor,
        v_TGK: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        slots_T: torch.Tensor,
        positions_T: torch.Tensor,
        table_PR: torch.Tensor | None,
        interleaved: bool = False,
        q_norm_K: torch.Tensor | None = None,
        k_norm_K: torch.Tensor | None = None,
        eps: float = 0.0,
        weight_offset: float = 0.0,
    ) -> torch.Tensor:
        assert slots_T.dtype is positions_T.dtype is torch.int64, (slots_T.dtype, positions_T.dtype)
        assert q_THK.stride(2) == k_TGK.stride(2) == v_TGK.stride(2) == 1, (q_THK.stride(), k_TGK.stride())
        assert (q_norm_K is None) == (k_norm_K is None), "a norm for one of q and k"
        if q_norm_K is not None and k_norm_K is not None:
            q_THK = _normalised(module, q_THK, q_norm_K, eps, weight_offset)
            k_TGK = _normalised(module, k_TGK, k_norm_K, eps, weight_offset)
        if table_PR is not None:
            assert table_PR.dtype is torch.float32, table_PR.dtype
            _turn(module, q_THK, positions_T, table_PR, interleaved)
            _turn(module, k_TGK, positions_T, table_PR, interleaved)
        _write(module, k_TGK, k_pages, slots_T)
        _write(module, v_TGK, v_pages, slots_T)
        return q_THK

    return rotary_kv_write


def _normalised(
    module: ModuleType, x_THK: torch.Tensor, weight_K: torch.Tensor, eps: float, weight_offset: float
) -> torch.Tensor:
    assert weight_K.dtype is x_THK.dtype, (weight_K.dtype, x_THK.dtype)
    out_THK = torch.empty(x_THK.shape, dtype=x_THK.dtype)
    no_residual, no_stride = 0, 0
    module.rms_norm(
        x_THK.data_ptr(),
        weight_K.data_ptr(),
        no_residual,
        out_THK.data_ptr(),
        *x_THK.shape,
        *x_THK.stride()[:2],
        no_stride,
        eps,
        weight_offset,
        CPU_DTYPES[x_THK.dtype],
    )
    return out_THK


def _turn(
    module: ModuleType, x_THK: torch.Tensor, positions_T: torch.Tensor, table_PR: torch.Tensor, interleaved: bool
) -> None:
    module.rotary(
        x_THK.data_ptr(),
        positions_T.data_ptr(),
        table_PR.data_ptr(),
        *x_THK.shape[:2],
        table_PR.shape[1],
        *x_THK.stride()[:2],
        table_PR.stride(0),
        interleaved,
        CPU_DTYPES[x_THK.dtype],
    )


def _write(module: ModuleType, source_TGK: torch.Tensor, pages: torch.Tensor, slots_T: torch.Tensor) -> None:
    assert pages.dtype in (source_TGK.dtype, torch.bfloat16, torch.int8), (source_TGK.dtype, pages.dtype)
    assert pages.shape[3] == page_dim(source_TGK.shape[2], pages.dtype), (source_TGK.shape, pages.shape)
    assert pages.stride(3) == 1, pages.stride()
    module.kv_write(
        source_TGK.data_ptr(),
        pages.data_ptr(),
        slots_T.data_ptr(),
        *source_TGK.shape,
        pages.shape[1],
        *source_TGK.stride()[:2],
        *pages.stride()[:3],
        CPU_DTYPES[source_TGK.dtype],
        CPU_PAGE_DTYPES[pages.dtype],
    )


SOLUTION = Solution(
    "cpu", Band.PERFORMANT, compiled_cpu, build, batch_invariant=True, features=frozenset({BF16_PAGES, INT8_PAGES})
)
