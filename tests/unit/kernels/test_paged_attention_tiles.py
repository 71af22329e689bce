# SPDX-License-Identifier: Apache-2.0
"""How many tiles of queries a launch is made for: never too few, and not those of rows that another launch attends."""

from __future__ import annotations

import random

import torch

from tokenspeed.kernels.ops.paged_attention.triton import Call, call_of

GROUPS = (1, 3, 4, 16)


def call_with(query_lens: list[int], group: int) -> Call:
    q_THK = torch.empty(sum(query_lens), group, 16)
    k_pages, v_pages = torch.empty(2, 1, 16, 1, 16)
    lens_R = torch.tensor(query_lens, dtype=torch.int32)
    starts = torch.nn.functional.pad(lens_R.cumsum(0), (1, 0)).int()
    tables = (starts, lens_R, torch.zeros(len(query_lens), 1, dtype=torch.int32))
    return call_of((q_THK, k_pages, v_pages), tables, None, (1.0, None, None), pdl=False)


def test_there_are_never_fewer_tiles_than_rows_make() -> None:
    rng = random.Random(0)
    for _ in range(300):
        group, m, longest = rng.choice(GROUPS), rng.choice((16, 64, 128)), rng.choice((1, 4, 60, 5000))
        query_lens = [rng.choice((0, 1, 2, 5, 33, 700)) for _ in range(rng.randint(1, 9))]
        made = sum(-(-query_len * group // m) for query_len in query_lens if query_len <= longest)
        assert call_with(query_lens, group).max_tiles(m, longest) >= made, (query_lens, group, m, longest)


def test_few_queries_a_row_make_few_tiles_beside_a_long_row() -> None:
    call = call_with([8192, 1, 1, 4], 4)
    assert call.max_tiles(16, 4) == 4
    assert call.max_tiles(128, 8192) == 4 + 8198 * 4 // 128
