# SPDX-License-Identifier: Apache-2.0
"""How much of a schema is enforced: one awkward keyword is left out and told of, what no schema may hold is refused
with its place."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tokenspeed.grammar import SchemaError, fit_schema

LOOK_AHEAD = "^(?=.*@).+$"
DOMAIN = r"^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$"  # of a public tool


def test_a_schema_that_can_be_enforced_stays_as_it_is() -> None:
    schema = {
        "title": "T",
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"u": {"type": "string", "format": "uri", "maxLength": 10000, "default": "x"}},
        "patternProperties": {"^x-": {"type": "integer"}},
        "required": ["u"],
    }
    fitted = fit_schema(schema, strict=True)
    assert (fitted.schema, fitted.unenforced) == (schema, ())


@pytest.mark.parametrize(
    ("schema", "left", "paths"),
    [
        ({"type": "string", "pattern": LOOK_AHEAD, "minLength": 3}, {"type": "string", "minLength": 3}, {"pattern"}),
        (
            {"type": "string", "pattern": DOMAIN, "maxLength": 253},
            {"type": "string", "maxLength": 253},
            {"pattern"},
        ),
        ({"type": "string", "format": "weird"}, {"type": "string"}, {"format"}),
        ({"type": "string", "not": {"const": "x"}}, {"type": "string"}, {"not"}),
        ({"type": "array", "uniqueItems": True}, {"type": "array"}, {"uniqueItems"}),
        ({"type": "object", "if": {}, "then": {}}, {"type": "object"}, {"if", "then"}),
        ({"anyOf": [{"pattern": "["}, {"type": "null"}]}, {"anyOf": [{}, {"type": "null"}]}, {"anyOf[0].pattern"}),
        (
            {"type": "object", "properties": {"not": {"type": "string", "pattern": LOOK_AHEAD}}},
            {"type": "object", "properties": {"not": {"type": "string"}}},
            {"properties.not.pattern"},
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": LOOK_AHEAD}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
            {"$defs.a.pattern"},
        ),
    ],
)
def test_what_cannot_be_enforced_is_left_out_and_told(schema: Any, left: Any, paths: set[str]) -> None:
    fitted = fit_schema(schema, strict=False)
    assert fitted.schema == left
    assert set(fitted.unenforced) == paths
    with pytest.raises(SchemaError):
        fit_schema(schema, strict=True)


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"type": "not-a-type"}, "", "not-a-type"),
        ({"properties": {"a": {"properties": {"b": {"type": "wat"}}}}}, "properties.a.properties.b", "wat"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "", "leads to itself"),
        ({"properties": {"p": {"$ref": "#/$defs/none"}}}, "properties.p", "none"),
        ({"anyOf": [{"type": "null"}, {"required": "x"}]}, "anyOf[1]", "required"),
        ({"properties": 5}, "", "properties"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, path: str, words: str) -> None:
    with pytest.raises(SchemaError, match=words) as refused:
        fit_schema(schema, strict=False)
    assert refused.value.path == path


def test_recursion_that_consumes_something_is_fine() -> None:
    tree = {"type": "object", "properties": {"k": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/t"}}}}
    schema = {"$ref": "#/$defs/t", "$defs": {"t": {**tree, "required": ["k"], "additionalProperties": False}}}
    assert fit_schema(schema, strict=True).unenforced == ()


@pytest.mark.parametrize("depth", [200, 5000])
def test_a_schema_that_is_nested_too_deeply_is_refused(depth: int) -> None:
    schema: dict[str, Any] = {"type": "wat"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(SchemaError) as refused:
        fit_schema(schema, strict=False)
    assert len(refused.value.path) < 300


def test_a_long_chain_of_references_is_followed_once() -> None:
    """Not from each of its links anew."""
    links: dict[str, Any] = {f"n{index}": {"$ref": f"#/$defs/n{index + 1}"} for index in range(6000)}
    begun_s = time.monotonic()
    with pytest.raises(SchemaError, match="levels"):
        fit_schema({"$ref": "#/$defs/n0", "$defs": {**links, "n6000": {"type": "integer"}}}, strict=True)
    with pytest.raises(SchemaError, match="leads to itself"):
        fit_schema({"$ref": "#/$defs/n0", "$defs": {**links, "n6000": {"$ref": "#/$defs/n0"}}}, strict=True)
    assert time.monotonic() - begun_s < 20.0
