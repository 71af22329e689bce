# SPDX-License-Identifier: Apache-2.0
"""What an op says about its rows: the placements that stand beside a model's single-device maths.

A placement says, for the axes of a named group, which letter goes in and which comes out ("R>P": whole rows in,
addends out, since the weights are split over the group); alternatives are for the compiler to choose from. On all
other axes a token-local op runs on R or on S as is cheapest, a linear one on P too, and any other op on R alone. All
inputs of an op have one layout, and all its outputs. Knows no model and no price.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from tokenspeed.spmd.mesh import Group, Mesh
from tokenspeed.spmd.placement import Axes, Layout, LayoutError, MoveKind

# What maths alone can do to rows; everything else needs an exchange of its own.
WITHOUT_EXCHANGE = {"R>R", "S>S", "R>P", "P>P"}
WITH_EXCHANGE = {"R>R", "S>S", "R>S", "S>R", "R>P"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective inside an op, over the axes of the choice that it belongs to. width: elements a token moves;
    copies: how many times it may have to, at most once to each rank of the group."""

    kind: MoveKind
    width: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to run along the axes of a group. letters: "R>P" and the like."""

    letters: str
    exchanges: tuple[Exchange, ...] = ()

    def __post_init__(self) -> None:
        legal = WITH_EXCHANGE if self.exchanges else WITHOUT_EXCHANGE
        if self.letters not in legal:
            how = "with" if self.exchanges else "without"
            raise LayoutError(f"{self.letters!r} cannot be done {how} an exchange; {', '.join(sorted(legal))} can")

    @property
    def source(self) -> str:
        return self.letters[0]

    @property
    def target(self) -> str:
        return self.letters[2]


@dataclass(frozen=True, slots=True)
class Choice:
    """The alternatives of an op along the axes of one group."""

    group: Group
    alternatives: tuple[Alternative, ...]

    @classmethod
    def of(cls, group: Group, *letters: str) -> Choice:
        """Alternatives without exchanges."""
        return cls(group, tuple(Alternative(each) for each in letters))


@dataclass(frozen=True, slots=True)
class Placement:
    """See the module. The groups of `choices` must not overlap in a mesh.

    linear: f(a + b) = f(a) + f(b) holds, so addends may go through (a bias breaks it).
    idle_ok: a rank without rows may skip the maths; an op with exchanges is always entered.
    fuses: an all-reduce of the first input can be made in one kernel with the op.
    launches, bytes_per_token: price of the maths; bytes are read and written beside the inputs and outputs.
    """

    choices: tuple[Choice, ...] = ()
    token_local: bool = False
    linear: bool = False
    idle_ok: bool = True
    fuses: bool = False
    launches: int = 1
    bytes_per_token: int = 0

    def __post_init__(self) -> None:
        for alternative in (each for choice in self.choices for each in choice.alternatives):
            if alternative.source == "P" and not self.linear:
                raise LayoutError("a P cannot enter an op that is not linear")
            if alternative.exchanges and self.idle_ok:
                raise LayoutError("an op with an exchange must be entered by idle ranks: idle_ok must be False")
        if self.fuses and not self.token_local:
            raise LayoutError("only a token-local op can be fused with an all-reduce")


@dataclass(frozen=True, slots=True)
class PlacedExchange:
    """An exchange on the axes of a mesh. width: elements a token moves, all copies together."""

    kind: MoveKind
    axes: Axes
    width: int


@dataclass(frozen=True, slots=True)
class Form:
    """A placement worked out on a mesh: one layout for all inputs, one for all outputs."""

    source: Layout
    target: Layout
    exchanges: tuple[PlacedExchange, ...] = ()


def forms(placement: Placement, mesh: Mesh, op: str) -> tuple[Form, ...]:
    """Every form of an op, in a fixed order. LayoutError naming the op when two of its groups overlap."""
    taken: dict[int, Group] = {}
    for choice in placement.choices:
        for axis in mesh.axes_of(choice.group):
            if axis in taken:
                raise LayoutError(f"{op}: {choice.group} and {taken[axis]} overlap on axis {axis}")
            taken[axis] = choice.group
    return _forms(placement, mesh)


@cache
def _forms(placement: Placement, mesh: Mesh) -> tuple[Form, ...]:
    taken = {axis for choice in placement.choices for axis in mesh.axes_of(choice.group)}
    free = [axis for axis in range(len(mesh.axes)) if axis not in taken]
    ways = [choice.alternatives if mesh.axes_of(choice.group) else (None,) for choice in placement.choices]
    return tuple(
        _form(mesh, placement, picked, dict(zip(free, letters, strict=True)))
        for picked in product(*ways)
        for letters in product(_free_letters(placement), repeat=len(free))
    )


def _free_letters(placement: Placement) -> str:
    return ("RS" if placement.token_local else "R") + ("P" if placement.linear else "")


def _form(mesh: Mesh, placement: Placement, picked: tuple[Alternative | None, ...], free: dict[int, str]) -> Form:
    source, target, exchanges = dict(free), dict(free), []
    for choice, alternative in zip(placement.choices, picked, strict=True):
        if alternative is None:
            continue
        axes = mesh.axes_of(choice.group)
        source.update(dict.fromkeys(axes, alternative.source))
        target.update(dict.fromkeys(axes, alternative.target))
        num_ranks = mesh.size_of(axes)
        exchanges += [
            PlacedExchange(each.kind, axes, each.width * min(each.copies, num_ranks)) for each in alternative.exchanges
        ]
    return Form(_joined(source), _joined(target), tuple(exchanges))


def _joined(letters: dict[int, str]) -> Layout:
    return "".join(letters[axis] for axis in sorted(letters))


ADD = Placement(token_local=True, linear=True)
NORM = Placement(token_local=True, fuses=True)
SELECT = Placement(token_local=True, linear=True)
WHOLE = Placement(launches=0)
"""On every rank all rows."""
OWN = Placement((Choice.of(Group.ATTENTION_DP, "S>S"),), launches=0)
"""On every rank the rows of its attention partition."""


def split(group: Group, *, launches: int = 3) -> Placement:
    """A run of layers whose weights are split over a group, such as a gated feed-forward block or an embedding split by
    vocabulary: whole rows in, addends out."""
    return Placement((Choice.of(group, "R>P"),), token_local=True, launches=launches)


def attention(shared_widths: int = 0) -> Placement:
    """Heads are split over the attention group; each data-parallel partition has the cache of its own rows.
    shared_widths: elements a token that the ranks tell each other on the way, such as the sums of a norm over all
    heads."""
    gather = (Exchange(MoveKind.ALL_GATHER, shared_widths),) if shared_widths else ()
    heads = Choice(Group.ATTENTION, (Alternative("R>P", gather),))
    return Placement((heads, Choice.of(Group.ATTENTION_DP, "S>S")), idle_ok=not gather, launches=4)


def projection(in_width: int, out_width: int, *, bias: bool = False, itemsize: int = 2) -> Placement:
    """A small matrix that every rank has, such as a router or the low-rank projections before latent attention. It is
    priced by the weights a token would read if tokens shared them by 128, so that running it on whole rows shows."""
    work = in_width * out_width * itemsize // 128
    return Placement(token_local=True, linear=not bias, bytes_per_token=work)


def experts(width: int, top_k: int, *, all_to_all: bool = True) -> Placement:
    """Routed experts: over ep either every rank computes its experts for all rows, or rows travel to their experts and
    back; each expert is split over the moe group."""
    exchange = Exchange(MoveKind.ALL_TO_ALL, width, copies=top_k)
    ways = (Alternative("R>P"), *([Alternative("S>S", (exchange, exchange))] if all_to_all else []))
    choices = (Choice(Group.EP, ways), Choice.of(Group.MOE, "R>P"))
    return Placement(choices, token_local=True, idle_ok=False, launches=6)


def head(vocab_size: int, group: Group = Group.DENSE) -> Placement:
    """Logits from a vocabulary split over a group: each rank computes its columns and gathers the others'."""
    gather = Alternative("R>R", (Exchange(MoveKind.ALL_GATHER, vocab_size),))
    return Placement((Choice(group, (gather,)),), token_local=True, idle_ok=False)
