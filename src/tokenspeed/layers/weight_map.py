# SPDX-License-Identifier: Apache-2.0
"""Where checkpoint tensors go: slots that name tensors and the views of parameters they fill.

A module gives its slots with names relative to itself, and the one that holds it puts its own name before them. Knows
no name of any checkpoint and reads no file.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch

from tokenspeed.layers.linear import FusedLinear, Linear, Part
from tokenspeed.spmd.shards import Cut

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes. names: the first that the checkpoint has is read. target: a view of a
    parameter (fused parameters have a slot for each part). cut: which part of the checkpoint tensor fills it; several
    slots may read parts of one tensor, and one of which this rank has nothing has an empty target."""

    names: Names
    target: torch.Tensor
    cut: Cut

    @property
    def name(self) -> str:
        """The usual name, for messages."""
        return self.names[0]

    def fill(self, whole: torch.Tensor) -> None:
        """Take the part of a checkpoint tensor."""
        if self.cut.has_values:
            self.target.copy_(whole[self.cut.index])
        else:
            self.target.zero_()


@dataclass(frozen=True, slots=True)
class WeightChoice:
    """Several ways in which checkpoints keep the same parameters, such as a tensor an expert or one for all of them.
    Each option fills them completely; the first is the usual one."""

    options: tuple[tuple[WeightSlot, ...], ...]

    def option_for(self, names: Collection[str]) -> tuple[WeightSlot, ...]:
        """The option of which a checkpoint with tensors of these names has the largest part."""
        return max(self.options, key=lambda option: sum(_is_named(slot, names) for slot in option) / len(option))


WeightEntry = WeightSlot | WeightChoice


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All slots of a model. ignored: shell patterns of names that a checkpoint may have and the model does not read.
    Iterating takes the usual option of every choice."""

    slots: tuple[WeightEntry, ...]
    ignored: Names

    def __iter__(self) -> Iterator[WeightSlot]:
        for entry in self.slots:
            if isinstance(entry, WeightSlot):
                yield entry
            else:
                yield from entry.options[0]

    def for_checkpoint(self, names: Collection[str]) -> WeightMap:
        """This map with every choice made, for a checkpoint that has tensors of these names."""
        made: list[WeightEntry] = []
        for entry in self.slots:
            made.extend((entry,) if isinstance(entry, WeightSlot) else entry.option_for(names))
        return WeightMap(tuple(made), self.ignored)

    def ignores(self, name: str) -> bool:
        """Whether a surplus tensor of this name is expected."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignored)


def slot(name: str, target: torch.Tensor, cut: Cut | None = None) -> WeightSlot:
    """A slot with one name. cut: None reads a whole tensor of the target's shape."""
    return WeightSlot((name,), target.data, Cut.whole(target.shape) if cut is None else cut)


def part_slots(prefix: str, part: Part) -> list[WeightSlot]:
    """`prefix`.weight and, where the projection has one, `prefix`.bias."""
    slots = [slot(f"{prefix}.weight", part.weight, part.cut)]
    if part.bias is not None:
        slots.append(slot(f"{prefix}.bias", part.bias, part.bias_cut))
    return slots


def linear_slots(prefix: str, linear: Linear) -> list[WeightSlot]:
    """As part_slots, of a projection that is alone."""
    return part_slots(prefix, linear.whole)


def fused_slots(names: Names, fused: FusedLinear) -> list[WeightSlot]:
    """The slots of all parts, whose module names these are; one name is that of a module which is as fused."""
    if len(names) == len(fused.parts):
        return [each for name, part in zip(names, fused.parts.values(), strict=True) for each in part_slots(name, part)]
    (name,) = names
    size, start, slots = sum(part.cut.shape[0] for part in fused.parts.values()), 0, []
    for part in fused.parts.values():
        bias_cut = None if part.bias_cut is None else part.bias_cut.within(0, start, size)
        slots += part_slots(name, Part(part.weight, part.cut.within(0, start, size), part.bias, bias_cut))
        start += part.cut.shape[0]
    return slots


def under(prefix: str | Names, entries: Iterable[WeightEntry]) -> list[WeightEntry]:
    """The entries with `prefix.` before their names; of several prefixes a checkpoint may use any."""
    prefixes = (prefix,) if isinstance(prefix, str) else prefix
    return renamed(entries, lambda names: tuple(f"{each}.{name}" for each in prefixes for name in names))


def renamed(entries: Iterable[WeightEntry], rename: Callable[[Names], Names]) -> list[WeightEntry]:
    """The entries with other names."""

    def anew(old: WeightSlot) -> WeightSlot:
        return WeightSlot(rename(old.names), old.target, old.cut)

    return [
        anew(entry)
        if isinstance(entry, WeightSlot)
        else WeightChoice(tuple(tuple(map(anew, option)) for option in entry.options))
        for entry in entries
    ]


def _is_named(slot: WeightSlot, names: Collection[str]) -> bool:
    return any(name in names for name in slot.names)
