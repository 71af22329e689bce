# SPDX-License-Identifier: Apache-2.0
"""How the chain of Triton kernels cuts its products and its attention: measured tiles as data, a rule elsewhere.

Knows sizes. Does not know what is computed from them.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 16
"""Rows that the matrix instruction multiplies at once."""
PROGRAMS_MAX = 2048
"""Programs of one launch of attention at the most: scratch memory is sized by it."""
SPLITS_MAX = 8
"""Programs that share the inner dimension of a product at the most."""


@dataclass(frozen=True, slots=True)
class GemvTile:
    """A program multiplies `rows` rows of weights by tiles of `columns`, the first `preload` of which it loads before
    it waits for the kernel before. early: the next kernel may start before that wait."""

    rows: int
    columns: int
    preload: int
    warps: int
    evict: str = ""
    early: bool = True


@dataclass(frozen=True, slots=True)
class GemmTile:
    """A program multiplies `rows` rows of weights by tiles of `columns`. splits: programs that share the inner
    dimension. prefetch: bytes of each row pulled into L2 before the wait, 0 for none."""

    rows: int
    columns: int
    splits: int
    stages: int
    prefetch: int
    warps: int
    evict: str = ""


@dataclass(frozen=True, slots=True)
class AttendTile:
    """Tiles of `tokens`, shared out over at most `splits` programs with at least min_tiles each. first: the first tile
    is loaded before the wait."""

    tokens: int
    splits: int
    stages: int
    warps: int
    first: bool
    min_tiles: int = 1


@dataclass(frozen=True, slots=True)
class StepTiles:
    """Of one number of rows: GemvTile for a single row, GemmTile for more."""

    qkv: GemvTile | GemmTile
    out: GemvTile | GemmTile
    gate_up: GemvTile | GemmTile
    down: GemvTile | GemmTile
    head: GemvTile | GemmTile
    attend: AttendTile


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Outputs and inputs of the products, (N, K) each with gate_up's N counted once, and what attention needs."""

    qkv: tuple[int, int]
    out: tuple[int, int]
    gate_up: tuple[int, int]
    down: tuple[int, int]
    head: tuple[int, int]
    num_kv_heads: int
    head_dim: int
    block_size: int
    itemsize: int
    num_processors: int


_EVICT = "evict_first"

# Measured on one H200, bf16.
_GEMV = {
    ("qkv", 6144, 4096): GemvTile(4, 1024, 4, 4, early=False),
    ("out", 4096, 4096): GemvTile(8, 1024, 2, 4),
    ("gate_up", 12288, 4096): GemvTile(2, 4096, 1, 8, _EVICT),
    ("down", 4096, 12288): GemvTile(4, 1024, 4, 4, _EVICT),
    ("head", 151936, 4096): GemvTile(4, 2048, 2, 4, _EVICT),
}
_GEMM = {
    ("qkv", 6144, 4096): GemmTile(64, 256, 1, 4, 1024, 4),
    ("out", 4096, 4096): GemmTile(64, 128, 2, 6, 1024, 4),
    ("gate_up", 12288, 4096): GemmTile(64, 128, 1, 4, 512, 4),
    ("down", 4096, 12288): GemmTile(64, 256, 2, 4, 1024, 4),
    ("head", 151936, 4096): GemmTile(128, 128, 1, 4, 256, 8),
}


def tiles_for(num_rows: int, sizes: StepSizes) -> StepTiles:
    """What a step of so many rows runs with."""
    attend = _attend_tile(num_rows, sizes)
    if num_rows == 1:
        return StepTiles(
            _gemv_tile("qkv", *sizes.qkv, sizes),
            _gemv_tile("out", *sizes.out, sizes),
            _gemv_tile("gate_up", *sizes.gate_up, sizes),
            _gemv_tile("down", *sizes.down, sizes),
            _gemv_tile("head", *sizes.head, sizes),
            attend,
        )
    return StepTiles(
        _gemm_tile("qkv", *sizes.qkv, sizes),
        _gemm_tile("out", *sizes.out, sizes),
        _gemm_tile("gate_up", *sizes.gate_up, sizes),
        _gemm_tile("down", *sizes.down, sizes),
        _gemm_tile("head", *sizes.head, sizes),
        attend,
    )


def power_of_2(number: int) -> int:
    """The least power of two that is not below it."""
    return 1 << max(0, number - 1).bit_length()


def _gemv_tile(part: str, num_outputs: int, num_inputs: int, sizes: StepSizes) -> GemvTile:
    known = _GEMV.get((part, num_outputs, num_inputs))
    if known is not None and sizes.itemsize == 2:
        return known
    columns = min(power_of_2(num_inputs), 2048)
    preload = min(2, -(-num_inputs // columns))
    rows = 2 if part == "gate_up" else 4
    while num_outputs % rows:
        rows //= 2
    return GemvTile(rows, columns, preload, 4)


def _gemm_tile(part: str, num_outputs: int, num_inputs: int, sizes: StepSizes) -> GemmTile:
    known = _GEMM.get((part, num_outputs, num_inputs))
    if known is not None and sizes.itemsize == 2:
        return known
    rows = next(rows for rows in (64 if part in ("gate_up", "head") else 32, 32, 16) if num_outputs % rows == 0)
    columns = next(columns for columns in (128, 64, 32, 16) if num_inputs % columns == 0)
    return GemmTile(rows, columns, 1, 4, 0, 4)


def _attend_tile(num_rows: int, sizes: StepSizes) -> AttendTile:
    """As many programs as run at once, two to a processor, with up to three tiles of K and V of each on their way.
    Triton gives half of the stages to loading page numbers, which K and V wait for."""
    tokens = 64 if sizes.head_dim * sizes.itemsize <= 256 else 32
    buffers = min(3, max(1, 98304 // (2 * tokens * sizes.head_dim * sizes.itemsize)))
    splits = 2 * sizes.num_processors // (num_rows * sizes.num_kv_heads)
    splits = max(1, min(splits, 32, PROGRAMS_MAX // (num_rows * sizes.num_kv_heads)))
    if num_rows == 1:
        buffers = min(buffers, 2)
    return AttendTile(tokens, splits, 2 * buffers + 1, 4, first=True)
