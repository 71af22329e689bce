# SPDX-License-Identifier: Apache-2.0
"""A grammar that leads down further than the stack does is refused, before the backend recurses along it: that would
end the process, not the request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tokenspeed.grammar import Grammar, GrammarError, Tag, Tags, check
from tokenspeed.grammar._levels import lark_levels, schema_levels

REFUSED = "levels"


def chain(num: int, link: Callable[[str], dict[str, Any]]) -> str:
    """A schema whose references lead down so many links."""
    links = {f"n{index}": link(f"#/$defs/n{index + 1}") for index in range(num)}
    return json.dumps({"$ref": "#/$defs/n0", "$defs": {**links, f"n{num}": {"type": "integer"}}})


def lists(num: int) -> str:
    return chain(num, lambda next_: {"type": "array", "items": {"$ref": next_}})


def named(num: int, key: str, mark: str) -> str:
    """The same, each link known by a name of its own and not by its place."""
    links = [{key: f"n{index}", "type": "array", "items": {"$ref": f"{mark}n{index + 1}"}} for index in range(num)]
    defs = {str(index): link for index, link in enumerate([*links, {key: f"n{num}", "type": "integer"}])}
    return json.dumps({"$id": "http://x/", "$ref": f"{mark}n0", "$defs": defs})


def rules(num: int, sign: str = ":", start: str = "start") -> str:
    """A Lark grammar whose rules lead down as far."""
    links = "\n".join(f'a{index}{sign} "x" a{index + 1} | "y"' for index in range(num))
    return f'{start}{sign} a0\n{links}\na{num}{sign} "z"\n'


def calls(**fields: Any) -> str:
    return msgspec.json.encode(Tags((Tag("<", "<a>", "</a>", **fields),))).decode()


BOTTOMLESS = {
    "references": Grammar("json_schema", lists(4000)),
    "references to references": Grammar("json_schema", chain(4000, lambda next_: {"$ref": next_})),
    "references of properties": Grammar(
        "json_schema", chain(4000, lambda next_: {"type": "object", "properties": {"a": {"$ref": next_}}})
    ),
    "references that are escaped": Grammar("json_schema", lists(4000).replace('"$ref"', '"\\u0024ref"')),
    "anchors": Grammar("json_schema", named(4000, "$anchor", "#")),
    "ids": Grammar("json_schema", named(4000, "$id", "")),
    "rules": Grammar("lark", rules(4000)),
    "groups of rules": Grammar("lark", rules(900).replace("a1 |", f"{'(' * 900}a1{')' * 900} |")),
    "rules of GBNF": Grammar("ebnf", rules(4000, " ::=", "root")),
    "a schema in Lark": Grammar("lark", f"start: %json{' ' * 5000}{lists(4000)}"),
    "a call's schema": Grammar("tags", calls(schema=lists(4000))),
    "a call's rules": Grammar("tags", calls(lark=rules(4000))),
    "an answer in place of calls": Grammar("tags", msgspec.json.encode(
        Tags((Tag("<", "<a>", "</a>"),), has_text=False, instead=lists(4000))
    ).decode()),
}  # fmt: skip


@pytest.mark.parametrize("grammar", BOTTOMLESS.values(), ids=BOTTOMLESS.keys())
def test_what_leads_down_too_far_is_refused(grammar: Grammar) -> None:
    """In a process of its own, which a backend that recursed would end."""
    program = (
        "import sys, msgspec\n"
        "from tokenspeed.grammar import Grammar, GrammarError, check\n"
        "grammar = msgspec.json.decode(sys.stdin.read(), type=Grammar)\n"
        "try: check(grammar, strict=False)\n"
        "except GrammarError as error: print(error)\n"
    )
    sent = msgspec.json.encode(grammar).decode()
    ended = subprocess.run([sys.executable, "-c", program], input=sent, capture_output=True, text=True, check=False)
    assert (ended.returncode, REFUSED in ended.stdout) == (0, True), (ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", lists(150)),
        Grammar("json_schema", json.dumps({
            "type": "object",
            "properties": {f"p{index}": {"$ref": f"#/$defs/d{index}"} for index in range(2000)},
            "$defs": {f"d{index}": {"type": "string"} for index in range(2000)},
        })),
        Grammar("json_schema", json.dumps({
            "$ref": "#/$defs/d0",
            "$defs": {f"d{index}": {"type": "object", "properties": {
                "left": {"$ref": f"#/$defs/d{(index + 1) % 40}"}, "right": {"$ref": f"#/$defs/d{index // 2}"},
            }} for index in range(40)},
        })),
        Grammar("lark", rules(1000)),
    ],
    ids=["a chain", "many side by side", "circles", "rules"],
)  # fmt: skip
def test_what_clients_may_mean_is_taken(grammar: Grammar) -> None:
    check(grammar, strict=False)


def test_a_schema_that_is_no_json_is_refused_however_deep() -> None:
    with pytest.raises(GrammarError):
        check(Grammar("json_schema", '{"const":' + "[" * 100_000 + "]" * 100_000 + "}"), strict=False)


def test_levels_are_counted_along_references() -> None:
    assert schema_levels({"type": "integer"}) == 2
    assert [schema_levels(json.loads(lists(num))) for num in (9, 10)] == [44, 48]
    assert lark_levels('start: a\na: ("x")\n') == 3


def test_counting_ends_where_everything_leads_to_everything() -> None:
    places = {"x": [{"$ref": "#" + "/" * index} for index in range(5000)]}
    assert schema_levels(places) is None
