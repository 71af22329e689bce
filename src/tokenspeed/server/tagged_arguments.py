# SPDX-License-Identifier: Apache-2.0
"""A grammar for arguments that a dialect writes as tagged parameters: those of the schema, in its order.

Text is free up to the mark that ends it where another mark begins right after, so that the mark alone may stand in it.
Knows schemas and the tags; does not know a dialect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile

from tokenspeed.chat.parsers import TaggedParameters

_ROOTS = ("$defs", "definitions")
_ANY = r"/(.|\n)*/"


def tagged_lark(schema: Mapping[str, object], tags: TaggedParameters) -> str:
    """What stands between the begin of a call and what follows the tags' end, in Lark."""
    properties = schema.get("properties")
    known: Mapping[str, object] = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    needed = frozenset(required) if isinstance(required, list) else frozenset()
    if not known:
        return _any_parameters(tags)
    keys = list(known)
    shared = _shared(tags.open, tags.end)
    start = f"{_layout(tags.open)} next_0" + ("" if needed & {*keys} else f" | {_layout(tags.end)}")
    lines = [f"start: {start}"]
    for index, key in enumerate(keys):
        is_last = index + 1 == len(keys)
        may_skip = key not in needed and not is_last
        lines.append(f"next_{index}: value_{index}" + (f" | next_{index + 1}" if may_skip else ""))
        ways = [] if is_last else [f"{_layout(tags.open.removeprefix(shared))} next_{index + 1}"]
        ways += [] if needed & {*keys[index + 1 :]} else [_layout(tags.end.removeprefix(shared))]
        value = _value(f"given_{index}", known[key], schema, tags, shared)
        is_text = _may_be_text(known[key])
        before = _layout(tags.before_text if is_text else tags.before_json)
        lines += [f"value_{index}: {_text(key)} {before} given_{index} ({' | '.join(ways)})", value]
    return _lark(lines)


def _value(name: str, part: object, root: Mapping[str, object], tags: TaggedParameters, shared: str) -> str:
    """The rule of a value and of what follows it whatever comes next."""
    after = f"{_layout(tags.close)} {_text(shared)}"
    words = part.get("enum") if isinstance(part, Mapping) else None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return f"{name}: ({' | '.join(map(_text, words))}) {after}"
    if _may_be_text(part):
        return f"{name}[lazy]: {_ANY} {after}"
    options = {key: root[key] for key in _ROOTS if key in root}
    inner = part if isinstance(part, Mapping) else {}
    return f"{name}: %json {json.dumps({**options, **inner}, ensure_ascii=False)} {after}"


def _any_parameters(tags: TaggedParameters) -> str:
    """For a schema that names no parameter."""
    shared = _shared(tags.open, tags.end)
    ways = f"{_layout(tags.open.removeprefix(shared))} next | {_layout(tags.end.removeprefix(shared))}"
    return _lark(
        [
            f"start: {_layout(tags.open)} next | {_layout(tags.end)}",
            f"next: /[\\w.\\-]+/ {_layout(tags.before_text)} given ({ways})",
            _value("given", {}, {}, tags, shared),
        ]
    )


def _lark(lines: Sequence[str]) -> str:
    return "\n".join(["%llguidance {}", *lines, ""])


def _may_be_text(part: object) -> bool:
    """Whether a value may be a string, which is then written as it is."""
    if not isinstance(part, Mapping):
        return True
    kinds = part.get("type")
    if isinstance(kinds, str | list):
        return "string" in ([kinds] if isinstance(kinds, str) else kinds)
    for key in ("anyOf", "oneOf", "allOf"):
        several = part.get(key)
        if isinstance(several, list):
            return any(_may_be_text(each) for each in several)
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(values, list):
        return any(isinstance(value, str) for value in values)
    return "$ref" not in part


def _shared(one: str, other: str) -> str:
    """What both begin with."""
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _layout(text: str) -> str:
    """A mark whose line breaks may be missing."""
    pieces = text.split("\n")
    return r" /\n?/ ".join(_text(piece) if piece else "" for piece in pieces).strip()


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
