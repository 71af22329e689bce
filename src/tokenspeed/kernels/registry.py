# SPDX-License-Identifier: Apache-2.0
"""Which solution of an op runs here, decided once when a model is built, and why the others do not.

Finds solutions by scanning `ops/<op>/` (file name = solution name; a leading underscore marks what they share) and the
entry-point group `tokenspeed.kernels`.
Does not know what an op computes.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tokenspeed.core.errors import ConfigError

PLUGIN_API_VERSION = 1
PLUGIN_GROUP = "tokenspeed.kernels"
_OPS_PACKAGE = "tokenspeed.kernels.ops"
_NOT_SOLUTIONS = frozenset({"cases"})

Kernel = Callable[..., Any]


class Band(enum.IntEnum):
    """How good a solution claims to be; of those that support a context, the highest band wins."""

    REFERENCE = 0
    PORTABLE = 1
    PERFORMANT = 2
    SPECIALISED = 3
    PLUGIN = 4


@dataclass(frozen=True, slots=True)
class Ok:
    """The solution runs here."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the solution does not run here, in words for a user."""

    text: str


Support = Ok | Reason


@dataclass(frozen=True, slots=True)
class KernelContext:
    """What a choice may depend on. overrides: op name -> solution name; a trailing `!` skips `supports`.
    disabled_plugins: entry-point names that are not loaded. features: what the op's contract calls by name and this
    use of the op asks for. batch_invariant: only solutions will do of which a row's bits do not depend on the others,
    and that give the same bits each time."""

    device: str
    dtype: torch.dtype
    overrides: Mapping[str, str] = field(default_factory=dict)
    disabled_plugins: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Solution:
    """One way to compute an op. Built-in solutions are the module constant SOLUTION of a file in the op's folder.

    graph_safe: may be captured in a device graph. deterministic: equal inputs give equal bits.
    batch_invariant: a row's bits do not depend on the other rows of the call.
    weight_layout: how weights must lie in memory ("plain" is row-major as in the checkpoint).
    features: named parts of the op's contract that the solution has; without a word it has none, and is passed over
    where one is asked for.
    """

    name: str
    band: Band
    supports: Callable[[KernelContext], Support]
    build: Callable[[KernelContext], Kernel]
    graph_safe: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    weight_layout: str = "plain"
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Plugin:
    """What an entry point of the group `tokenspeed.kernels` loads: solutions by op name."""

    api_version: int
    solutions: Mapping[str, tuple[Solution, ...]]


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """An op made callable. passed_over: every other solution with the reason, in order of preference."""

    op: str
    solution: str
    call: Kernel
    passed_over: tuple[tuple[str, str], ...]
    traits: Solution


def bind(op: str, ctx: KernelContext) -> BoundKernel:
    """Choose and build the solution of `op` for `ctx`. ConfigError when an override cannot be kept or two tie."""
    solutions = solutions_of(op, ctx.disabled_plugins)
    override = ctx.overrides.get(op)
    if override is not None:
        chosen, reasons = _obey(op, ctx, solutions, override)
    else:
        chosen, reasons = _choose(op, ctx, solutions)
    return BoundKernel(op, chosen.name, chosen.build(ctx), reasons, chosen)


def bindings_table(ctx: KernelContext, ops: tuple[str, ...] | None = None) -> tuple[BoundKernel, ...]:
    """What each op (all of them when None) would be bound to, for `doctor`."""
    return tuple(bind(op, ctx) for op in (op_names() if ops is None else ops))


@functools.cache
def op_names() -> tuple[str, ...]:
    """All ops, by scanning the folder."""
    package = importlib.import_module(_OPS_PACKAGE)
    return tuple(sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.ispkg))


def solutions_of(op: str, disabled_plugins: frozenset[str] = frozenset()) -> tuple[Solution, ...]:
    """Every solution of `op`, best band first."""
    assert op in op_names(), f"no op {op!r}; ops are {', '.join(op_names())}"
    found = list(_built_in(op))
    for plugin_name, plugin in _plugins().items():
        if plugin_name not in disabled_plugins:
            found.extend(_of_plugin(plugin_name, plugin, op))
    names = [solution.name for solution in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"op {op}: two solutions are called {name!r}; disable the plugin that brings the second")
    return tuple(sorted(found, key=lambda solution: (-solution.band, solution.name)))


def check_overrides(overrides: Mapping[str, str]) -> None:
    """ConfigError when an override names an op that does not exist."""
    for op in overrides:
        if op not in op_names():
            raise ConfigError(f"kernel override {op}={overrides[op]}: no such op; ops are {', '.join(op_names())}")


@functools.cache
def _built_in(op: str) -> tuple[Solution, ...]:
    package = importlib.import_module(f"{_OPS_PACKAGE}.{op}")
    files = [info.name for info in pkgutil.iter_modules(package.__path__)]
    names = [name for name in files if name not in _NOT_SOLUTIONS and not name.startswith("_")]
    solutions: list[Solution] = []
    for name in names:
        solution = vars(importlib.import_module(f"{_OPS_PACKAGE}.{op}.{name}")).get("SOLUTION")
        assert isinstance(solution, Solution), f"ops/{op}/{name}.py does not define SOLUTION"
        assert solution.name == name, f"ops/{op}/{name}.py calls its solution {solution.name!r}"
        solutions.append(solution)
    assert any(solution.band is Band.REFERENCE for solution in solutions), f"op {op} has no reference"
    return tuple(solutions)


@functools.cache
def _plugins() -> Mapping[str, Plugin]:
    loaded: dict[str, Plugin] = {}
    for entry in importlib.metadata.entry_points(group=PLUGIN_GROUP):
        plugin = entry.load()
        if not isinstance(plugin, Plugin):
            raise ConfigError(f"kernel plugin {entry.name}: {entry.value} is not a tokenspeed.kernels.registry.Plugin")
        loaded[entry.name] = plugin
    return loaded


def _of_plugin(plugin_name: str, plugin: Plugin, op: str) -> list[Solution]:
    solutions = list(plugin.solutions.get(op, ()))
    for solution in solutions:
        if solution.band is not Band.PLUGIN:
            raise ConfigError(f"kernel plugin {plugin_name}: {op}/{solution.name} must use Band.PLUGIN")
    if plugin.api_version == PLUGIN_API_VERSION:
        return solutions
    text = f"plugin {plugin_name} speaks API {plugin.api_version}, this build speaks {PLUGIN_API_VERSION}"
    return [_refusing(solution, text) for solution in solutions]


def _refusing(solution: Solution, text: str) -> Solution:
    return Solution(solution.name, solution.band, lambda _ctx: Reason(text), solution.build)


def _support(solution: Solution, ctx: KernelContext) -> Support:
    if ctx.batch_invariant and not (solution.batch_invariant and solution.deterministic):
        return Reason("a row's bits depend on the rest of the batch")
    lacking = sorted(ctx.features - solution.features)
    return Reason(f"has no {', '.join(lacking)}") if lacking else solution.supports(ctx)


def _obey(
    op: str, ctx: KernelContext, solutions: tuple[Solution, ...], override: str
) -> tuple[Solution, tuple[tuple[str, str], ...]]:
    name = override.removesuffix("!")
    chosen = next((solution for solution in solutions if solution.name == name), None)
    if chosen is None:
        known = ", ".join(solution.name for solution in solutions)
        raise ConfigError(f"kernel override {op}={override}: no such solution; {op} has {known}")
    support = _support(chosen, ctx)
    if isinstance(support, Reason) and not override.endswith("!"):
        raise ConfigError(f"kernel override {op}={override}: {support.text}; {op}={name}! would force it")
    others = [solution for solution in solutions if solution is not chosen]
    return chosen, tuple((solution.name, f"overridden by {op}={override}") for solution in others)


def _choose(
    op: str, ctx: KernelContext, solutions: tuple[Solution, ...]
) -> tuple[Solution, tuple[tuple[str, str], ...]]:
    chosen: Solution | None = None
    reasons: list[tuple[str, str]] = []
    for solution in solutions:
        support = _support(solution, ctx)
        if isinstance(support, Reason):
            reasons.append((solution.name, support.text))
        elif chosen is None:
            chosen = solution
        elif chosen.band == solution.band:
            raise ConfigError(
                f"op {op}: {chosen.name} and {solution.name} both claim band {solution.band.name.lower()}; "
                f"choose one with an override, {op}={chosen.name} or {op}={solution.name}"
            )
        else:
            reasons.append((solution.name, f"band {solution.band.name.lower()} is below {chosen.name}'s"))
    if chosen is None:
        raise ConfigError(f"op {op} has no solution here: " + "; ".join(f"{name}: {why}" for name, why in reasons))
    return chosen, tuple(reasons)
