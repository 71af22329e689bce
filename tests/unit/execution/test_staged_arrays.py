# SPDX-License-Identifier: Apache-2.0
"""Arrays in one piece of memory: what was given, then padding; each where kernels like it, always in the same place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenspeed.execution.staged_arrays import Section, StagedArrays


def made() -> StagedArrays:
    return StagedArrays(
        (
            Section("ids", 3, np.int64, lambda given: given["ids"], 7),
            Section("starts", 3, np.int32, lambda given: given["starts"], None),
            Section("odd", 1, np.float32, lambda given: given["odd"], 0.5),
            Section("counts", 2, np.int32, lambda given: given["counts"]),
        ),
        torch.device("cpu"),
    )


def numbers(arrays: StagedArrays) -> dict[str, list[Any]]:
    return {name: arrays[name].tolist() for name in ("ids", "starts", "odd", "counts")}


def test_what_is_not_given_is_padding() -> None:
    arrays = made()
    given = {"ids": np.array([2**40, -1]), "starts": np.array([0, 9]), "odd": np.zeros(0), "counts": np.array([5, 6])}
    arrays.fill(given)
    assert numbers(arrays) == {"ids": [2**40, -1, 7], "starts": [0, 9, 9], "odd": [0.5], "counts": [5, 6]}
    arrays.fill({**given, "ids": np.zeros(0), "starts": np.zeros(0), "odd": np.array([2.5])})
    assert numbers(arrays) == {"ids": [7, 7, 7], "starts": [0, 0, 0], "odd": [2.5], "counts": [5, 6]}
    arrays.fill(None)
    assert numbers(arrays) == {"ids": [7, 7, 7], "starts": [0, 0, 0], "odd": [0.5], "counts": [0, 0]}


def test_every_array_stays_where_it_is_and_begins_at_a_multiple_of_16_bytes() -> None:
    arrays = made()
    names = ("ids", "starts", "odd", "counts")
    before = [arrays[name].data_ptr() for name in names]
    arrays.fill(None)
    assert [arrays[name].data_ptr() for name in names] == before
    assert all((place - before[0]) % 16 == 0 for place in before)
    assert [arrays[name].dtype for name in names] == [torch.int64, torch.int32, torch.float32, torch.int32]
