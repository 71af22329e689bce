# SPDX-License-Identifier: Apache-2.0
"""Which part of a checkpoint tensor each rank has, from one declaration a tensor.

Knows shapes and meshes; arrays only to cut them and to put them together again. Does not know names of weights, files
or layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from tokenspeed.core.errors import ConfigError
from tokenspeed.spmd.mesh import Group, Mesh


@dataclass(frozen=True, slots=True)
class Split:
    """One dimension of a tensor cut over a group into equal runs.

    unit: elements that stay together, such as a head's, or a block's of a packed format.
    shared: with more ranks than units, neighbours have the same unit (K/V heads); otherwise that is refused.
    what: units in the words of a message.
    """

    dim: int
    group: Group
    unit: int = 1
    shared: bool = False
    what: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a tensor that a rank has. shape: of the whole. index: where the part lies in it. has_values: whether
    the part is read from the checkpoint; else it is zeros."""

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    has_values: bool = True

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Cut:
        """All of a tensor."""
        return cls(tuple(shape), tuple(slice(0, size) for size in shape))

    @classmethod
    def nothing(cls, shape: Sequence[int]) -> Cut:
        """No element of a tensor that other ranks have."""
        return cls(tuple(shape), tuple(slice(0, 0) for _ in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(len(range(part.start, part.stop, part.step or 1)) for part in self.index)

    def within(self, dim: int, start: int, size: int) -> Cut:
        """The same part of a larger tensor, which has `size` elements along dim and the whole from `start` on."""
        shape, index, old = list(self.shape), list(self.index), self.index[dim]
        shape[dim], index[dim] = size, slice(old.start + start, old.stop + start)
        return Cut(tuple(shape), tuple(index), self.has_values)

    def transposed(self) -> Cut:
        """The same part of the whole with its last two dimensions changed."""
        swapped = (*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2)
        return Cut(
            tuple(self.shape[dim] for dim in swapped), tuple(self.index[dim] for dim in swapped), self.has_values
        )

    def at(self, dim: int, place: int) -> Cut:
        """The part of one slice of the whole along dim: nothing where the slice lies outside the part."""
        rest = (*self.shape[:dim], *self.shape[dim + 1 :])
        if not self.index[dim].start <= place < self.index[dim].stop:
            return Cut.nothing(rest)
        return Cut(rest, (*self.index[:dim], *self.index[dim + 1 :]), self.has_values)


@dataclass(frozen=True, slots=True)
class Shards:
    """How a tensor is dealt out; without splits every rank has it whole. once: only the first rank of this group has
    the values, the others zeros, since what they add to is summed over the group (the bias after a split matrix)."""

    splits: tuple[Split, ...] = ()
    once: Group | None = None

    def __post_init__(self) -> None:
        dims = [split.dim for split in self.splits]
        assert len(set(dims)) == len(dims), f"a dimension is split twice: {dims}"
        assert not any(split.shared for split in self.splits) or self.once is None

    def check(self, name: str, shape: tuple[int, ...], mesh: Mesh) -> None:
        """ConfigError, in one line that names the sizes that would work, when a dimension does not divide."""
        for split in self.splits:
            assert split.dim < len(shape), f"{name}: no dimension {split.dim} in {shape}"
            size, ways = shape[split.dim], mesh.size_of(mesh.axes_of(split.group))
            if size % split.unit:
                raise ConfigError(f"{name}: {size} elements are not whole units of {split.unit}")
            if not _fits(size // split.unit, ways, split.shared):
                raise ConfigError(_refusal(name, size // split.unit, ways, split))

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """The shape of every rank's part."""
        return self.part(shape, mesh, 0).local_shape

    def part(self, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Cut:
        """The part of a rank. The tensor must have passed check."""
        return Cut(tuple(shape), self.slices(shape, mesh, rank), self.has_values(mesh, rank))

    def beside(self, num_dims: int = 2) -> Shards:
        """Of the bias that is added to the products of a matrix (…, out, in) of num_dims dimensions dealt like this."""
        splits = tuple(split for split in self.splits if split.dim < num_dims - 1)
        inputs = [split.group for split in self.splits if split.dim == num_dims - 1]
        return Shards(splits, inputs[0] if inputs else self.once)

    def slices(self, shape: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[slice, ...]:
        """As part, without what else a part says."""
        parts = [slice(0, size) for size in shape]
        for split in self.splits:
            axes = mesh.axes_of(split.group)
            num_units, ways, index = shape[split.dim] // split.unit, mesh.size_of(axes), mesh.index(rank, axes)
            each = max(1, num_units // ways)
            start = index * num_units // ways * split.unit
            parts[split.dim] = slice(start, start + each * split.unit)
        return tuple(parts)

    def has_values(self, mesh: Mesh, rank: int) -> bool:
        """Whether the rank's part is read from the checkpoint; otherwise it is zeros."""
        return self.once is None or mesh.index(rank, mesh.axes_of(self.once)) == 0

    def cut(self, tensor: npt.NDArray[np.generic], mesh: Mesh, rank: int) -> npt.NDArray[np.generic]:
        """The values of a rank."""
        part = tensor[self.slices(tensor.shape, mesh, rank)]
        return part if self.has_values(mesh, rank) else np.zeros_like(part)

    def join(
        self, parts: Sequence[npt.NDArray[np.generic]], shape: tuple[int, ...], mesh: Mesh
    ) -> npt.NDArray[np.generic]:
        """The checkpoint tensor from the parts of all ranks of a stage. ValueError when parts that should be copies
        differ, or when an element is in no part."""
        whole = np.zeros(shape, parts[0].dtype)
        filled = np.zeros(shape, bool)
        for rank, part in enumerate(parts):
            where = self.slices(shape, mesh, rank)
            if not self.has_values(mesh, rank):
                continue
            if not np.array_equal(whole[where][filled[where]], part[filled[where]]):
                raise ValueError(f"rank {rank} has another copy")
            whole[where], filled[where] = part, True
        if not filled.all():
            raise ValueError(f"{int((~filled).sum())} elements are in no part")
        return whole

    def bytes_fraction(self, shape: tuple[int, ...], mesh: Mesh) -> float:
        """The share of the tensor that a rank holds, for memory accounts."""
        return prod(self.local_shape(shape, mesh)) / max(1, prod(shape))


WHOLE = Shards()


def rows(group: Group, unit: int = 1, *, shared: bool = False, what: str = "") -> Shards:
    """The outputs of a matrix (out, in), or of its bias, dealt over a group; also a vocabulary."""
    return Shards((Split(0, group, unit, shared, what),))


def columns(group: Group, unit: int = 1, *, what: str = "") -> Shards:
    """The inputs of a matrix (out, in) dealt over a group: its products are addends."""
    return Shards((Split(1, group, unit, what=what),))


def once(group: Group) -> Shards:
    """The bias after a matrix whose columns are dealt over a group."""
    return Shards(once=group)


def stacked(dim: int, unit: int = 1) -> Shards:
    """A stack of experts (E, out, in): experts over ep, and dimension `dim` of each over the moe group."""
    inner = Split(dim, Group.MOE, unit, what="elements of an expert")
    return Shards((Split(0, Group.EP, what="experts"), inner))


def _fits(num_units: int, ways: int, shared: bool) -> bool:
    return num_units % ways == 0 or (shared and ways % num_units == 0)


def _refusal(name: str, num_units: int, ways: int, split: Split) -> str:
    sizes = ", ".join(str(size) for size in _working(num_units, split.shared))
    more = " or a multiple of the last" if split.shared else ""
    what = split.what or ("units" if split.unit > 1 else "elements")
    return f"{name}: {num_units} {what} do not split over {ways} ranks of {split.group}; it may have {sizes}{more}"


def _working(num_units: int, shared: bool) -> Iterator[int]:
    return (size for size in range(1, num_units + 1) if _fits(num_units, size, shared))
