# SPDX-License-Identifier: Apache-2.0
"""Runs Gluon device code of warpgroups that copy and multiply asynchronously, as Python: each warpgroup is a thread, of
which one runs at a time; which one, and when a copy lands or a product is computed, is drawn at each of their turns.

Ends with an error where nobody can go on, where a copy or a store would write what somebody still reads, and where a
barrier is told more than it counts. Knows no kernel: it stands in for the names that the device code imports.
"""

from __future__ import annotations

import operator
import random
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Stuck(AssertionError):
    """Nobody can go on."""


@dataclass
class Room:
    """Shared memory, or a part of it."""

    memory: torch.Tensor
    machine: Machine

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(primitive_bitwidth=8 * self.memory.itemsize)

    def index(self, place: int) -> Room:
        return Room(self.memory[place], self.machine)

    def permute(self, order: Sequence[int]) -> Room:
        return Room(self.memory.permute(*order), self.machine)

    def _reinterpret(self, _dtype: object, shape: Sequence[int], _layout: object) -> Room:
        return Room(self.memory.view(*shape), self.machine)

    def store(self, values: torch.Tensor) -> None:
        self.machine.check_unread(self)
        self.memory.copy_(values)

    def span(self) -> range:
        """The addresses that it has."""
        start = self.memory.data_ptr()
        return range(start, start + self.memory.numel() * self.memory.itemsize)


@dataclass
class Barrier:
    """phase: how many are complete."""

    count: int = 0
    arrived: int = 0
    num_bytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        assert self.arrived <= self.count, f"{self.arrived} arrivals at a barrier for {self.count}"
        if self.arrived == self.count and self.num_bytes == 0:
            self.arrived, self.phase = 0, self.phase + 1


@dataclass
class Barriers:
    each: list[Barrier]

    def index(self, place: int) -> Barrier:
        return self.each[place]


@dataclass
class Descriptor:
    """Of a matrix, for copies of boxes."""

    matrix: torch.Tensor
    layout: object = None

    @property
    def dtype(self) -> Any:
        return self.matrix.dtype

    def box(self, corner: Sequence[int], shape: Sequence[int]) -> tuple[slice, slice]:
        first, second = (slice(at, at + size) for at, size in zip(corner, shape, strict=True))
        return first, second


@dataclass
class Pointer:
    values: torch.Tensor
    offset: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.offset + offset)


@dataclass
class Effect:
    """Something under way: who waits for it, what it reads, and what happens."""

    owner: str
    reads: tuple[Room, ...]
    happen: Callable[[], None]


@dataclass
class Machine:
    """The warpgroups of a program and what they have under way. Effects of an owner happen in their order; the owners
    of copies are not ordered among each other. Each owner has a pace of its own, so that some are far behind."""

    seed: int
    effects: dict[str, list[Effect]] = field(default_factory=dict)
    ready: dict[str, Callable[[], bool]] = field(default_factory=dict)
    turns: dict[str, threading.Semaphore] = field(default_factory=dict)
    paces: dict[str, float] = field(default_factory=dict)
    failure: BaseException | None = None
    num_copies: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)

    def run(self, groups: dict[str, Callable[[], None]]) -> None:
        """All of them, to their ends."""
        self.ready = dict.fromkeys(groups, _at_once)
        self.turns = {name: threading.Semaphore(0) for name in groups}
        threads = [
            threading.Thread(target=self._group, args=item, name=item[0], daemon=True) for item in groups.items()
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        assert not self.effects, f"at the end there are still {', '.join(self.effects)}"

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Another's turn, and on when it is ready and drawn."""
        name = threading.current_thread().name
        self.ready[name] = is_ready
        self._pass_on()
        self._until(name)

    def begin(self, effect: Effect) -> None:
        self.effects.setdefault(effect.owner, []).append(effect)
        self.wait(_at_once)

    def check_unread(self, room: Room) -> None:
        """Nothing under way reads this."""
        ours = room.span()
        for effects in self.effects.values():
            for effect in effects:
                for theirs in map(Room.span, effect.reads):
                    assert ours.stop <= theirs.start or theirs.stop <= ours.start, f"{effect.owner} still read this"

    def _group(self, name: str, work: Callable[[], None]) -> None:
        try:
            self._until(name)
            work()
        except BaseException as error:  # noqa: BLE001 - told by `run`
            self.failure = self.failure or error
        del self.ready[name]
        self._pass_on()

    def _until(self, name: str) -> None:
        self.turns[name].acquire()
        if self.failure is not None:
            raise Stuck("another failed")

    def _pass_on(self) -> None:
        """Let effects happen until a warpgroup is drawn, whose turn it is then."""
        while self.ready and self.failure is None:
            going = [name for name, is_ready in self.ready.items() if is_ready()]
            names = [*going, *(owner for owner, effects in self.effects.items() if effects)]
            if not names:
                self.failure = Stuck(f"all wait: {', '.join(self.ready)}")
                break
            [drawn] = self.draw.choices(names, [self._pace(name) for name in names])
            if drawn in going:
                self.turns[drawn].release()
                return
            self.effects[drawn].pop(0).happen()
            if not self.effects[drawn]:
                del self.effects[drawn]
        for turn in self.turns.values():
            turn.release()

    def _pace(self, name: str) -> float:
        kind = "copy" if name.startswith("copy") else name
        if kind not in self.paces:
            self.paces[kind] = self.draw.choice((1.0, 0.3, 0.02))
        return self.paces[kind]


def _at_once() -> bool:
    return True


INSTRUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "mul.f32": operator.mul,
    "add.f32": operator.add,
    "min.f32": torch.fmin,
    "ex2.approx.ftz.f32": torch.exp2,
    "rcp.approx.ftz.f32": torch.reciprocal,
}


def assembled(
    asm: str, constraints: str, args: Sequence[torch.Tensor], *, dtype: torch.dtype, is_pure: bool, pack: int
) -> torch.Tensor:
    """Inline assembly of these instructions, from float32 to as many: `pack` numbers at a time."""
    assert constraints == ",".join(["=f"] * pack + ["f"] * pack)
    assert (dtype, is_pure) == (torch.float32, True)
    [values] = args
    parts = values.reshape(-1, pack)
    registers = {f"${pack + place}": parts[:, place] for place in range(pack)}

    def read(name: str) -> torch.Tensor:
        if name.startswith("0f"):
            return torch.tensor(struct.unpack(">f", bytes.fromhex(name[2:]))[0])
        return registers[name]

    for line in asm.strip("{} \n").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name not in {"", ".reg"}:
            target, *sources = operands.replace(" ", "").split(",")
            registers[target] = INSTRUCTIONS[name](*map(read, sources))
    return torch.stack([registers[f"${place}"] for place in range(pack)], 1).reshape(values.shape)


@dataclass
class Product:
    """An accumulator, maybe with products under way."""

    values: torch.Tensor


def play(device_code: Any, monkeypatch: pytest.MonkeyPatch, seed: int, program: tuple[int, int], *args: Any) -> None:
    """One program of `device_code.product` with these arguments. program: its number, and how many there are."""
    machine = Machine(seed)
    patched = _names(machine, *program)
    for name, value in vars(device_code).items():
        if type(value).__name__ == "GluonJITFunction" and name not in patched:
            patched[name] = value.fn
    for name in ("PARTS", "PART_M", "TILE_N", "STEP_K"):
        patched[name] = int(getattr(vars(device_code)[name], "value", vars(device_code)[name]))
    with monkeypatch.context() as patch:
        for name, value in patched.items():
            patch.setattr(device_code, name, value)
        device_code.product(*args)


def _names(machine: Machine, program_id: int, num_programs: int) -> dict[str, Any]:
    me = lambda: threading.current_thread().name  # noqa: E731

    def init(barrier: Barrier, count: int) -> None:
        barrier.count = count

    def wait(barrier: Barrier, parity: int) -> None:
        assert parity in {0, 1}, parity
        machine.wait(lambda: barrier.phase % 2 != parity)

    def arrive(barrier: Barrier, pred: bool = True) -> None:
        if pred:
            barrier.arrived += 1
            barrier.settle()
        machine.wait(_at_once)

    def expect(barrier: Barrier, num_bytes: int) -> None:
        barrier.num_bytes += num_bytes
        arrive(barrier)

    def load(source: Descriptor, corner: Sequence[int], barrier: Barrier, room: Room) -> None:
        machine.check_unread(room)
        room.memory.fill_(float("nan"))

        def land() -> None:
            part = source.matrix[source.box(corner, room.memory.shape)]
            room.memory.zero_()
            room.memory[: part.shape[0], : part.shape[1]] = part
            barrier.num_bytes -= room.memory.numel() * room.memory.itemsize
            assert barrier.num_bytes >= 0, "more bytes than were told"
            barrier.settle()

        machine.num_copies += 1
        machine.begin(Effect(f"copy {machine.num_copies}", (), land))

    def multiply(a: Room, b: Room, acc: Product, is_async: bool) -> Product:
        assert is_async
        result = Product(acc.values)

        def happen() -> None:
            result.values.add_(a.memory @ b.memory)

        machine.begin(Effect(f"products of {me()}", (a, b), happen))
        return result

    def under_way(kind: str) -> int:
        return len(machine.effects.get(f"{kind} of {me()}", []))

    def wait_products(num: int, deps: Sequence[Product]) -> Product:
        owner = f"products of {me()}"
        machine.wait(lambda: len(machine.effects.get(owner, [])) <= num)
        return deps[0]

    def store(target: Descriptor, corner: Sequence[int], room: Room) -> None:
        def happen() -> None:
            part = target.matrix[target.box(corner, room.memory.shape)]
            assert part.isnan().all(), "written twice"
            part.copy_(room.memory[: part.shape[0], : part.shape[1]])

        machine.begin(Effect(f"stores of {me()}", (room,), happen))

    def wait_stores(num: int) -> None:
        owner = f"stores of {me()}"
        machine.wait(lambda: len(machine.effects.get(owner, [])) <= num)

    def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values[..., 0].clone(), values[..., 1].clone()

    def reshape(acc: Product, shape: Sequence[int]) -> torch.Tensor:
        assert under_way("products") == 0, "an accumulator is read before its products are there"
        return acc.values.reshape(*shape)

    def allocate(dtype: Any, shape: Sequence[int], _layout: object) -> Any:
        if dtype == "barriers":
            return Barriers([Barrier() for _ in range(shape[0])])
        return Room(torch.full(tuple(shape), float("nan")), machine)

    def warp_specialize(groups: Sequence[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        assert len(warps) == len(registers) == len(groups) - 1
        machine.run({f"group {place}": lambda each=each: each[0](*each[1]) for place, each in enumerate(groups)})

    gl = SimpleNamespace(
        int64="barriers", float32=torch.float32, static_range=range, minimum=min, split=split, reshape=reshape,
        inline_asm_elementwise=assembled,
        program_id=lambda _axis: program_id, num_programs=lambda _axis: num_programs,
        allocate_shared_memory=allocate, warp_specialize=warp_specialize,
        zeros=lambda shape, _dtype, _layout: Product(torch.zeros(*shape)),
        permute=lambda values, order: values.permute(*order), convert_layout=lambda values, _layout, **_: values,
        arange=lambda start, end, **_: torch.arange(start, end),
        load=lambda pointer: pointer.values[pointer.offset],
        NVMMADistributedLayout=lambda *_, **__: None, SliceLayout=lambda *_: None,
    )  # fmt: skip
    return {
        "gl": gl,
        "mbarrier": SimpleNamespace(init=init, wait=wait, arrive=arrive, expect=expect, MBarrierLayout=lambda: None),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=load, async_copy_shared_to_global=store, store_wait=wait_stores
        ),
        "mma": multiply,
        "mma_wait": wait_products,
        "fence_async_shared": lambda: None,
    }
