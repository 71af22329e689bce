# SPDX-License-Identifier: Apache-2.0
"""A transfer has ended when all ranks have said so, and well only when all were."""

from __future__ import annotations

import pytest

from tokenspeed.engine.transfers import TransferLedger


def test_a_lease_ends_with_the_last_rank() -> None:
    ledger = TransferLedger(3)
    ledger.note(2, [(7, True), (8, True)])
    ledger.note(0, [(7, True)])
    assert ledger.take() == ()
    ledger.note(1, [(8, True), (7, True)])
    assert ledger.take() == ((7, True),)
    ledger.note(0, [(8, True)])
    assert ledger.take() == ((8, True),)
    assert ledger.take() == ()


@pytest.mark.parametrize("unlucky", [0, 1])
def test_a_lease_that_one_rank_lost_is_lost(unlucky: int) -> None:
    ledger = TransferLedger(2)
    for rank in (0, 1):
        ledger.note(rank, [(7, rank != unlucky)])
    assert ledger.take() == ((7, False),)


def test_a_lease_may_come_again() -> None:
    ledger = TransferLedger(2)
    for _ in range(2):
        ledger.note(0, [(7, True)])
        ledger.note(1, [(7, True)])
        assert ledger.take() == ((7, True),)


def test_a_rank_that_tells_a_lease_twice_is_wrong() -> None:
    ledger = TransferLedger(2)
    ledger.note(1, [(7, True)])
    with pytest.raises(AssertionError, match="rank 1 tells the end of lease 7 twice"):
        ledger.note(1, [(7, True)])
