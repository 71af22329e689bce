# SPDX-License-Identifier: Apache-2.0
"""Which tile reads a matrix of weights fastest for few rows, as measured, and a rule for the rest. Launches nothing."""

from __future__ import annotations

from tokenspeed.kernels.ops.linear._few_rows import Tile

BUCKETS = (16, 32, 64)
"""Rows of a tile: a call takes the first that holds all of its own."""

_MEASURED: dict[tuple[int, int, int], Tile | None] = {}
"""(rows, outputs, inputs) -> the fastest tile; None where cuBLAS is faster."""

_PROGRAMS = 264
"""As many programs as keep the memory of a large device busy."""


def bucket_of(num_rows: int) -> int | None:
    """None where there are too many rows for the kernel."""
    return next((rows for rows in BUCKETS if num_rows <= rows), None)


def tile_for(rows: int, num_outputs: int, num_inputs: int) -> Tile | None:
    """None: cuBLAS."""
    known = (rows, num_outputs, num_inputs)
    return _MEASURED[known] if known in _MEASURED else _by_rule(rows, num_outputs, num_inputs)


def _by_rule(_rows: int, num_outputs: int, num_inputs: int) -> Tile:
    inputs = min(128, max(16, 1 << (num_inputs - 1).bit_length()))
    num_tiles = -(-num_outputs // 64)
    num_splits = 1
    while num_tiles * num_splits * 2 <= 2 * _PROGRAMS and num_inputs >= 8 * inputs * num_splits and num_splits < 8:
        num_splits *= 2
    return Tile(64, inputs, num_splits)
