# SPDX-License-Identifier: Apache-2.0
"""Prices: what a move, an exchange or an op costs on one rank, in femtoseconds, whole numbers so that sums are exact.

Knows bytes and launches. The figures are a model of a device, not a measurement; only their order of size matters for
which form wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tokenspeed.spmd.declare import PlacedExchange, Placement
from tokenspeed.spmd.graph import Op
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import Axes, Layout, MoveKind


@dataclass(frozen=True, slots=True)
class CostModel:
    """collective_fs: what any collective costs before its first byte. Bandwidths are those of one rank. The defaults
    are the order of size of a current data-centre GPU."""

    launch_fs: int = 3_000_000_000
    collective_fs: int = 8_000_000_000
    link_fs_per_byte: int = 5_000
    memory_fs_per_byte: int = 500

    def move_fs(self, kind: MoveKind, num_ranks: int, num_bytes: int) -> int:
        """One collective. num_bytes: of the rows as they are where they are whole. A slice is a view."""
        if kind is MoveKind.SLICE:
            return 0
        trips = 2 if kind is MoveKind.ALL_REDUCE else 1
        return self.collective_fs + trips * (num_ranks - 1) * num_bytes * self.link_fs_per_byte // num_ranks


@dataclass(frozen=True, slots=True)
class Pricing:
    """A cost model applied to a mesh and a number of tokens, shared out evenly."""

    model: CostModel
    mesh: Mesh
    num_tokens: int
    itemsize: int

    def num_rows(self, layout: Layout) -> int:
        """Rows on a rank."""
        parts = prod(size for size, letter in zip(self.mesh.axes, layout, strict=True) if letter == "S")
        return -(-self.num_tokens // parts)

    def move_fs(self, kind: MoveKind, axes: Axes, source: Layout, width: int) -> int:
        """A move of a value of this width that starts at a layout."""
        whole = "".join("R" if axis in axes else letter for axis, letter in enumerate(source))
        num_bytes = self.num_rows(whole) * width * self.itemsize
        return self.model.move_fs(kind, self.mesh.size_of(axes), num_bytes)

    def fused_fs(self, axes: Axes, source: Layout, width: int) -> int:
        """An all-reduce in one kernel with the op after it, which saves a launch."""
        return self.move_fs(MoveKind.ALL_REDUCE, axes, source, width) - self.model.launch_fs

    def exchange_fs(self, exchange: PlacedExchange, source: Layout) -> int:
        """A collective of an op that runs at a layout."""
        num_bytes = self.num_rows(source) * exchange.width * self.itemsize
        return self.model.move_fs(exchange.kind, self.mesh.size_of(exchange.axes), num_bytes)

    def op_fs(self, op: Op, source: Layout, exchanges: tuple[PlacedExchange, ...]) -> int:
        """The maths of an op at a layout, and its own exchanges."""
        placement: Placement = op.placement
        widths = sum(value.width for value in (*op.ins, *op.outs))
        num_bytes = self.num_rows(source) * (widths * self.itemsize + placement.bytes_per_token)
        local = placement.launches * self.model.launch_fs + num_bytes * self.model.memory_fs_per_byte
        return local + sum(self.exchange_fs(each, source) for each in exchanges)
