# SPDX-License-Identifier: Apache-2.0
"""Grammars by the llguidance library: everything becomes one Lark grammar of its dialect.

Keywords of a JSON Schema that the library does not know are left out where they are compiled: whether that is right is
settled before, by `check`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from llguidance import regex_to_lark as lark_regex
from tokenizers import Tokenizer

from tokenspeed.grammar import Grammar, GrammarError, Mask, Matcher, Tag, Tags, Vocabulary
from tokenspeed.grammar._levels import lark_levels, schema_levels

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_NUM_COMPILED = 256
_ONE_LINE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""As models are used to write JSON. White space wherever JSON allows it would let a weak one write nothing else."""
_SCHEMA_LEVELS_MAX, _LARK_LEVELS_MAX = 700, 1500
"""The library recurses, and where the stack ends the process does: on 8 MiB at about twice this."""
_NO_BYTES = b"\xff"
"""The library takes what begins with this byte, which no text has, for a special token."""


def check(grammar: Grammar, strict: bool) -> Sequence[str]:
    """See the contract."""
    try:
        _refuse_deep(grammar)
        if grammar.kind == "json_schema":  # alone, for messages that speak of nothing else
            options: JsonCompileOptions = {**_ONE_LINE, "lenient": not strict}
            definition = LLMatcher.grammar_from_json_schema(_parsed(grammar.source), overrides=options)
        elif grammar.kind == "regex":
            definition = LLMatcher.grammar_from_regex(grammar.source)
        else:
            definition = _definition(grammar, lenient=not strict)
    except ValueError as error:  # such as an integer that the library cannot hold
        raise GrammarError(" ".join(str(error).split())) from None
    is_error, messages = LLMatcher.validate_grammar_with_warnings(definition)
    if is_error:
        raise GrammarError(" ".join(messages[0].split()))
    return list(messages)


def _refuse_deep(grammar: Grammar) -> None:
    """Raises GrammarError."""
    schemas, larks = [], []
    if grammar.kind == "tags":
        tags = msgspec.json.decode(grammar.source, type=Tags)
        schemas = [tag.schema for tag in tags.tags if tag.lark is None] + ([tags.instead] if tags.instead else [])
        larks = [tag.lark for tag in tags.tags if tag.lark is not None]
    elif grammar.kind == "json_schema":
        schemas = [grammar.source]
    elif grammar.kind != "regex":
        larks = [grammar.source]
    for schema in schemas:
        if "$ref" in schema or "\\u" in schema:  # what is written out, the library bounds itself
            _refuse_levels(schema_levels(_parsed(schema)), _SCHEMA_LEVELS_MAX, "references of the schema")
    for lark in larks:
        _refuse_levels(lark_levels(lark), _LARK_LEVELS_MAX, "rules of the grammar")


def _refuse_levels(num_levels: int | None, most: int, what: str) -> None:
    if num_levels is None or num_levels > most:
        found = "too many" if num_levels is None else str(num_levels)
        raise GrammarError(f"the {what} may lead down {found} levels; at most {most} can be followed")


def build(vocabulary: Vocabulary) -> _Compiler:
    """See the contract."""
    return _Compiler(vocabulary)


class _Compiler:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Words(vocabulary)), eos_token=list(vocabulary.end_ids) or None)
        self._no_markup = _mask_of(vocabulary.special_ids, len(vocabulary.tokens), vocabulary.end_ids)
        self._begin = lru_cache(maxsize=_NUM_COMPILED)(self._compile)

    def compile(self, grammar: Grammar) -> Matcher:
        return self._begin(grammar).copy()

    def _compile(self, grammar: Grammar) -> _Matcher:
        matcher = LLMatcher(self._tokenizer, _definition(grammar, lenient=True), log_level=0)
        if matcher.is_error():
            raise GrammarError(" ".join(matcher.get_error().split()))
        # Free text may hold the markup of the model's dialect; nothing else may.
        may_hold_markup = grammar.kind == "tags" or grammar.lead is not None
        return _Matcher(matcher, None if may_hold_markup else self._no_markup)


class _Matcher:
    def __init__(self, matcher: LLMatcher, without: Mask | None) -> None:
        self._matcher = matcher
        self._without = without

    def fill(self, mask: Mask) -> None:
        assert mask.flags.c_contiguous, "the mask is not contiguous"
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise GrammarError(" ".join(self._matcher.get_error().split()))
        if self._without is not None:
            left = mask & ~self._without
            if left.any():
                mask[:] = left

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def rollback(self, num_tokens: int) -> None:
        if not self._matcher.rollback(num_tokens):
            raise GrammarError(self._matcher.get_error())

    def copy(self) -> _Matcher:
        return _Matcher(self._matcher.deep_copy(), self._without)


class _Words:
    """The vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.end_ids[0] if vocabulary.end_ids else None
        self.bos_token_id = None
        ends = frozenset(vocabulary.end_ids)  # no text at all; that of other control tokens is, so that it may trigger
        self.tokens = [
            token if token and index not in ends else _NO_BYTES + b"[%d]" % index
            for index, token in enumerate(vocabulary.tokens)
        ]
        self.special_token_ids = sorted(ends)
        self._engine = Tokenizer.from_str(vocabulary.tokenizer)

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids: list[int] = self._engine.encode(whole, add_special_tokens=False).ids
        return ids


def _mask_of(ids: Sequence[int], vocab_size: int, but: Sequence[int]) -> Mask:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    bits[[index for index in ids if index not in but]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def _definition(grammar: Grammar, *, lenient: bool) -> str:
    """The grammar in the library's own terms. Raises GrammarError."""
    extra: list[dict[str, object]] = []
    lines = ["%llguidance {}"]
    if grammar.kind == "tags":
        lines += _tags(msgspec.json.decode(grammar.source, type=Tags), extra, lenient)
    elif grammar.kind == "json_schema":
        lines.append(f"body: {_json(grammar.source, lenient)}")
    elif grammar.kind == "regex":
        lines.append(f"body: /{_regex(grammar.source)}/")
    else:
        extra.append({"name": "body_grammar", "lark_grammar": _lark(grammar)})
        lines.append("body: @body_grammar")
    lines.append(f"start: {_lead(grammar, lines)}body")
    lark = "\n".join(lines) + "\n"
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *extra]}, ensure_ascii=False)


def _lead(grammar: Grammar, lines: list[str]) -> str:
    """What comes before the body, whose rules are added to `lines`."""
    lead = grammar.lead
    if lead is None:
        return ""
    lines.append(f"lead_close[lazy]: /(.|\\n)*/ {_text(lead.close)}")
    lines.append(r"lead_space: /[ \r\n\t]*/")
    if lead.open is None:
        return "lead_close lead_space "
    lines.append(f"lead: {_text(lead.open)} lead_close lead_space")
    return "lead? "


def _tags(tags: Tags, extra: list[dict[str, object]], lenient: bool) -> list[str]:
    """The rules of `body`."""
    lines = [f"value_{index}: {_value(tag, index, extra, lenient)}" for index, tag in enumerate(tags.tags)]
    if not tags.has_text:
        # What stands before a tag is one literal with its begin: the library's lexer takes the longest that it can.
        for name, before in (("first", tags.opening), ("more", tags.parting)):
            each = (_form(tag, index, before + tag.begin) for index, tag in enumerate(tags.tags))
            lines.append(f"{name}: " + "\n    | ".join(each))
        most = "" if tags.num_max is None else f"{{0,{tags.num_max - 1}}}"
        more = "" if tags.num_max == 1 else f"more{most or '*'}"
        instead = "" if tags.instead is None else f" | {_json(tags.instead, lenient)}"
        return [*lines, f"body: first {more} {_text(tags.closing)}{instead}"]
    triggers = list(dict.fromkeys(tag.trigger for tag in tags.tags))
    for place, trigger in enumerate(triggers):
        forms = [
            _form(tag, index, tag.begin.removeprefix(trigger))
            for index, tag in enumerate(tags.tags)
            if tag.trigger == trigger
        ]
        lines.append(f"trigger_{place}[lazy]: /(.|\\n)*/ {_text(trigger)}")
        lines.append(f"tag_{place}: trigger_{place} ({' | '.join(forms)})")
    lines.append("tag: " + " | ".join(f"tag_{place}" for place in range(len(triggers))))
    return [*lines, r"free: /(.|\n)*/", "body: tag* free"]


def _form(tag: Tag, index: int, begin: str) -> str:
    number = f"/[0-9]+/ {_text(tag.number_end)} " if tag.number_end else ""
    return f"{_text(begin)} {number}value_{index} {_text(tag.end)}"


def _value(tag: Tag, index: int, extra: list[dict[str, object]], lenient: bool) -> str:
    if tag.lark is not None:
        extra.append({"name": f"value_grammar_{index}", "lark_grammar": tag.lark})
        return f"@value_grammar_{index}"
    return _json(tag.schema, lenient)


def _json(schema: str, lenient: bool) -> str:
    """An inline JSON Schema."""
    options = {**_ONE_LINE, "lenient": lenient}
    return "%json " + json.dumps({**_parsed(schema), "x-guidance": options}, ensure_ascii=False)


def _parsed(schema: str) -> dict[str, object]:
    try:
        value = json.loads(schema)
    except ValueError as error:
        raise GrammarError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None
    if not isinstance(value, dict):
        raise GrammarError("the schema is not a JSON object")
    return value


def _lark(grammar: Grammar) -> str:
    if grammar.kind == "lark":
        return grammar.source
    try:
        return str(grammar_from("ebnf", grammar.source))
    except ValueError as error:
        raise GrammarError(str(error)) from None


def _regex(source: str) -> str:
    return str(lark_regex(source)).removeprefix("/").removesuffix("/") if source else ""


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else '""'
