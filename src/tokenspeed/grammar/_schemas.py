# SPDX-License-Identifier: Apache-2.0
"""How much of a JSON Schema can be enforced: which parts are left out, and where one is wrong.

Knows schemas as JSON; what a backend can enforce it is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Json = object
Faults = Callable[[Mapping[str, Json], bool], str | None]
"""What is wrong with a schema, None when nothing is. The second argument: whether unknown keywords are wrong."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_MAY_GO = ("pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "patternProperties")
_MAY_GO_WHOLE = ("not", "contains", "propertyNames", "if", "then", "else", "dependentSchemas")
_MEANING = (*_MAPS, *_LISTS, *_SINGLES, "$ref", "type", "required", "enum", "const")
_PATH_MAX = 200
_ROOTS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Fitted:
    """What can be enforced of a schema. unenforced: paths of the keywords that cannot, such as
    properties.email.pattern."""

    schema: Mapping[str, Json]
    unenforced: tuple[str, ...] = ()


class SchemaError(Exception):
    """path: where in the schema; empty for the whole."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path if len(path) <= _PATH_MAX else f"{path[:_PATH_MAX]}…"


def fit(schema: Mapping[str, Json], faults: Faults, *, strict: bool) -> Fitted:
    """The schema without what cannot be enforced; strict: raise SchemaError for that too. Raises SchemaError for what
    no schema may hold."""
    _refuse_endless(schema)
    message = faults(schema, True)
    if message is None:
        return Fitted(schema)
    if strict:
        raise SchemaError(_place(schema, schema, faults, True), message)
    unknown = tuple(path for path, part in _parts(schema) for path in _alone(path, part, schema, faults))
    kept = _without(schema, "", frozenset(unknown))
    assert isinstance(kept, Mapping)
    message = faults(kept, False)
    if message is not None:
        raise SchemaError(_place(kept, kept, faults, False), message)
    return Fitted(kept, unknown)


def _alone(path: str, part: Mapping[str, Json], root: Mapping[str, Json], faults: Faults) -> Iterator[str]:
    """The paths of keywords of `part` that cannot be enforced, even in a schema of their own, and that a schema can do
    without."""
    known = {key: part[key] for key in ("type",) if key in part}
    limits: dict[str, Json] = {}
    for key, value in part.items():
        if key in _MAY_GO_WHOLE:
            cannot = faults({key: value, **_roots(root)}, True) is not None
        elif key in _MAY_GO:
            cannot = faults({**known, key: value}, True) is not None
            limits |= {} if cannot else {key: value}
        else:
            cannot = key not in _MEANING and _is_unknown({**known, key: value}, faults)
        if cannot:
            yield _joined(path, key)
    for key in sorted(limits, key=_MAY_GO.index):  # each is fine, and together they may be too much
        if faults({**known, **limits}, True) is None:
            return
        del limits[key]
        yield _joined(path, key)


def _is_unknown(part: Mapping[str, Json], faults: Faults) -> bool:
    """Whether a keyword is one that the backend can leave out, and has to."""
    return faults(part, True) is not None and faults(part, False) is None


def _parts(schema: Json, path: str = "") -> Iterator[tuple[str, Mapping[str, Json]]]:
    """The schema and every schema in it."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for step, child in _children(schema):
        yield from _parts(child, _joined(path, step))


def _children(schema: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for key in _MAPS:
        inner = schema.get(key)
        if isinstance(inner, Mapping):
            yield from ((_joined(key, str(name)), child) for name, child in inner.items())
    for key in _LISTS:
        listed = schema.get(key)
        if isinstance(listed, list):
            yield from ((f"{key}[{index}]", child) for index, child in enumerate(listed))
    yield from ((key, schema[key]) for key in _SINGLES if key in schema)


def _without(schema: Json, path: str, gone: frozenset[str]) -> Json:
    """The schema without the keywords at these paths."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Json] = {}
    for key, value in schema.items():
        here = _joined(path, key)
        if here in gone:
            continue
        if key in _MAPS and isinstance(value, Mapping):
            kept[key] = {name: _without(child, _joined(here, str(name)), gone) for name, child in value.items()}
        elif key in _LISTS and isinstance(value, list):
            kept[key] = [_without(child, f"{here}[{index}]", gone) for index, child in enumerate(value)]
        else:
            kept[key] = _without(value, here, gone) if key in _SINGLES else value
    return kept


def _place(schema: Mapping[str, Json], root: Mapping[str, Json], faults: Faults, strict: bool, path: str = "") -> str:
    """The path of the innermost schema that has a fault of its own."""
    for step, child in _children(schema):
        if isinstance(child, Mapping) and faults({**_roots(root), **child}, strict) is not None:
            return _place(child, root, faults, strict, _joined(path, step))
    return path


def _roots(root: Mapping[str, Json]) -> dict[str, Json]:
    """What references point to."""
    return {key: root[key] for key in _ROOTS if key in root}


def _refuse_endless(schema: Mapping[str, Json]) -> None:
    """A reference that leads to itself, with nothing between, describes no value."""
    ending: set[str] = set()
    for path, part in _parts(schema):
        seen: dict[str, None] = {}
        here: Json = part
        while isinstance(here, Mapping) and isinstance(here.get("$ref"), str):
            reference = str(here["$ref"])
            if reference in seen:
                raise SchemaError(path, f"the reference {reference} leads to itself")
            if reference in ending:
                break
            seen[reference] = None
            here = target(schema, reference)
        ending |= seen.keys()


def target(schema: Mapping[str, Json], reference: str) -> Json:
    """What a reference into the same document points to; None for any other."""
    if not reference.startswith("#"):
        return None
    here: Json = schema
    for step in reference[1:].strip("/").split("/") if reference.strip("#/") else ():
        name = step.replace("~1", "/").replace("~0", "~")
        here = here.get(name) if isinstance(here, Mapping) else None
    return here


def _joined(path: str, step: str) -> str:
    return f"{path}.{step}" if path else step


def as_text(schema: Mapping[str, Json]) -> str:
    """The schema as the source of a grammar, keys in their order."""
    return json.dumps(schema, ensure_ascii=False)
