# SPDX-License-Identifier: Apache-2.0
"""Which tile reads a matrix of weights fastest for few rows, as measured, and a rule for the rest. Launches nothing."""

from __future__ import annotations

from tokenspeed.kernels.ops.linear._few_rows import Tile

BUCKETS = (16, 32, 64)
"""Rows of a tile: a call takes the first that holds all of its own."""

_QKV, _OUT, _GATE_UP, _DOWN, _HEAD = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)
_MEASURED: dict[tuple[int, tuple[int, int]], Tile | None] = {
    (16, _QKV): Tile(64, 128, num_splits=2, stages=3),
    (16, _OUT): Tile(64, 256, num_splits=2, stages=4, prefetch=512),
    (16, _GATE_UP): Tile(64, 128, stages=3),
    (16, _DOWN): Tile(64, 256, num_splits=2, stages=4, prefetch=512),
    (16, _HEAD): Tile(64, 128, stages=3),
    (32, _QKV): None,
    (32, _OUT): Tile(64, 256, num_splits=2, stages=4, prefetch=512),
    (32, _GATE_UP): Tile(64, 128, stages=3),
    (32, _DOWN): Tile(64, 256, num_splits=2, stages=4, prefetch=512),
    (32, _HEAD): Tile(64, 128, stages=3),
    (64, _QKV): None,
    (64, _OUT): Tile(64, 128, num_splits=2, stages=4, prefetch=512),
    (64, _GATE_UP): None,
    (64, _DOWN): Tile(64, 128, num_splits=2, stages=4, prefetch=512),
    (64, _HEAD): Tile(128, 128, stages=4),
}
"""Rows and (outputs, inputs) -> the tile that was fastest on an H200, None where cuBLAS was."""

_BUSY = 128
"""As many programs as it takes to draw all that the memory of an H200 gives."""


def bucket_of(num_rows: int) -> int | None:
    """None where there are too many rows for the kernel."""
    return next((rows for rows in BUCKETS if num_rows <= rows), None)


def tile_for(rows: int, num_outputs: int, num_inputs: int) -> Tile | None:
    """For a bucket's rows; None: cuBLAS."""
    known = (rows, (num_outputs, num_inputs))
    return _MEASURED[known] if known in _MEASURED else _by_rule(rows, num_outputs, num_inputs)


def _by_rule(rows: int, num_outputs: int, num_inputs: int) -> Tile | None:
    """Matrices of many outputs need no splits, and cuBLAS is as good at them when rows are many too."""
    inputs = min(128, max(16, 1 << (num_inputs - 1).bit_length()))
    num_tiles = -(-num_outputs // 64)
    if num_tiles < _BUSY and num_inputs >= 8 * inputs:
        return Tile(64, inputs, num_splits=2)
    return None if num_tiles >= _BUSY and rows == BUCKETS[-1] else Tile(64, inputs)
