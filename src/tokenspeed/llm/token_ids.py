# SPDX-License-Identifier: Apache-2.0
"""Token ids as they travel: four bytes each, and numbers only for those who look.

A prompt of 100,000 tokens is put together, counted and sent without one Python object a token. Knows no vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex, overload

from tokenspeed.core.request import pack_ids, unpack_ids

_ID_BYTES = len(pack_ids((0,)))


class TokenIds(Sequence[int]):
    """An immutable sequence, equal to a list or tuple of the same numbers. packed: as pack_ids writes them."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        assert len(packed) % _ID_BYTES == 0, f"{len(packed)} bytes are no whole number of ids"
        self.packed = packed

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """The packed form of numbers."""
        return cls(pack_ids(ids))

    def __len__(self) -> int:
        return len(self.packed) // _ID_BYTES

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | TokenIds:
        numbers = memoryview(self.packed).cast("i")
        if isinstance(index, slice):
            return TokenIds(numbers[index].tobytes())
        return numbers[index]

    def __iter__(self) -> Iterator[int]:
        return iter(unpack_ids(self.packed))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            return self.packed == other.packed
        if isinstance(other, list | tuple):
            return unpack_ids(self.packed) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"TokenIds({unpack_ids(self.packed)})"
