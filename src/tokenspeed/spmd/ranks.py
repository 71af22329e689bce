# SPDX-License-Identifier: Apache-2.0
"""A rank's collectives along the axes of a mesh, over a communicator that knows only ranks; and a rank that is alone.

Knows torch tensors. Does not know programs or how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokenspeed.kernels.ops.collective import Communicator, RankGroup
from tokenspeed.spmd.graph import Value
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import Axes, MoveKind, Rows
from tokenspeed.spmd.program import Plan


class Alone:
    """The collectives of one rank: rows are taken, and there is nobody to exchange with. See executor.Collectives."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def index(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

    def take(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, index)

    def zeros(self, num_rows: int, value: Value) -> torch.Tensor:
        return torch.zeros(num_rows, value.width, dtype=self._dtype, device=self._device)

    def all_reduce(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        raise AssertionError(f"one rank has no axes {axes}")

    def all_gather(self, x: torch.Tensor, axes: Axes, counts: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError(f"one rank has no axes {axes}")

    def reduce_scatter(self, x: torch.Tensor, axes: Axes, counts: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError(f"one rank has no axes {axes}")

    def exchange(self, kind: MoveKind, parts: tuple[torch.Tensor, ...], axes: Axes) -> tuple[torch.Tensor, ...]:
        raise AssertionError(f"one rank has no axes {axes}")


class MeshCollectives(Alone):
    """The groups of a mesh that some plans need. All ranks make one alike, since that makes the groups."""

    def __init__(
        self,
        communicator: Communicator,
        mesh: Mesh,
        plans: Iterable[Plan],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(device, dtype)
        needed = {axes for plan in plans for each in plan.variants for _, axes in each.program.collectives()}
        self._groups: dict[Axes, RankGroup] = {
            axes: communicator.group(mesh.process_groups(axes)) for axes in sorted(needed)
        }

    def all_reduce(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        return self._groups[axes].all_reduce(x)

    def all_gather(self, x: torch.Tensor, axes: Axes, counts: tuple[int, ...]) -> torch.Tensor:
        return self._groups[axes].all_gather(x, counts)

    def reduce_scatter(self, x: torch.Tensor, axes: Axes, counts: tuple[int, ...]) -> torch.Tensor:
        return self._groups[axes].reduce_scatter(x, counts)

    def exchange(self, kind: MoveKind, parts: tuple[torch.Tensor, ...], axes: Axes) -> tuple[torch.Tensor, ...]:
        group = self._groups[axes]
        if kind is MoveKind.ALL_TO_ALL:
            return group.all_to_all(parts)
        assert kind is MoveKind.ALL_GATHER, f"no op exchanges by {kind}"
        counts = [len(parts[0])] * len(group.members)
        return tuple(torch.split(group.all_gather(parts[0], counts), counts))
