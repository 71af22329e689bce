# SPDX-License-Identifier: Apache-2.0
"""A grammar whose masks are easy to foresee, for tests of steps with masks."""

from __future__ import annotations

import numpy as np

from tokenspeed.core.request import Grammar
from tokenspeed.grammar import Mask


class EverySeventh:
    """A grammar that allows each seventh token, others after each one; and its compiler."""

    def __init__(self, first: int = 0) -> None:
        self._first = first

    def compile(self, grammar: Grammar) -> EverySeventh:
        return EverySeventh(int(grammar.source))

    def fill(self, mask: Mask) -> None:
        bits = np.zeros(len(mask) * 32, dtype=np.bool_)
        bits[self._first % 7 :: 7] = True
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        assert token_id % 7 == self._first % 7, (token_id, self._first)
        self._first += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError

    def copy(self) -> EverySeventh:
        return EverySeventh(self._first)
