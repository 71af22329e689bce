# SPDX-License-Identifier: Apache-2.0
"""How many levels a grammar can lead down, for a backend that recurses along it, on a stack that ends.

Knows references and rules; follows none by recursion, and errs on the side of more. Does not know what a level costs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tokenspeed.grammar._schemas import Json, target

_NODES_MAX = 300_000
_INLINE = re.compile(r"%json\s*")


@dataclass(slots=True, eq=False)
class _Part:
    """What lies below one place of a schema. depth: of its JSON. references: those in it."""

    depth: int = 0
    references: set[str] = field(default_factory=set)


def schema_levels(schema: Mapping[str, Json]) -> int | None:
    """Of a JSON Schema, references followed; None when that takes too long to find out."""
    num_nodes, has_bases = 0, False

    def part_of(root: Json) -> _Part:
        nonlocal num_nodes, has_bases
        part, left = _Part(), [(root, 1)]
        while left and num_nodes <= _NODES_MAX:
            node, depth = left.pop()
            num_nodes += 1
            part.depth = max(part.depth, depth)
            if isinstance(node, Mapping):
                reference = node.get("$ref")
                if isinstance(reference, str):
                    part.references.add(reference)
                has_bases |= node is not schema and "$id" in node
            inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
            left += [(child, depth + 1) for child in inner]
        return part

    whole = part_of(schema)
    parts: dict[str, _Part] = {}
    for reference in whole.references:
        place = None if has_bases else target(schema, reference)
        parts[reference] = whole if place is None else part_of(place)  # elsewhere: it may lead anywhere
        if num_nodes > _NODES_MAX:
            return None
    if whole in parts.values():
        return whole.depth + sum(part.depth + 1 for part in parts.values())
    return whole.depth + _longest(parts)


def lark_levels(source: str) -> int | None:
    """Of a grammar in Lark or GBNF: a rule starts on a line of its own, and has a colon there; schemas in it count as
    they do alone."""
    num_levels = sum(":" in line for line in source.splitlines()) + source.count("(") + source.count("[")
    for schema in _inline_schemas(source):
        inner = schema_levels(schema)
        if inner is None:
            return None
        num_levels += inner
    return num_levels


def _longest(parts: Mapping[str, _Part]) -> int:
    """Of the ways along references that take none twice, no way is longer. What may lead into a circle counts whole."""
    sources: dict[str, list[str]] = {}
    for reference, part in parts.items():
        for inner in part.references & parts.keys():
            sources.setdefault(inner, []).append(reference)
    num_open = {reference: len(part.references & parts.keys()) for reference, part in parts.items()}
    below = dict.fromkeys(parts, 0)
    ready, length = [reference for reference, number in num_open.items() if not number], 0
    while ready:
        reference = ready.pop()
        here = below[reference] + parts[reference].depth + 1
        length = max(length, here)
        for source in sources.get(reference, ()):
            below[source] = max(below[source], here)
            num_open[source] -= 1
            if not num_open[source]:
                ready.append(source)
    return length + sum(parts[reference].depth + 1 for reference, number in num_open.items() if number)


def _inline_schemas(source: str) -> Iterator[Mapping[str, Json]]:
    """The JSON Schemas in a Lark grammar."""
    decoder, end = json.JSONDecoder(), 0
    while (found := _INLINE.search(source, end)) is not None:
        end = found.end()
        try:
            schema, end = decoder.raw_decode(source, end)
        except (ValueError, RecursionError):  # nor can the backend read it
            continue
        if isinstance(schema, Mapping):
            yield schema
