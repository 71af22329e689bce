# SPDX-License-Identifier: Apache-2.0
"""What form an answer shall have, read from the fields that the dialects and their common extensions have for it.

Knows the fields' names; does not know how a model speaks or how a form is enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.request import Grammar
from tokenspeed.grammar import GrammarError, SchemaError, Tag, Tags, as_text, check, fit_schema

_OBJECT: Mapping[str, object] = {"type": "object"}


class StructuredOutputs(msgspec.Struct):
    """structured_outputs of a body: one of these. json: a schema, or its text. choice: one of these texts. grammar: in
    Lark or GBNF."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


class FormatFields(msgspec.Struct, kw_only=True):
    """Fields of a body that other servers know by these names."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


_FORM_FIELDS = (*FormatFields.__struct_fields__, "response_format", "output_config", "output_format")


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer shall match. unenforced: paths of keywords of its schema that are not enforced."""

    grammar: Grammar
    unenforced: tuple[str, ...] = ()


def asks_form(body: msgspec.Struct) -> bool:
    """Whether any field asks for a form; to read which one takes as long as its check does."""
    return any(getattr(body, name, None) is not None for name in _FORM_FIELDS)


def form_of(body: FormatFields) -> Form | None:
    """The form that the extensions ask for. InvalidRequestError names a field that is wrong or one too many."""
    asked = body.structured_outputs or StructuredOutputs()
    found: list[tuple[str, Form]] = []
    for name, schema in (
        ("structured_outputs.json", asked.json),
        ("structured_outputs.json_object", _OBJECT if asked.json_object else None),
        ("guided_json", body.guided_json),
        ("json_schema", body.json_schema),
    ):
        if schema is not None:
            found.append((name, json_form(_schema(schema, name), name)))
    for name, regex in (
        ("structured_outputs.regex", asked.regex),
        ("guided_regex", body.guided_regex),
        ("regex", body.regex),
    ):
        if regex is not None:
            found.append((name, _checked(Grammar("regex", regex), name)))
    for name, grammar in (
        ("structured_outputs.grammar", asked.grammar),
        ("guided_grammar", body.guided_grammar),
        ("ebnf", body.ebnf),
        ("grammar", body.grammar),
    ):
        if grammar is not None:
            found.append((name, _checked(_grammar(grammar), name)))
    for name, choice in (("structured_outputs.choice", asked.choice), ("guided_choice", body.guided_choice)):
        if choice is not None:
            found.append((name, _choice(choice, name)))
    if asked.structural_tag is not None:
        name = "structured_outputs.structural_tag"
        found.append((name, tags_form(_schema(asked.structural_tag, name), name)))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequestError(f"{names} each ask for a form; send one of them", found[1][0])
    return found[0][1] if found else None


def format_form(form: Mapping[str, object] | None, param: str) -> Form | None:
    """The form that response_format, text.format or output_config.format asks for. Raises InvalidRequestError."""
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return json_form(_OBJECT, param)
    if kind == "structural_tag":
        return tags_form(form, param)
    if kind != "json_schema":
        raise InvalidRequestError(f"{param}.type is {kind!r}; use text, json_object or json_schema", f"{param}.type")
    inner = form.get("json_schema")
    fields = inner if isinstance(inner, Mapping) else form
    place = f"{param}.json_schema.schema" if fields is inner else f"{param}.schema"
    schema = fields.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{place} is missing; it is a JSON Schema", place)
    return json_form(schema, place, strict=fields.get("strict") is True)


def json_form(schema: Mapping[str, object], param: str, *, strict: bool = False) -> Form:
    """JSON that matches a schema. Raises InvalidRequestError that names the place in it."""
    try:
        fitted = fit_schema(schema, strict=strict)
    except SchemaError as error:
        place = f"{param}.{error.path}" if error.path else param
        raise InvalidRequestError(f"{place}: {error}", param) from None
    return Form(Grammar("json_schema", as_text(fitted.schema)), fitted.unenforced)


def tags_form(form: Mapping[str, object], param: str) -> Form:
    """Free text in which what begins with a trigger has a form: `structures` of begin, schema and end, and `triggers`.
    Raises InvalidRequestError."""
    structures, triggers = form.get("structures"), form.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise InvalidRequestError(f"{param} needs the lists structures (begin, schema, end) and triggers", param)
    tags = []
    for index, structure in enumerate(structures):
        place = f"{param}.structures[{index}]"
        if not isinstance(structure, Mapping) or not isinstance(structure.get("begin"), str):
            raise InvalidRequestError(f"{place}.begin is missing", place)
        begin, end, schema = str(structure["begin"]), str(structure.get("end") or ""), structure.get("schema")
        trigger = next((text for text in triggers if isinstance(text, str) and text and begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequestError(f"{place}.begin begins with none of the triggers", place)
        fitted = json_form(schema if isinstance(schema, Mapping) else {}, f"{place}.schema")
        tags.append(Tag(trigger, begin, end, fitted.grammar.source))
    return _checked(tags_grammar(Tags(tuple(tags))), param)


def tags_grammar(tags: Tags) -> Form:
    """Tags as a form."""
    return Form(Grammar("tags", msgspec.json.encode(tags).decode()))


def _checked(form: Grammar | Form, param: str) -> Form:
    grammar = form.grammar if isinstance(form, Form) else form
    try:
        check(grammar, strict=False)
    except GrammarError as error:
        raise InvalidRequestError(f"{param}: {error}", param) from None
    return Form(grammar)


def _grammar(text: str) -> Grammar:
    """GBNF says what a rule is with ::=, Lark with a colon."""
    return Grammar("ebnf" if "::=" in text else "lark", text)


def _choice(choice: list[str], param: str) -> Form:
    if not choice or not all(choice):
        raise InvalidRequestError(f"{param} is a list of one text or more, none of them empty", param)
    options = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
    return _checked(Grammar("lark", f"start: {options}"), param)


def _schema(schema: Mapping[str, object] | str, param: str) -> Mapping[str, object]:
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"{param} is no JSON object: {error}", param) from None
