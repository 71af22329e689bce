# SPDX-License-Identifier: Apache-2.0
"""What was stored comes back byte for byte; a move that cannot be made fails alone and moves nothing."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.transfer import BlockMover, PageGroup, resolve

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NOTHING = np.zeros((0, 4), np.int32)


def rows(*values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int32).reshape(-1, 4)


def random_pages(num_blocks: int, *page: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_blocks)
    return torch.randn(num_blocks + 1, *page, generator=generator).to(device, dtype)


def make_groups(device: str = "cpu", num_host_blocks: int = 11) -> tuple[PageGroup, PageGroup]:
    """Two groups of different sizes, page shapes and numbers of tensors."""
    first = tuple(random_pages(12, 4, 2, layer + 1, device=device) for layer in range(3))
    second = tuple(random_pages(6, 4, 5, device=device, dtype=torch.bfloat16) for _ in range(2))
    return PageGroup(first, num_host_blocks), PageGroup(second, num_host_blocks)


def copies(group: PageGroup) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in group.tensors]


def settle(mover: BlockMover, num_moves: int) -> list[tuple[int, bool]]:
    """All finished moves, once there are so many."""
    finished = list(mover.poll())
    deadline = time.monotonic() + 10.0
    while len(finished) < num_moves and time.monotonic() < deadline:
        finished += mover.poll()
    return finished


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_stored_comes_back_byte_for_byte(device: str) -> None:
    groups = make_groups(device)
    mover = resolve("host")(groups)
    before = [copies(group) for group in groups]
    # Lease 5 spans both groups; its pages are neighbours (2, 3, 4 → 6, 7, 8), or on one side only, or strangers.
    first = rows((5, 1, 6, 1), (5, 0, 2, 6), (5, 0, 3, 7), (5, 0, 4, 8), (5, 0, 5, 10), (5, 0, 8, 11))
    mover.start(NOTHING, np.concatenate([first, rows((9, 0, 12, 3), (9, 0, 11, 2))]))
    assert settle(mover, 2) == [(5, True), (9, True)]
    for group in groups:
        for tensor in group.tensors:
            tensor[1:].fill_(float("nan"))
    mover.start(rows((1, 0, 2, 6), (1, 0, 3, 7), (1, 0, 4, 10), (1, 0, 6, 11), (1, 1, 5, 1), (2, 0, 1, 2)), NOTHING)
    assert settle(mover, 2) == [(1, True), (2, True)]
    for now, then in zip(groups[0].tensors, before[0], strict=True):
        assert torch.equal(now[[1, 2, 3, 4, 6]].cpu(), then[[11, 2, 3, 5, 8]].cpu())
        assert now[[5, 7, 8, 9, 10, 11, 12]].isnan().all(), "a load wrote beside its pages"
        assert torch.equal(now[0].cpu(), then[0].cpu())
    for now, then in zip(groups[1].tensors, before[1], strict=True):
        assert torch.equal(now[5].cpu(), then[6].cpu())
        assert now[[1, 2, 3, 4, 6]].isnan().all()


def test_host_pages_outlive_what_the_device_does_with_its_own() -> None:
    """A page is copied, not lent; and storing again replaces it."""
    groups = make_groups()
    mover = resolve("host")(groups)
    mover.start(NOTHING, rows((1, 0, 1, 1)))
    original = groups[0].tensors[0][1].clone()
    groups[0].tensors[0][1] += 1.0
    mover.start(rows((2, 0, 7, 1)), NOTHING)
    assert torch.equal(groups[0].tensors[0][7], original)
    mover.start(NOTHING, rows((3, 0, 1, 1)))
    mover.start(rows((4, 0, 7, 1)), NOTHING)
    assert torch.equal(groups[0].tensors[0][7], original + 1.0)
    assert mover.poll() == ((1, True), (2, True), (3, True), (4, True))
    assert mover.poll() == ()


@pytest.mark.parametrize(
    "wrong",
    [(7, 2, 1, 1), (7, -1, 1, 1), (7, 0, 0, 1), (7, 0, 13, 1), (7, 0, 1, 0), (7, 0, 1, 12), (7, 1, 7, 1)],
    ids=["group", "no-group", "null-page", "device", "peer-page", "host", "device-of-its-group"],
)
@pytest.mark.parametrize("to_host", [True, False])
def test_a_move_that_cannot_be_made_fails_alone(
    wrong: tuple[int, ...], to_host: bool, caplog: pytest.LogCaptureFixture
) -> None:
    groups = make_groups()
    mover = resolve("host")(groups)
    before = copies(groups[0])
    moves = rows((7, 0, 3, 3), wrong, (8, 0, 4, 4))
    with caplog.at_level(logging.ERROR):
        mover.start(*((NOTHING, moves) if to_host else (moves, NOTHING)))
    assert sorted(mover.poll()) == [(7, False), (8, True)]
    assert "transfer 7 failed" in caplog.text
    assert torch.equal(groups[0].tensors[0][3], before[0][3]), "a failed load moved a page"


def test_an_error_while_copying_is_a_failed_move(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mover = resolve("host")(make_groups())
    pairs = mover._byte_pairs
    frozen = tuple((np.broadcast_to(device, device.shape), host) for device, host in pairs[0])  # not writable
    monkeypatch.setattr(mover, "_byte_pairs", (frozen, pairs[1]))
    with caplog.at_level(logging.ERROR):
        mover.start(rows((3, 0, 1, 1), (4, 1, 1, 1)), NOTHING)
    assert mover.poll() == ((3, False), (4, True))
    assert "transfer 3 failed" in caplog.text


def test_without_tensors_every_move_is_done_at_once() -> None:
    mover = resolve("host")((PageGroup((), 4),))
    mover.start(rows((1, 0, 900, 4)), rows((2, 0, 900, 1)))
    assert mover.poll() == ((1, True), (2, True))


def test_without_host_blocks_every_move_fails() -> None:
    mover = resolve("host")(make_groups(num_host_blocks=0))
    mover.start(NOTHING, rows((1, 0, 1, 1)))
    assert mover.poll() == ((1, False),)


def test_movers_are_found_by_name() -> None:
    with pytest.raises(ConfigError, match="no block mover is called 'carrier-pigeon'; there are host"):
        resolve("carrier-pigeon")


def test_a_large_host_tier_takes_memory_only_as_it_fills() -> None:
    pages = torch.zeros(3, 1 << 20)
    before = resident_bytes()
    mover = resolve("host")((PageGroup((pages,), 512),))  # 2 GiB
    pages[1] = 2.0
    mover.start(NOTHING, rows((1, 0, 1, 512)))
    mover.start(rows((2, 0, 2, 512)), NOTHING)
    assert mover.poll() == ((1, True), (2, True))
    assert (pages[2] == 2.0).all()
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
