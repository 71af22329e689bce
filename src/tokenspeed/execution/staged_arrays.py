# SPDX-License-Identifier: Apache-2.0
"""Small arrays of fixed lengths in one piece of device memory, filled by one copy from the host.

What is captured as a graph reads them where they stay. Knows neither steps nor what an array means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16
"""Bytes. Kernels are compiled once more for a pointer that is not a multiple of it."""


@dataclass(frozen=True, slots=True)
class Section:
    """One array. dtype: a numpy dtype that torch knows. source: what it is filled with, given what `fill` is given;
    there may be less of it than length. padding: what stands behind that; None repeats the last of the numbers."""

    name: str
    length: int
    dtype: type[np.generic]
    source: Callable[[Any], NDArray[np.generic]]
    padding: float | None = 0


class StagedArrays:
    """The arrays by name, as tensors of the device."""

    def __init__(self, sections: Sequence[Section], device: torch.device) -> None:
        places, end = [], 0
        for section in sections:
            stop = end + section.length * np.dtype(section.dtype).itemsize
            places.append((section, slice(end, stop)))
            end = -(-stop // _ALIGNMENT) * _ALIGNMENT
        self._places = tuple(places)
        self._bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self._tensors = {section.name: self._bytes[place].view(_dtype(section)) for section, place in places}

    def __getitem__(self, name: str) -> torch.Tensor:
        """(length,) on the device, always the same memory."""
        return self._tensors[name]

    def fill(self, given: object) -> None:
        """Every array anew from what is given, in the order of the current stream; None leaves nothing but padding."""
        staged = torch.empty(len(self._bytes), dtype=torch.uint8, pin_memory=self._bytes.is_cuda)
        raw = staged.numpy()
        for section, place in self._places:
            there = raw[place].view(section.dtype)
            num_given = 0
            if given is not None:
                array = section.source(given)
                num_given = len(array)
                there[:num_given] = array
            if num_given < section.length:
                there[num_given:] = _padding(section, there[:num_given])
        self._bytes.copy_(staged, non_blocking=True)


def _padding(section: Section, given: NDArray[Any]) -> Any:
    if section.padding is not None:
        return section.padding
    return given[-1] if len(given) else 0


def _dtype(section: Section) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, section.dtype)).dtype
