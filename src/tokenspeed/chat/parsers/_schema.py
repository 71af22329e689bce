# SPDX-License-Identifier: Apache-2.0
"""What the schema of a tool says of its arguments: as much as parsers need, never more than that it allows."""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed.chat.parsers import Schema
from tokenspeed.chat.parsers import _json as json_reading


def fits(schema: Schema, text: str) -> bool:
    """Whether text is a JSON object with the keys that the schema requires, each of a type that it allows."""
    try:
        values = json_reading.parsed(text)
    except ValueError:
        return False
    if not isinstance(values, dict):
        return False
    required = schema.get("required")
    has_required = all(key in values for key in (required if isinstance(required, list) else ()))
    return has_required and all(_is_of(value, types_of(schema, key)) for key, value in values.items())


def _is_of(value: object, types: frozenset[str]) -> bool:
    kind = type_of(value)
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return not types or kind in types or (kind == "integer" and "number" in types)


def type_of(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "string")


def types_of(schema: Schema, key: str) -> frozenset[str]:
    """The types that a parameter may have; empty where the schema does not say."""
    properties = schema.get("properties")
    parameter = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_declared(parameter, schema, 8))


def _declared(part: object, root: Schema, depth: int) -> set[str]:
    if not isinstance(part, Mapping) or not depth:
        return set()
    kind = part.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    if isinstance(part.get("enum"), list):
        return {type_of(one) for one in part["enum"]}
    if "const" in part:
        return {type_of(part["const"])}
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(part.get(several), list):
            each = [_declared(one, root, depth - 1) for one in part[several]]
            return set().union(*each) if all(each) or several == "allOf" else set()
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: object = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return _declared(target, root, depth - 1)
    return set()
