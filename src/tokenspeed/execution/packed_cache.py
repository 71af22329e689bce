# SPDX-License-Identifier: Apache-2.0
"""Packed matrices on disk: taken from there where the same file was packed before, and kept there where it was not.

What an entry is found by: the content of the file, what reads it, what packs it, and which part of which tensor every
matrix is made of. Knows neither how matrices are packed nor how entries are written.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.checkpoints import SourceFile
from tokenspeed.core.config import ModelConfig, cache_dir
from tokenspeed.execution.packed_store import Matrices, PackedStore, Recipe
from tokenspeed.execution.packing import NOTHING_BEFORE, NOTHING_PACKED, PackedBefore, Packing
from tokenspeed.kernels.ops.packed_linear import PackedLinear
from tokenspeed.layers.build import BuildContext

NUM_BYTES_MIN = 16 << 20
"""Less than this is packed in less time than it is worth a file for."""
_LEAST_URGENT = 19


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the entry of a model is, and what it is found by."""

    store: PackedStore
    file: SourceFile
    recipe: Recipe


class PackedCache:
    """The matrices of one model on one rank. place: None keeps and finds nothing."""

    def __init__(self, packing: Packing = NOTHING_PACKED, place: _Place | None = None) -> None:
        self._packing = packing
        self._place = place
        self._fresh: Matrices = ()
        self._is_wanted = True
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, config: ModelConfig, file: SourceFile | None, packing: Packing, ctx: BuildContext) -> PackedCache:
        """file: that the blocks come from, None where they come from several."""
        num_bytes = sum(part.num_bytes for parts in packing.values() for part in parts)
        is_worth_it = config.packed_cache and packing and num_bytes >= NUM_BYTES_MIN
        if not is_worth_it or file is None or not file.is_settled:
            return cls()
        layout = cast(PackedLinear, ctx.bind("packed_linear")).layout
        if layout is None:
            return cls()
        described = ((matrix.is_head, *(part.description for part in parts)) for matrix, parts in packing.items())
        contents = "\n".join(map(str, described))
        solution = ctx.bindings["packed_linear"].solution
        recipe = Recipe(contents, f"{solution}\n{layout}\n{file.reader}\n{sys.byteorder}")
        return cls(packing, _Place(PackedStore(cache_dir() / "packed", config.packed_cache_bytes_max), file, recipe))

    def find(self) -> PackedBefore:
        """All matrices, or none."""
        place = self._place
        found = None if place is None else place.store.find(place.file, place.recipe)
        if found is None:
            return NOTHING_BEFORE
        self._place = None  # no need to keep it
        return {matrix: _tensors(arrays) for matrix, arrays in zip(self._packing, found, strict=True)}

    def collect(self) -> None:
        """See what was packed, once that is done, and forget how: that would hold the file."""
        if self._place is not None:
            assert all(matrix.packed for matrix in self._packing), "a matrix was not packed"
            self._fresh = [[data.numpy() for data in matrix.packed_data()] for matrix in self._packing]
        self._packing = NOTHING_PACKED

    def keep(self) -> None:
        """Write what was packed, unless it was found, on a thread that ends with that: nobody waits for it."""
        if self._place is not None:
            self._thread = threading.Thread(target=self._write, args=(self._place,), name="packed-cache")
            self._thread.start()

    def close(self, *, waits: bool = False) -> None:
        """Give up what is not written yet, or wait until it is."""
        self._is_wanted = waits
        if self._thread is not None:
            self._thread.join()

    def _write(self, place: _Place) -> None:
        with suppress(OSError, AttributeError):  # where a thread has a priority of its own, steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_URGENT)
        place.store.keep(place.file, place.recipe, self._fresh, lambda: self._is_wanted)


def _tensors(arrays: Sequence[NDArray[np.uint8]]) -> tuple[torch.Tensor, ...]:
    """torch warns of arrays it could write to; nobody writes to packed matrices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return tuple(map(torch.from_numpy, arrays))
