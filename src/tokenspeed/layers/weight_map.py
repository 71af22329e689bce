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

from tokenspeed.layers.linear import FusedLinear, Linear

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one checkpoint tensor goes. names: the first that the checkpoint has is read. target: a view of a
    parameter (fused parameters have a slot for each part), of exactly the checkpoint tensor's shape."""

    names: Names
    target: torch.Tensor

    @property
    def name(self) -> str:
        """The usual name, for messages."""
        return self.names[0]


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


def slot(name: str, target: torch.Tensor) -> WeightSlot:
    """A slot with one name."""
    return WeightSlot((name,), target.data)


def linear_slots(prefix: str, linear: Linear) -> list[WeightSlot]:
    """`prefix`.weight and, where the layer has one, `prefix`.bias."""
    slots = [slot(f"{prefix}.weight", linear.weight)]
    return slots if linear.bias is None else [*slots, slot(f"{prefix}.bias", linear.bias)]


def part_slots(prefix: str, fused: FusedLinear, part: str) -> list[WeightSlot]:
    """As linear_slots, for one part of a fused layer."""
    weight, bias = fused.part(part)
    slots = [slot(f"{prefix}.weight", weight)]
    return slots if bias is None else [*slots, slot(f"{prefix}.bias", bias)]


def under(prefix: str | Names, entries: Iterable[WeightEntry]) -> list[WeightEntry]:
    """The entries with `prefix.` before their names; of several prefixes a checkpoint may use any."""
    prefixes = (prefix,) if isinstance(prefix, str) else prefix
    return renamed(entries, lambda names: tuple(f"{each}.{name}" for each in prefixes for name in names))


def renamed(entries: Iterable[WeightEntry], rename: Callable[[Names], Names]) -> list[WeightEntry]:
    """The entries with other names."""

    def anew(old: WeightSlot) -> WeightSlot:
        return WeightSlot(rename(old.names), old.target)

    return [
        anew(entry)
        if isinstance(entry, WeightSlot)
        else WeightChoice(tuple(tuple(map(anew, option)) for option in entry.options))
        for entry in entries
    ]


def _is_named(slot: WeightSlot, names: Collection[str]) -> bool:
    return any(name in names for name in slot.names)
