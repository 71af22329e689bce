# SPDX-License-Identifier: Apache-2.0
"""Masks against what they stand for: a token may come exactly when its text can go on; rollback undoes; nothing fails
open."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_vocabularies import byte_level
from tokenspeed.core.request import GrammarKind, Lead
from tokenspeed.grammar import Compiler, Grammar, GrammarError, Matcher, Tag, Tags, check, names, resolve
from tokenspeed.llm.grammars import vocabulary_of
from tokenspeed.llm.tokenizer import Tokenizer

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["cmd"],
        "additionalProperties": False,
    }
)
CALL = '<tool_call>\n{"name": "sh", "arguments": {"cmd": "ls </tool_call> 💡"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "ls", "arguments": {"x": [1, {}]}}\n</tool_call>'
SH = Tag("<tool_call>", '<tool_call>\n{"name": "sh", "arguments": ', "}\n</tool_call>", SCHEMA)
LS = Tag("<tool_call>", '<tool_call>\n{"name": "ls", "arguments": ', "}\n</tool_call>", '{"type": "object"}')
TOKENIZER = Tokenizer.from_source(byte_level())
COMPILER: Compiler = resolve("llguidance", vocabulary_of(TOKENIZER, [257]))
WORDS = -(-TOKENIZER.vocab_size // 32)
FREE = Tags((SH, LS))


def tags(*each: Tag, lead: Lead | None = None, **options: object) -> Grammar:
    source = Tags(each or (SH, LS), **{"has_text": False, "parting": "\n", **options})  # type: ignore[arg-type]
    return Grammar("tags", msgspec.json.encode(source).decode(), lead)


def free(lead: Lead | None = None) -> Grammar:
    return Grammar("tags", msgspec.json.encode(FREE).decode(), lead)


def allowed(matcher: Matcher) -> set[int]:
    mask = np.zeros(WORDS, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def stop_at(grammar: Grammar, text: str, *, ends: bool = True) -> str | None:
    """What was read of the text when it was refused; None when all of it, and its end, is taken."""
    check(grammar, strict=False)
    matcher = COMPILER.compile(grammar)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    for place, token_id in enumerate([*ids, *([257] if ends else [])]):
        if token_id not in allowed(matcher) or not matcher.accept(token_id):
            return TOKENIZER.decode(ids[:place], skip_special_tokens=False)
    return None


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar("json_schema", SCHEMA), '{"cmd": "a\\nb"}'),
        (Grammar("json_schema", SCHEMA), '{"cmd":"é 💡","n":-12}'),
        (Grammar("json_schema", '{"const": "🧪"}'), '"🧪"'),
        (Grammar("json_schema", SCHEMA, Lead("</think>")), 'so <b </thin: </think>\n\n{"cmd": "a"}'),
        (Grammar("json_schema", SCHEMA, Lead("</think>", "<think>")), '<think>so</think>{"cmd": "a"}'),
        (Grammar("json_schema", SCHEMA, Lead("</think>", "<think>")), '{"cmd": "a"}'),
        (Grammar("regex", r"\d{3}-[a-z/]+"), "123-ab/c"),
        (Grammar("regex", "^[ab]$"), "a"),
        (Grammar("lark", 'start: "a" b+\nb: "b"'), "abb"),
        (Grammar("ebnf", 'root ::= "a" b+\nb ::= "b" | [x-z]'), "abzb"),
        (free(), f"Hello <tool {CALL}\n{OTHER} bye"),
        (free(), "Hello"),
        (free(Lead("</think>")), f"shall I <tool_call> no </think>{CALL}"),
        (tags(), f"{CALL}\n{OTHER}"),
        (tags(num_max=2), f"{CALL}\n{OTHER}"),
        (tags(num_max=1), CALL),
        (tags(opening="<<", closing=">>"), f"<<{CALL}>>"),
        (tags(instead='{"const": 5}'), "5"),
        (tags(instead='{"const": 5}'), CALL),
        (tags(Tag("<c>", "<c>sh:", "</c>", SCHEMA, number_end="<a>")), '<c>sh:12<a>{"cmd": "x"}</c>'),
        (tags(Tag("<c>", "<c>", "</c>", lark='start: "x" "y"?')), "<c>x</c>"),
    ],
)
def test_a_text_that_matches_is_taken_to_its_end(grammar: Grammar, text: str) -> None:
    assert stop_at(grammar, text) is None


@pytest.mark.parametrize(
    ("grammar", "text", "read"),
    [
        (Grammar("json_schema", SCHEMA), '{"cme": 1}', '{"cm'),
        (Grammar("json_schema", SCHEMA), '{"cmd": 1}', '{"cmd": '),
        (Grammar("json_schema", SCHEMA), '{"cmd": "a"', '{"cmd": "a"'),
        (Grammar("json_schema", SCHEMA), '{\n"cmd": "a"}', "{"),
        (Grammar("json_schema", SCHEMA, Lead("</think>", "<think>")), 'x{"cmd": "a"}', ""),
        (Grammar("json_schema", SCHEMA, Lead("</think>")), "so it ends", "so it ends"),
        (Grammar("regex", "[ab]{2}"), "abb", "ab"),
        (free(), CALL.replace("sh", "rm"), '<tool_call>\n{"name": "'),
        (free(), CALL.replace('"ls ', "ls "), '<tool_call>\n{"name": "sh", "arguments": {"cmd": '),
        (tags(), f"x{CALL}", ""),
        (tags(num_max=1), f"{CALL}\n{OTHER}", CALL),
        (tags(num_max=2), f"{CALL}\n{OTHER}\n{CALL}", f"{CALL}\n{OTHER}"),
        (tags(), "", ""),
        (free(), CALL[:-20], CALL[:-20]),
    ],
)
def test_a_text_that_does_not_match_is_refused_where_it_departs(grammar: Grammar, text: str, read: str) -> None:
    assert stop_at(grammar, text) == read


def test_markup_of_the_model_is_kept_out_of_a_form_and_let_into_free_text() -> None:
    matcher = COMPILER.compile(Grammar("json_schema", '{"type": "string"}'))
    for token_id in TOKENIZER.encode('"a', add_special_tokens=False):
        assert matcher.accept(token_id)
    assert 256 not in allowed(matcher), "the control token <|bos|> would be text in a string"
    assert 258 in allowed(matcher), "<think> is an ordinary token of this vocabulary"
    assert 256 in allowed(COMPILER.compile(free()))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"type": "not-a-type"}'),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '{"type": "integer", "minimum": 1e999}'),
        ("regex", "["),
        ("regex", "(?=a)b"),
        ("lark", "start: unknown"),
        ("lark", ""),
        ("ebnf", "root ::= ("),
    ],
)
def test_what_cannot_be_enforced_is_a_fault_and_never_passes(kind: GrammarKind, source: str) -> None:
    with pytest.raises(GrammarError):
        check(Grammar(kind, source))


def test_an_unknown_keyword_is_a_fault_or_a_warning() -> None:
    grammar = Grammar("json_schema", '{"type": "string", "not": {"const": "x"}}')
    with pytest.raises(GrammarError, match="not"):
        check(grammar)
    assert any("not" in warning for warning in check(grammar, strict=False))


def test_backends_have_names() -> None:
    assert "llguidance" in names()


TEXTS: Sequence[tuple[Grammar, str]] = (
    (Grammar("json_schema", SCHEMA), '{"cmd": "hello \\" wé💡rld", "n": 1234}'),
    (free(), f"hello {CALL} hello"),
    (tags(), f"{OTHER}\n{CALL}"),
    (Grammar("regex", "[a-z ]{0,40}"), "hello world hello"),
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(TEXTS), st.data())
def test_rolling_back_undoes(case: tuple[Grammar, str], data: st.DataObject) -> None:
    """For every prefix of a text, and every way on from there: after a rollback all is as if that way was not gone."""
    grammar, text = case
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    matcher = COMPILER.compile(grammar)
    kept = data.draw(st.integers(0, len(ids)))
    for token_id in ids[:kept]:
        assert matcher.accept(token_id)
    before = allowed(matcher)
    gone = 0
    for _ in range(data.draw(st.integers(0, 12))):
        choices = sorted(allowed(matcher) - {257})
        if not choices:
            break
        assert matcher.accept(data.draw(st.sampled_from(choices)))
        gone += 1
    matcher.rollback(gone)
    assert allowed(matcher) == before
    for token_id in ids[kept:]:
        assert matcher.accept(token_id)


def test_copies_go_their_own_ways() -> None:
    first = COMPILER.compile(Grammar("regex", "ab|cd"))
    second = first.copy()
    letters = {letter: TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abcd"}
    assert first.accept(letters["a"])
    assert second.accept(letters["c"])
    assert allowed(first) == {letters["b"]}
    assert allowed(second) == {letters["d"]}
