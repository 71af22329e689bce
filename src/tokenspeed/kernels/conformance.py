# SPDX-License-Identifier: Apache-2.0
"""What an op's `cases.py` yields: inputs on which every solution must agree with the reference.

Knows how a case looks. Does not run any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """One call. Tensors may be views; what lies between their elements must not be touched.

    mutated: indices of args that the op changes. scratch: of those whose numbers are unspecified afterwards. rows: the
    same call cut into single rows, each with the part of the result that it must equal bit for bit where a solution is
    batch invariant. features: what of the contract it needs by name; solutions without them are not asked.
    """

    name: str
    args: tuple[object, ...]
    keywords: Mapping[str, object] = field(default_factory=dict)
    mutated: tuple[int, ...] = ()
    scratch: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a case on its own. select takes the part's result out of the whole result."""

    args: tuple[object, ...]
    keywords: Mapping[str, object]
    select: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|actual − expected| ≤ absolute + relative · |expected|."""

    relative: float
    absolute: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that a call must do: floating-point operations, and bytes read or written."""

    flop: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One call at a size that a real model makes, for `bench kernel`. make gives fresh random arguments on the device
    that it was asked for; cost: the least that the call must do."""

    name: str
    make: Callable[[], Case]
    cost: Cost
