# SPDX-License-Identifier: Apache-2.0
"""What an op's `cases.py` yields: inputs on which every solution must agree with the reference.

An op whose solutions are not functions of tensors has `as_function` there, which makes one of what a solution builds.
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
    same call cut into parts, each with the part of the result that it must equal bit for bit where a solution is
    batch invariant. features: what of the contract it needs by name; solutions without them are not asked. tolerance:
    that of this case, where it is not the op's.
    """

    name: str
    args: tuple[object, ...]
    keywords: Mapping[str, object] = field(default_factory=dict)
    mutated: tuple[int, ...] = ()
    scratch: tuple[int, ...] = ()
    rows: tuple[Row, ...] = ()
    features: frozenset[str] = frozenset()
    tolerance: Tolerance | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A part of a case on its own, of one row or several. select takes the part's result out of the whole result."""

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
