# SPDX-License-Identifier: Apache-2.0
"""The cheapest moves from one layout of a value to another, and which layouts of a value are worth keeping.

Knows one value's width at a time. Does not know the graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import cache

from tokenspeed.spmd.cost import Pricing
from tokenspeed.spmd.placement import LETTERS_OF, Axes, Layout, MoveKind, axes_of, moved, with_addends

Hop = tuple[Layout, MoveKind, Axes]
Route = tuple[int, tuple[Hop, ...]]
Kept = tuple[Layout, ...]
INFINITE = float("inf")


@cache
def hops(layout: Layout) -> tuple[tuple[MoveKind, Axes, Layout], ...]:
    """Every single move from a layout: one kind, along any axes that fit it."""
    return tuple(
        (kind, axes, moved(layout, kind, axes, "route"))
        for kind, (source, _) in LETTERS_OF.items()
        for axes in axes_of(layout, source)
    )


class Routes:
    """Cheapest routes for values of one width."""

    def __init__(self, pricing: Pricing, width: int) -> None:
        self.pricing = pricing
        self.width = width
        self._from: dict[Layout, dict[Layout, Route]] = {}
        self._gains: dict[tuple[Kept, Layout], int] = {}
        self._best: dict[tuple[Kept, Layout], Route | None] = {}
        self._turning: dict[tuple[Kept, Kept, bool], float] = {}

    def between(self, source: Layout, target: Layout) -> Route | None:
        """Price and moves, None when there is no way."""
        return self.reach(source).get(target)

    def best(self, kept: Kept, target: Layout) -> Route | None:
        """The cheapest route from any of the layouts that are kept."""
        if len(kept) == 1:
            return self.reach(kept[0]).get(target)
        if (kept, target) not in self._best:
            found = [route for each in kept if (route := self.between(each, target)) is not None]
            self._best[kept, target] = min(found, key=lambda x: (x[0], len(x[1]), x[1])) if found else None
        return self._best[kept, target]

    def turning(self, kept: Kept, wanted: Kept, *, is_shared: bool) -> float:
        """The price of making all that is wanted; infinite for addends of a value that several ops will read."""
        key = (kept, wanted, is_shared)
        if key not in self._turning:
            missing = [layout for layout in wanted if layout not in kept]
            found = [self.best(kept, layout) for layout in missing]
            closed = None in found or (is_shared and any("P" in layout for layout in missing))
            self._turning[key] = INFINITE if closed else sum(route[0] for route in found if route is not None)
        return self._turning[key]

    def reach(self, source: Layout) -> dict[Layout, Route]:
        """Every layout that can be reached."""
        if source not in self._from:
            self._from[source] = self._search(source)
        return self._from[source]

    def _search(self, source: Layout) -> dict[Layout, Route]:
        found: dict[Layout, Route] = {}
        queue: list[tuple[int, int, tuple[Hop, ...], Layout]] = [(0, 0, (), source)]
        while queue:
            price, _, path, layout = heapq.heappop(queue)
            if layout in found:
                continue
            found[layout] = (price, path)
            for kind, axes, target in hops(layout):
                if target not in found:
                    step = self.pricing.move_fs(kind, axes, layout, self.width)
                    longer = (*path, (layout, kind, axes))
                    heapq.heappush(queue, (price + step, len(longer), longer, target))
        return found

    def fused(self, kept: Kept, target: Layout) -> Iterator[tuple[int, tuple[Hop, ...], Axes]]:
        """Routes whose last move is an all-reduce that the op makes itself: price with the saving, moves before it,
        and the axes."""
        for axes in axes_of(target, "R"):
            partial = with_addends(target, axes)
            route = self.best(kept, partial)
            if route is not None:
                yield route[0] + self.pricing.fused_fs(axes, partial, self.width), route[1], axes

    def worth_keeping(self, kept: Iterable[Layout], targets: Iterable[Layout]) -> tuple[Layout, ...]:
        """The layouts without those from which no target is reached cheaper than from one other that is kept."""
        wanted = tuple(targets)
        best: list[tuple[Layout, tuple[float, ...]]] = []
        for layout in sorted(set(kept)):
            reach = self.reach(layout)
            prices = tuple(INFINITE if target not in reach else reach[target][0] for target in wanted)
            if any(all(a <= b for a, b in zip(other, prices, strict=True)) for _, other in best):
                continue
            beaten = [x for x in best if all(a <= b for a, b in zip(prices, x[1], strict=True))]
            best = [each for each in best if each not in beaten] + [(layout, prices)]
        return tuple(sorted(layout for layout, _ in best))

    def gain(self, kept: Kept, more: Layout) -> int:
        """The most that having one layout more can save on the way to any other."""
        if (kept, more) not in self._gains:
            saved = [0]
            for target, (price, _) in self.reach(more).items():
                route = self.best(kept, target)
                saved.append(0 if route is None else route[0] - price)
            self._gains[kept, more] = max(saved)
        return self._gains[kept, more]
