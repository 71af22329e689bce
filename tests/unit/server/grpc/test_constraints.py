# SPDX-License-Identifier: Apache-2.0
"""Each way in which a gateway constrains a reply reaches the engine as a grammar, or is refused with the place."""

from __future__ import annotations

import json
from typing import Any

import grpc
import msgspec
import pytest

from fakes import FakeSource, script
from tokenspeed.core.request import Grammar, Lead
from tokenspeed.grammar import Tags
from unit.server.grpc.conftest import StartWorker, Worker

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "additionalProperties": False}
CALL = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "w", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "}\n</tool_call>",
}


def tags(**fields: object) -> str:
    return json.dumps({"format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL], **fields}})


def grammar_of(worker: Worker, prompt: str = "hi", **sampling: object) -> Grammar | None:
    """What the engine was asked to hold the reply to."""
    worker.complete(prompt, sampling={**sampling, "max_new_tokens": 1})
    return worker.submits()[-1].request.sampling.grammar


@pytest.mark.parametrize(
    ("sampling", "kind", "words"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema", "city"),
        ({"regex": "a+b"}, "regex", "a+b"),
        ({"ebnf_grammar": 'root ::= "a" | "b"'}, "ebnf", "root"),
    ],
)
def test_a_form_reaches_the_engine(start_worker: StartWorker, sampling: dict[str, Any], kind: str, words: str) -> None:
    grammar = grammar_of(start_worker(), **sampling)
    assert grammar is not None
    assert grammar.kind == kind
    assert words in grammar.source
    assert grammar.lead is None


@pytest.mark.parametrize(
    ("fields", "has_text", "num_max"),
    [
        ({}, True, None),
        ({"at_least_one": True}, False, None),
        ({"at_least_one": True, "stop_after_first": True}, False, 1),
    ],
)
def test_calls_that_may_come_and_calls_that_must(
    start_worker: StartWorker, fields: dict[str, Any], has_text: bool, num_max: int | None
) -> None:
    grammar = grammar_of(start_worker(), structural_tag=tags(**fields))
    assert grammar is not None
    read = msgspec.json.decode(grammar.source, type=Tags)
    assert (read.has_text, read.num_max) == (has_text, num_max)
    (tag,) = read.tags
    assert (tag.trigger, tag.begin, tag.end) == ("<tool_call>", CALL["begin"], CALL["end"])
    assert "city" in tag.schema


def test_reasoning_may_come_first(start_worker: StartWorker) -> None:
    worker = start_worker(source=FakeSource(chat_template="{% if x %}<think>{% endif %}<tool_call>"))
    by_itself, opened = grammar_of(worker, regex="a"), grammar_of(worker, "go<think>\n", regex="a")
    assert by_itself is not None
    assert by_itself.lead == Lead("</think>", "<think>")
    assert opened is not None
    assert opened.lead == Lead("</think>")


def test_a_script_is_not_held_to_a_form(start_worker: StartWorker) -> None:
    worker = start_worker(source=FakeSource(script=script(("", "xyz"))))
    assert grammar_of(worker, json_schema=json.dumps(SCHEMA)) is None


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": json.dumps({"type": "nothing"})}, "json_schema"),
        ({"regex": "("}, "regex"),
        ({"structural_tag": "["}, "structural_tag is no JSON"),
        ({"structural_tag": json.dumps({"format": {"type": "sequence"}})}, "only the format triggered_tags"),
        ({"structural_tag": tags(triggers=["<other>"])}, "begins with none of the triggers"),
        ({"structural_tag": tags(tags=[{**CALL, "content": {"type": "any_text"}}])}, "tags[0].content"),
    ],
)
def test_what_cannot_be_enforced_is_refused(worker: Worker, sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        worker.complete(sampling=sampling)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in caught.value.details()
