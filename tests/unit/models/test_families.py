# SPDX-License-Identifier: Apache-2.0
"""Every family agrees with its transformers twin, however the tokens are cut into steps and batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

VOCAB_SIZE = 97
RELATIVE_TOLERANCE = 1e-4
LENGTHS = (37, 1, 9, 64, 23, 80, 50, 16)


def token_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def assert_agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max()
    error = float((actual - expected).abs().max() / scale)
    assert error <= RELATIVE_TOLERANCE, f"relative error {error}"


def run_in_chunks(session: Any, ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(session.step({0: ids[start : start + size]})[0])
        start += size
    assert start == len(ids)
    return torch.cat(pieces)


def test_whole_prefill(twin: Any, new_session: Callable[..., Any]) -> None:
    ids = token_ids(90)
    actual = new_session(twin.ours, 1, 90).step({0: ids})[0]
    assert_agree(actual, twin.expected(ids))


def test_chunked_prefill_at_odd_sizes_then_cached_decode(twin: Any, new_session: Callable[..., Any]) -> None:
    ids = token_ids(90, seed=1)
    actual = run_in_chunks(new_session(twin.ours, 1, 90), ids, [7, 1, 17, 3, 31, 11] + [1] * 20)
    assert_agree(actual, twin.expected(ids))


@pytest.mark.parametrize("kernels", [{}, {"paged_attention": "reference"}], ids=["own-choice", "reference"])
def test_window_layers_hold_only_their_window(
    new_twin: Callable[..., Any], new_session: Callable[..., Any], kernels: dict[str, str]
) -> None:
    """Chunks longer and shorter than the window of 11, then decode: the blocks behind it are gone, and no token
    differs."""
    for variant in ("gemma3", "qwen2-windows"):
        twin = new_twin(variant, kernels)
        ids = token_ids(90, seed=2)
        session = new_session(twin.ours, 1, 90)
        assert_agree(run_in_chunks(session, ids, [40, 5, 33] + [1] * 12), twin.expected(ids))
        # The last token sits at 89 and looks back to 79 or 77: blocks 0 to 8 of 8 tokens each are out of its sight.
        assert session.num_holes(0) == [0, 9]


def test_batch_of_eight_mixed_lengths_prefill_and_decode_in_one_step(
    twin: Any, new_session: Callable[..., Any]
) -> None:
    all_ids = [token_ids(length + 4, seed=row) for row, length in enumerate(LENGTHS)]
    session = new_session(twin.ours, len(LENGTHS), 90)
    pieces: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    first = {row: all_ids[row][: LENGTHS[row] // 2] for row in range(0, 8, 2)}
    second = {row: all_ids[row][session.lens[row] + len(first.get(row, ())) : LENGTHS[row]] for row in range(8)}
    decodes = [{row: [all_ids[row][LENGTHS[row] + step]] for row in range(8)} for step in range(4)]
    for chunks in (first, second, *decodes):
        for row, logits in session.step(chunks).items():
            pieces[row].append(logits)
    for row, ids in enumerate(all_ids):
        assert_agree(torch.cat(pieces[row]), twin.expected(ids))
