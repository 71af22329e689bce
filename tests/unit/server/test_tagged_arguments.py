# SPDX-License-Identifier: Apache-2.0
"""Calls whose parameters are tagged, as the grammar allows them: what is allowed is read back as those arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tokenspeed.chat.parsers import CallFormat, names, tagged_format
from tokenspeed.grammar import Tag
from tokenspeed.server.tagged_arguments import tagged_lark
from unit.chat.test_parsers import read, said
from unit.grammar.test_llguidance import stop_at, tags

SCHEMA: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "opts": {"type": "array", "items": {"$ref": "#/$defs/word"}},
        "mode": {"enum": ["fast", "slow"]},
        "why": {"type": ["string", "null"]},
    },
    "required": ["path", "n"],
    "$defs": {"word": {"type": "string", "maxLength": 3}},
}
DIALECTS = [name for name in names() if tagged_format(name, ["edit"])]


def form_of(dialect: str) -> CallFormat:
    forms = tagged_format(dialect, ["edit"])
    assert forms is not None
    (form,) = forms
    return form


def written(form: CallFormat, arguments: Mapping[str, object]) -> str:
    """The call, as the dialect writes it."""
    marks = form.tagged
    assert marks is not None
    text = form.begin
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        shown = value if is_text else json.dumps(value)
        text += f"{marks.open}{key}{marks.before_text if is_text else marks.before_json}{shown}{marks.close}"
    return text + marks.end + form.end


def left_at(dialect: str, text: str, schema: Mapping[str, object] = SCHEMA) -> str | None:
    """Where the grammar of free text with calls refuses the text; None when it takes all."""
    form = form_of(dialect)
    tag = Tag(form.trigger, form.begin, form.end, lark=tagged_lark(schema, form.tagged))  # type: ignore[arg-type]
    return stop_at(tags(tag, has_text=True), text)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "a.py", "n": 3},
        {"path": "", "n": -1, "opts": ["abc"], "mode": "slow", "why": "so"},
        {"path": "x\ny", "n": 3, "why": "because"},
        {"path": "a </parameter> </arg_value> b </tool_call>", "n": 3},
    ],
)
def test_what_fits_is_allowed_and_is_read_back(dialect: str, arguments: Mapping[str, object]) -> None:
    form = form_of(dialect)
    call = written(form, arguments)
    assert left_at(dialect, f"Hm. {form.opening}{call}{form.closing}") is None
    tag = Tag(form.trigger, form.begin, form.end, lark=tagged_lark(SCHEMA, form.tagged))  # type: ignore[arg-type]
    only = tags(tag, opening=form.opening, parting=form.parting, closing=form.closing)
    two = f"{form.opening}{call}{form.parting}{call}{form.closing}"
    assert stop_at(only, two) is None
    for sound in (False, True):
        _, content, calls = said(read(dialect, two, tools={"edit": SCHEMA}, sound_calls=sound))
        assert (content, calls) == ("", [("edit", arguments)] * 2)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ({"path": "x"}, "<"),
        ({"n": 3, "path": "x"}, None),
        ({"path": "x", "n": "y"}, None),
        ({"path": "x", "n": 3, "mode": "medium"}, None),
        ({"path": "x", "n": 3, "opts": ["long"]}, None),
        ({"path": "x", "n": 3, "other": 1}, None),
    ],
)
def test_what_does_not_fit_is_refused(dialect: str, arguments: Mapping[str, object], last: str | None) -> None:
    """last: what was read last: a call that lacks a parameter is led on to it, and never lost in a text."""
    call = written(form_of(dialect), arguments)
    left = left_at(dialect, call)
    assert left is not None
    assert len(left) < len(call) - len("medium")
    assert last is None or left.endswith(last)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_schema_that_names_nothing_takes_anything(dialect: str) -> None:
    for arguments in ({}, {"any-thing": "x", "b": "y"}):
        assert left_at(dialect, written(form_of(dialect), arguments), {"type": "object"}) is None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_line_breaks_between_the_marks_may_be_missing(dialect: str) -> None:
    form = form_of(dialect)
    begin = form.begin
    call = begin + written(form, {"path": "x", "n": 3})[len(begin) :].replace("\n", "")
    assert left_at(dialect, call.removesuffix(form.end.replace("\n", "")) + form.end) is None


def test_the_dialects_that_tag_their_parameters() -> None:
    assert {"qwen3_coder", "glm4", "minimax_m2"} <= {*DIALECTS}
    assert tagged_format("hermes", ["edit"]) is None
