# SPDX-License-Identifier: Apache-2.0
"""Long rows by FlashInfer's kernels for Hopper, an optional library.

Its schedule is made on the host out of the rows' lengths, so each call waits for the device: it serves steps that run
op by op and no captured ones. It compiles with nvcc at the first call of each head size and kind of score.
"""

from __future__ import annotations

import itertools

import torch

from tokenspeed.kernels.ops.paged_attention import _library
from tokenspeed.kernels.ops.paged_attention._library import Rows
from tokenspeed.kernels.registry import Band, Kernel, KernelContext, Solution, Support

VERSION = "0.7."
HEAD_DIMS = (64, 128, 256)
WORKSPACE = 128 << 20
"""Bytes, for what it merges."""


def supports(ctx: KernelContext) -> Support:
    return _library.supports(ctx, "flashinfer-python", VERSION, "flashinfer")


def build(ctx: KernelContext) -> Kernel:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=ctx.device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa3")

    def attend(rows: Rows) -> torch.Tensor:
        starts, lengths, pages = schedule(rows)
        num_heads, head_dim = rows.q_THK.shape[1:]
        _, num_kv_heads, block_size, _ = rows.k_pages.transpose(1, 2).shape
        wrapper.plan(
            starts,
            torch.tensor([0, *itertools.accumulate(-(-length // block_size) for length in lengths)], dtype=torch.int32),
            pages,
            torch.tensor([(length - 1) % block_size + 1 for length in lengths], dtype=torch.int32),
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            causal=True,
            sm_scale=rows.scale,
            logits_soft_cap=rows.soft_cap or 0.0,
            q_data_type=rows.q_THK.dtype,
            kv_data_type=rows.k_pages.dtype,
        )
        out_THK = torch.empty(rows.q_THK.shape, dtype=rows.q_THK.dtype, device=rows.q_THK.device)
        last = int(starts[-1])
        pools = (rows.k_pages.transpose(1, 2), rows.v_pages.transpose(1, 2))
        wrapper.run(rows.q_THK[:last], pools, out=out_THK[:last])
        return out_THK

    return _library.attention(ctx, takes, attend)


def schedule(rows: Rows) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """query_start on the host, tokens that each row attends, and the pages of these end to end, on the device.

    Rows of few queries attend one token of page 0, which is always there; their answers are not asked for.
    """
    num_rows, block_size = rows.seq_lens_R.shape[0], rows.k_pages.shape[1]
    numbers = torch.cat((rows.query_start, rows.seq_lens_R)).cpu()
    starts, seq_lens = numbers[: num_rows + 1], numbers[num_rows + 1 :].tolist()
    is_long = (starts.diff() > rows.few).tolist()
    lengths = [seq_len if long else 1 for seq_len, long in zip(seq_lens, is_long, strict=True)]
    page_0 = rows.block_tables_RB.new_zeros(1)
    pages = [
        rows.block_tables_RB[row, : -(-length // block_size)] if is_long[row] else page_0
        for row, length in enumerate(lengths)
    ]
    return starts, lengths, torch.cat(pages)


def takes(rows: Rows) -> bool:
    has_runs = all(pages.transpose(1, 2).is_contiguous() for pages in (rows.k_pages, rows.v_pages))
    return has_runs and rows.sinks_H is None and rows.q_THK.shape[2] in HEAD_DIMS


SOLUTION = Solution("flashinfer", Band.PORTABLE, supports, build)  # below ours: it waits for the device
