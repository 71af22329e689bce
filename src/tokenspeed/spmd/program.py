# SPDX-License-Identifier: Apache-2.0
"""What every rank does in a step: typed moves and calls, checked when they are put together.

A value's layout is part of its register, so a collective that is left out, made twice or fused on one side only leaves
a step without its input: such a program cannot be built. The node that consumes a value owns the collectives before
it; producers never communicate. Knows no prices and no numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tokenspeed.spmd.declare import Form, forms
from tokenspeed.spmd.graph import Op
from tokenspeed.spmd.mesh import Group, Mesh
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
        """One line an op, all that tells it from another: its name and what it does inside, its layouts, and the moves
        that its node makes first."""
        out: list[str] = []
        for op, call, moves in self._nodes():
            fused = f"all_reduce{_axes(call.fused)}+" if call.fused else ""
            inside = "".join(f" ({each.kind}{_axes(each.axes)})" for each in call.form.exchanges)
            before = "; ".join(f"{move.kind}{_axes(move.axes)} {name}" for move, name in moves)
            out.append(f"{fused}{op.name}{inside}\t{_arrow(op, call.form)}\t{before}")
        return tuple(out)

    def sentences(self) -> tuple[str, ...]:
        """As lines, for people: an op, its layouts, and in words what is exchanged before it and within it."""
        out: list[str] = []
        for op, call, moves in self._nodes():
            said: list[str] = []
            for (kind, axes), alike in groupby(moves, lambda each: (each[0].kind, each[0].axes)):
                names = ", ".join(_near(name, op.name) for _, name in alike)
                said.append(f"{_words(kind)} {names} over {_over(axes)}")
            if call.fused:
                said.append(f"all-reduce its first input over {_over(call.fused)}, fused")
            for (kind, axes), same in groupby(call.form.exchanges, lambda each: (each.kind, each.axes)):
                times = len(tuple(same))
                said.append(f"within: {_words(kind)} over {_over(axes)}{f', {times} times' if times > 1 else ''}")
            out.append(f"{op.name}\t{_arrow(op, call.form)}\t{'; '.join(said)}")
        return tuple(out)

    def _nodes(self) -> Iterator[tuple[Op, Call, list[tuple[Move, str]]]]:
        """Each op with its call and the moves before it, with the names of what they move."""
        names = {value.index: value.name for op in self.ops for value in op.outs}
        moves: list[tuple[Move, str]] = []
        for step in self.steps:
            if isinstance(step, Move):
                moves.append((step, names[step.value]))
                continue
            yield self.ops[step.op], step, moves
            moves = []


def _need(held: set[tuple[int, Layout]], value: int, layout: Layout, name: str) -> None:
    if (value, layout) in held:
        return
    there = ", ".join(sorted(shown(each) for index, each in held if index == value)) or "nothing"
    raise LayoutError(f"{name}: needs value {value} as {shown(layout)}, but there is {there}")


def _axes(axes: Axes) -> str:
    return f"[{','.join(map(str, axes))}]"


def _arrow(op: Op, form: Form) -> str:
    return f"{shown(form.source)} > {shown(form.target)}" if op.ins and op.outs else shown(form.source)


def _near(name: str, op: str) -> str:
    """The name of a value for an op, which need not be told its own layer."""
    layer = _LAYER.match(op)
    return name if layer is None else name.removeprefix(layer[0])


def _words(kind: MoveKind) -> str:
    return kind.replace("_", "-")


def _over(axes: Axes) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {' '.join(map(str, axes))}"


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
        """For people: the mesh and a legend, then a table a program, in which layers that repeat are shown once."""
        tables = [fold(variant.program.sentences()) for variant in self.variants]
        cells = [line.split("\t") for table in tables for line in table]
        widths = [max(len(head), *(len(row[column]) for row in cells)) for column, head in enumerate(_HEADS[:-1])]
        mesh = self.variants[0].program.mesh
        parts = [*_mesh_lines(mesh), *(_LEGEND if mesh.axes else ())]
        start = 0
        for variant, table in zip(self.variants, tables, strict=True):
            parts += ["", _bound(start, variant), _row(_HEADS, widths)]
            parts += [_row(line.split("\t"), widths) for line in table]
            start = (variant.max_tokens or 0) + 1
        return "\n".join(parts) + "\n"

    def digest(self) -> str:
        """Equal on two ranks exactly when their plans are. 16 hexadecimal digits."""
        parts = [f"{self.variants[0].program.mesh}"]
        for variant in self.variants:
            parts.append(f"{variant.max_tokens} {variant.cost_fs}")
            parts += variant.program.lines()
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


_BEFORE = "layers.<."
_LAYER = re.compile(r"layers\.\d+\.")
_HEADS = ("op", "rows", "exchanged for it")
_LEGEND = (
    "rows: before > after the op, a letter an axis. R: every rank has all; S: each its own; P: each an addend of all.",
    "all-reduce: P to R; reduce-scatter: P to S; all-gather: S to R; slice: R to S, without an exchange.",
    "x.1 is the second output of x; layers.<.x is x of the layer before.",
)
_SPLITS = (
    (Group.ATTENTION, "attention heads"),
    (Group.ATTENTION_DP, "requests"),
    (Group.DENSE, "dense layers, vocabulary"),
    (Group.MOE, "width of an expert"),
    (Group.EP, "experts"),
)


def _mesh_lines(mesh: Mesh) -> list[str]:
    """What is split over which axes."""
    if not mesh.axes:
        return ["one rank, which has everything"]
    sizes = ", ".join(f"axis {axis} of {size}" for axis, size in enumerate(mesh.axes))
    lines = [f"mesh of {mesh.num_ranks} ranks: {sizes}; ranks count along the last axis first"]
    for group, what in _SPLITS:
        axes = mesh.axes_of(group)
        lines.append(f"  {what:<26}{f'{mesh.size_of(axes)} ways, over {_over(axes)}' if axes else 'not split'}")
    return lines


def _bound(start: int, variant: Variant) -> str:
    """Which steps a program is for, and its price."""
    end = f"{start} tokens or more" if variant.max_tokens is None else f"{start} to {variant.max_tokens} tokens"
    if start == 0:
        end = "any size" if variant.max_tokens is None else f"up to {variant.max_tokens} tokens"
    return f"Steps of {end}: about {variant.cost_fs / 1e9:,.0f} us of exchanges, launches and rows read and written"


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (f"{cell:<{width}}" for cell, width in zip(cells, (*widths, 0), strict=True))
    return f"  {'  '.join(padded)}".rstrip()


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
    return number, line.replace(f"layers.{number}.", "layers.#.").replace(f"layers.{number - 1}.", _BEFORE)
