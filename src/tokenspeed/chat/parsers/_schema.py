# SPDX-License-Identifier: Apache-2.0
"""What the schema of a tool says of its arguments: as much as parsers need, never more than that it allows."""

from __future__ import annotations

from collections.abc import Mapping

from tokenspeed.chat.parsers import Schema
from tokenspeed.chat.parsers import _json as json_reading

DEPTH_MAX = 8
_SEVERAL = ("anyOf", "oneOf", "allOf")


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
    return types_in(property_of(schema, key, schema), schema)


def types_in(part: object, root: Schema) -> frozenset[str]:
    """The types that a part of the schema `root` allows; empty where it does not say."""
    return frozenset(_declared(part, root, DEPTH_MAX))


def property_of(part: object, key: str, root: Schema) -> object:
    """The part of the schema `root` for a key of the objects that `part` allows; None where it does not say."""
    properties = _field(part, "properties", root, DEPTH_MAX)
    return properties.get(key) if isinstance(properties, Mapping) else None


def items_of(part: object, root: Schema) -> object:
    """The part of the schema `root` for the items of the arrays that `part` allows; None where it does not say."""
    return _field(part, "items", root, DEPTH_MAX)


def _field(part: object, name: str, root: Schema, depth: int) -> object:
    """What the first alternative of a part that has a field of this name has there."""
    if not isinstance(part, Mapping) or not depth:
        return None
    if name in part:
        return part[name]
    alternatives = [one for several in _SEVERAL if isinstance(part.get(several), list) for one in part[several]]
    if isinstance(part.get("$ref"), str):
        alternatives.append(_target(part["$ref"], root))
    found = (_field(one, name, root, depth - 1) for one in alternatives)
    return next((one for one in found if one is not None), None)


def _target(reference: str, root: Schema) -> object:
    target: object = root if reference.startswith("#/") else None
    for step in reference[2:].split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return target


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
    for several in _SEVERAL:
        if isinstance(part.get(several), list):
            each = [_declared(one, root, depth - 1) for one in part[several]]
            return set().union(*each) if all(each) or several == "allOf" else set()
    reference = part.get("$ref")
    return _declared(_target(reference, root), root, depth - 1) if isinstance(reference, str) else set()
