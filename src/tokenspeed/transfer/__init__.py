# SPDX-License-Identifier: Apache-2.0
"""Moves blocks between memories: one file a way, file name = name of the way.

Knows pages of tensors and the leases that a plan names; it does not know what a page holds, whose it is, or why it
moves. Pages that a lease covers are neither written nor read by a step until the lease is answered, so a move needs
no order against steps.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenspeed.core.errors import ConfigError
from tokenspeed.core.plan import Int32Array

FinishedMove = tuple[int, bool]
"""A lease, and whether all of its pages arrived."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of one cache group on the device. tensors: all that the layers keep, (num_pages, ...) each, numbered
    alike: page p of the group is row p of every one. num_host_blocks: pages of the other side, numbered from 1."""

    tensors: tuple[torch.Tensor, ...]
    num_host_blocks: int


class BlockMover(Protocol):
    """Moves pages by a plan. Used by one thread at a time."""

    def start(self, load: Int32Array, store: Int32Array) -> None:
        """Begin the moves of a plan: load and store as in StepPlan. Reads the arrays before it returns; never raises,
        since a move that cannot be made is a finished one that failed."""
        ...

    def poll(self) -> tuple[FinishedMove, ...]:
        """Leases that finished since the last call, each told once. Does not wait."""
        ...


Build = Callable[[Sequence[PageGroup]], BlockMover]


def names() -> tuple[str, ...]:
    """The ways that there are."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def resolve(name: str) -> Build:
    """What builds the mover of this name, for groups in the order of a plan's group numbers. ConfigError names the
    others."""
    if name not in names():
        raise ConfigError(f"no block mover is called {name!r}; there are {', '.join(names())}")
    build: Build = importlib.import_module(f"{__name__}.{name}").build
    return build
