# SPDX-License-Identifier: Apache-2.0
"""What every rank does in a step: typed moves and calls, checked when they are put together.

A value's layout is part of its register, so a collective that is left out, made twice or fused on one side only leaves
a step without its input: such a program cannot be built. The node that consumes a value owns the collectives before
it; producers never communicate. Knows no prices and no numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from tokenspeed.spmd.declare import Form, forms
from tokenspeed.spmd.graph import Op
from tokenspeed.spmd.mesh import Mesh
from tokenspeed.spmd.placement import Axes, Layout, LayoutError, MoveKind, TokenTable, moved, shown, with_addends


@dataclass(frozen=True, slots=True)
class Move:
    """One collective, or a slice, of one value. The source stays available."""

    value: int
    source: Layout
    kind: MoveKind
    axes: Axes

    def target(self, name: str) -> Layout:
        """The layout after it."""
        return moved(self.source, self.kind, self.axes, name)


@dataclass(frozen=True, slots=True)
class Call:
    """One op in one of its forms. fused: axes along which the first input arrives as addends, summed by the op's own
    node; its other inputs, and all without fused axes, arrive at form.source."""

    op: int
    form: Form
    fused: Axes = ()

    def source(self, slot: int) -> Layout:
        """The layout at which an input arrives."""
        if slot or not self.fused:
            return self.form.source
        return with_addends(self.form.source, self.fused)


Step = Move | Call


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of a whole model. LayoutError, naming the op, for steps that do not fit together."""

    mesh: Mesh
    ops: tuple[Op, ...]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        held: set[tuple[int, Layout]] = set()
        names = {value.index: value.name for op in self.ops for value in op.outs}
        num_called = 0
        for step in self.steps:
            if isinstance(step, Move):
                name = names.get(step.value, f"value {step.value}")
                _need(held, step.value, step.source, name)
                held.add((step.value, step.target(name)))
                continue
            if step.op != num_called or step.op >= len(self.ops):
                raise LayoutError(f"op {step.op} is called after {num_called} of {len(self.ops)} ops")
            held |= self._outputs(step, held)
            num_called += 1
        if num_called != len(self.ops):
            raise LayoutError(f"{self.ops[num_called].name} is never called")

    def _outputs(self, call: Call, held: set[tuple[int, Layout]]) -> set[tuple[int, Layout]]:
        op = self.ops[call.op]
        if call.form not in forms(op.placement, self.mesh, op.name):
            raise LayoutError(f"{op.name} has no form {shown(call.form.source)} > {shown(call.form.target)}")
        if call.fused:
            if not op.placement.fuses:
                raise LayoutError(f"{op.name} cannot be fused with an all-reduce")
            moved(call.source(0), MoveKind.ALL_REDUCE, call.fused, op.name)
            if any(call.form.source[axis] != "R" for axis in call.fused):
                raise LayoutError(f"{op.name}: fused along {call.fused}, but runs on {call.form.source}")
        for slot, value in enumerate(op.ins):
            _need(held, value.index, call.source(slot), op.name)
        return {(value.index, call.form.target) for value in op.outs}

    def collectives(self) -> Iterator[tuple[MoveKind, Axes]]:
        """Every collective in order, the same on all ranks."""
        for step in self.steps:
            if isinstance(step, Move):
                if step.kind is not MoveKind.SLICE:
                    yield step.kind, step.axes
                continue
            if step.fused:
                yield MoveKind.ALL_REDUCE, step.fused
            for exchange in step.form.exchanges:
                yield exchange.kind, exchange.axes

    def lines(self) -> tuple[str, ...]:
        """One line an op: its name and what it does inside, its layouts, and the moves that its node makes first."""
        out: list[str] = []
        before: list[str] = []
        for step in self.steps:
            if isinstance(step, Move):
                name = next(v.name for op in self.ops for v in op.outs if v.index == step.value)
                before.append(f"{step.kind}{_axes(step.axes)} {name}")
                continue
            op, form = self.ops[step.op], step.form
            fused = f"all_reduce{_axes(step.fused)}+" if step.fused else ""
            inside = "".join(f" ({each.kind}{_axes(each.axes)})" for each in form.exchanges)
            arrow = f"{shown(form.source)} > {shown(form.target)}" if op.ins and op.outs else shown(form.source)
            out.append(f"{fused}{op.name}{inside}\t{arrow}\t{'; '.join(before)}")
            before = []
        return tuple(out)


def _need(held: set[tuple[int, Layout]], value: int, layout: Layout, name: str) -> None:
    if (value, layout) in held:
        return
    there = ", ".join(sorted(shown(each) for index, each in held if index == value)) or "nothing"
    raise LayoutError(f"{name}: needs value {value} as {shown(layout)}, but there is {there}")


def _axes(axes: Axes) -> str:
    return f"[{','.join(map(str, axes))}]"


@dataclass(frozen=True, slots=True)
class Variant:
    """The program for steps of at most max_tokens tokens; None bounds nothing. cost_fs: its estimated price."""

    max_tokens: int | None
    program: Program
    cost_fs: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The programs of a model by the size of a step. Every rank chooses by the token table, which all share."""

    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        bounds = [variant.max_tokens for variant in self.variants]
        assert bounds[-1] is None, f"the last of the bounds {bounds} must be open"
        closed = [bound for bound in bounds[:-1] if bound is not None]
        assert closed == sorted(set(closed)), f"bounds {bounds}"
        assert len(closed) == len(bounds) - 1, f"bounds {bounds}"

    def program_for(self, table: TokenTable) -> Program:
        """The program of a step."""
        for variant in self.variants:
            if variant.max_tokens is None or table.num_tokens <= variant.max_tokens:
                return variant.program
        raise AssertionError("the last variant is open")

    def text(self) -> str:
        """For people: layers that repeat are shown once."""
        return self._text(folded=True)

    def digest(self) -> str:
        """Equal on two ranks exactly when their plans are. 16 hexadecimal digits."""
        return hashlib.sha256(self._text(folded=False).encode()).hexdigest()[:16]

    def _text(self, *, folded: bool) -> str:
        parts = [f"{self.variants[0].program.mesh}"]
        for variant in self.variants:
            bound = "more" if variant.max_tokens is None else f"tokens <= {variant.max_tokens}"
            lines = variant.program.lines()
            parts.append(f"{bound}: about {variant.cost_fs / 1e9:.1f} us exchanged and moved")
            parts += [_columns(line) for line in (fold(lines) if folded else lines)]
        return "\n".join(parts) + "\n"


def _columns(line: str) -> str:
    node, arrow, before = line.split("\t")
    return f"  {node:<42} {arrow:<12} {before}".rstrip()


def fold(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Merge runs of layers whose lines differ only in the number after `layers.`."""
    blocks = [(number, [line for _, line in group]) for number, group in groupby(map(_numbered, lines), lambda x: x[0])]
    out: list[str] = []
    place = 0
    while place < len(blocks):
        number, block = blocks[place]
        last = place
        while number is not None and last + 1 < len(blocks) and blocks[last + 1][1] == block:
            last += 1
        shown_number = f"{number}" if last == place else f"{number}..{blocks[last][0]}"
        out += [line.replace("layers.#", f"layers.{shown_number}") for line in block]
        place = last + 1
    return tuple(out)


def _numbered(line: str) -> tuple[int | None, str]:
    """The layer number of a line, and the line with # instead of it and of its predecessor's."""
    op = line.split(maxsplit=1)[0]
    if "layers." not in op:
        return None, line
    number = int(op.split("layers.", maxsplit=1)[1].split(".", maxsplit=1)[0])
    return number, line.replace(f"layers.{number}.", "layers.#.").replace(f"layers.{number - 1}.", "layers.<.")
