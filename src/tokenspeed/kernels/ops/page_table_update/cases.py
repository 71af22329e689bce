# SPDX-License-Identifier: Apache-2.0
"""Inputs of page_table_update: nothing to do, one block, seats cleared and set in one call, tables inside wider ones.
The dtype of a model changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from tokenspeed.kernels.conformance import BenchCase, Case, Cost, Tolerance

TOLERANCE = {torch.float32: Tolerance(0.0, 0.0), torch.bfloat16: Tolerance(0.0, 0.0)}


def cases(_dtype: torch.dtype) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(1, 99, (3, 9, 21), generator=generator, dtype=torch.int32)
    wide = torch.randint(1, 99, (2, 10, 2100), generator=generator, dtype=torch.int32)
    padded = torch.tensor([[8, 0, 0, 0]] * 3 + [[2, 1, 20, 7]], dtype=torch.int32)
    yield _case("nothing", tables, [], _delta((9, 3, 21), 0, generator))
    yield _case("one-block", tables, [], _delta((9, 3, 21), 1, generator))
    yield _case("cleared", tables, [0, 8, 0], _delta((9, 3, 21), 0, generator))
    yield _case("cleared-and-set", tables, [1, 2, 5], _delta((9, 3, 21), 40, generator))
    yield _case("padded", tables, [8], padded)
    yield _case("part-of-wider-tables", wide[:, :7, 3:2090], [6, 0], _delta((7, 2, 2087), 200, generator))
    yield _case("many", wide, [0, 3, 4, 9], _delta((10, 2, 2100), 300, generator))


def cost(num_groups: int, num_blocks: int, num_cleared: int, num_changes: int) -> Cost:
    return Cost(0, 4 * num_groups * num_blocks * num_cleared + 20 * num_changes)


def bench_cases(_dtype: torch.dtype, device: str) -> Iterator[BenchCase]:
    """256 seats of 128 K tokens: a step of decodes, and one that seats prompts."""
    for name, num_cleared, num_changes in (("decodes", 0, 4), ("prompts", 2, 128)):
        make = functools.partial(_bench_case, num_cleared, num_changes, device)
        yield BenchCase(name, make, cost(1, 2049, num_cleared, num_changes))


def _case(name: str, tables: torch.Tensor, cleared: list[int], delta_N4: torch.Tensor) -> Case:
    return Case(name, (tables, torch.tensor(cleared, dtype=torch.int32), delta_N4), mutated=(0,))


def _delta(sizes: tuple[int, int, int], num_changes: int, generator: torch.Generator) -> torch.Tensor:
    """Changes of distinct blocks; sizes: seats, groups, blocks."""
    num_seats, num_groups, num_blocks = sizes
    places_N = torch.randperm(num_seats * num_groups * num_blocks, generator=generator)[:num_changes]
    pages_N = torch.randint(1, 99, (num_changes,), generator=generator)
    seats_N, rest_N = places_N // (num_groups * num_blocks), places_N % (num_groups * num_blocks)
    return torch.stack((seats_N, rest_N // num_blocks, rest_N % num_blocks, pages_N), dim=1).int()


def _bench_case(num_cleared: int, num_changes: int, device: str) -> Case:
    tables = torch.zeros(1, 257, 2049, dtype=torch.int32, device=device)
    cleared_M = torch.arange(num_cleared, dtype=torch.int32, device=device)
    delta_N4 = _delta((257, 1, 2049), num_changes, torch.Generator().manual_seed(0)).to(device)
    return Case("bench", (tables, cleared_M, delta_N4), mutated=(0,))
