# SPDX-License-Identifier: Apache-2.0
"""The form that a request asks for, in each dialect, as the engine is told of it; what cannot be enforced is said, and
what is wrong is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fakes import FakeSource
from tokenspeed.core.config import ServerConfig
from tokenspeed.core.request import Lead, SamplingParams, ThinkingBudget
from tokenspeed.grammar import Fitted, Tags
from tokenspeed.server import formats

HERMES = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if tools %}<tool_call></tool_call>{% endif %}"
    "{% if enable_thinking is defined %}<think>{% endif %}"
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
LOOK_AHEAD = {"type": "object", "properties": {"e": {"type": "string", "pattern": "^(?=.*@).+$"}}}
USER = [{"role": "user", "content": "go"}]


def function(name: str = "sh", parameters: Any = SCHEMA, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def server(start_module: Any) -> Any:
    return start_module(source=FakeSource(chat_template=HERMES))


def params(server: Any, path: str, **fields: object) -> SamplingParams:
    """How the engine was told to sample the request."""
    before = len(server.submits())
    body: dict[str, object] = {"max_tokens": 4, **fields}
    if "input" not in fields and path == "/v1/responses":
        body = {"input": "go", "max_output_tokens": 4, **fields}
    elif path == "/v1/completions":
        body["prompt"] = "a"
    elif path != "/v1/responses":
        body["messages"] = USER
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    (submit,) = server.submits()[before:]
    sampling: SamplingParams = submit.request.sampling
    return sampling


def tags_of(sampling: SamplingParams) -> Tags:
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "tags"
    return msgspec.json.decode(sampling.grammar.source, type=Tags)


def schema_of(sampling: SamplingParams) -> object:
    assert sampling.grammar is not None
    assert sampling.grammar.kind == "json_schema"
    return msgspec.json.decode(sampling.grammar.source)


def test_any_object_is_a_form(server: Any) -> None:
    sampling = params(server, "/v1/chat/completions", response_format={"type": "json_object"})
    assert schema_of(sampling) == {"type": "object"}


WIRE = {"name": "x", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": WIRE}}),
        ("/v1/chat/completions", {"guided_json": SCHEMA}),
        ("/v1/chat/completions", {"structured_outputs": {"json": SCHEMA}}),
        ("/v1/completions", {"json_schema": msgspec.json.encode(SCHEMA).decode()}),
        ("/v1/responses", {"text": {"format": {"type": "json_schema", **WIRE}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    ],
)
def test_an_answer_is_held_to_its_schema_in_every_dialect(server: Any, path: str, fields: dict[str, object]) -> None:
    assert schema_of(params(server, path, **fields)) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", 'b"']}, "lark", 'start: "a" | "b\\""'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_extensions_ask_for_other_forms(
    server: Any, path: str, fields: dict[str, object], kind: str, source: str
) -> None:
    grammar = params(server, path, **fields).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


def test_a_structural_tag_has_its_triggers(server: Any) -> None:
    structure = {"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}
    form = {"type": "structural_tag", "structures": [structure], "triggers": ["<f="]}
    for fields in (
        {"response_format": form},
        {"structured_outputs": {"structural_tag": msgspec.json.encode(form).decode()}},
    ):
        (tag,) = tags_of(params(server, "/v1/chat/completions", **fields)).tags
        assert (tag.trigger, tag.begin, tag.end) == ("<f=", "<f=a>", "</f>")


REQUIRED = [
    ("/v1/chat/completions", {"tools": [function()], "tool_choice": "required"}),
    ("/v1/responses", {"tools": [{"type": "function", "name": "sh", "parameters": SCHEMA}], "tool_choice": "required"}),
    ("/v1/messages", {"tools": [{"name": "sh", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}),
]
NAMED = [
    ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "sh"}}}),
    ("/v1/responses", {"tool_choice": {"type": "function", "name": "sh"}}),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "sh"}}),
]


@pytest.mark.parametrize(("path", "fields"), REQUIRED)
def test_a_call_has_to_come_where_it_is_required(server: Any, path: str, fields: dict[str, object]) -> None:
    tags = tags_of(params(server, path, **fields))
    assert (tags.has_text, tags.num_max) == (False, None)
    (tag,) = tags.tags
    assert tag.begin == '<tool_call>\n{"name": "sh", "arguments": '
    assert msgspec.json.decode(tag.schema) == SCHEMA


@pytest.mark.parametrize(("path", "choice"), NAMED)
def test_one_call_of_the_named_tool_has_to_come(server: Any, path: str, choice: dict[str, object]) -> None:
    other = {"type": "object"}
    tools = {
        "/v1/chat/completions": [function("other", other), function()],
        "/v1/responses": [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("other", "sh")],
        "/v1/messages": [{"name": name, "input_schema": SCHEMA} for name in ("other", "sh")],
    }[path]
    tags = tags_of(params(server, path, tools=tools, **choice))
    assert (tags.has_text, tags.num_max) == (False, 1)
    assert [tag.begin for tag in tags.tags] == ['<tool_call>\n{"name": "sh", "arguments": ']


def test_calls_that_may_come_are_held_to_their_schemas(server: Any) -> None:
    tags = tags_of(params(server, "/v1/chat/completions", tools=[function(), function("ls", None)]))
    assert tags.has_text
    assert [tag.trigger for tag in tags.tags] == ["<tool_call>"] * 2
    assert [msgspec.json.decode(tag.schema) for tag in tags.tags] == [SCHEMA, {"type": "object"}]


def test_only_some_tools_may_be_called(server: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("ls")]}}
    tags = tags_of(params(server, "/v1/chat/completions", tools=[function(), function("ls")], tool_choice=choice))
    assert [tag.begin for tag in tags.tags] == ['<tool_call>\n{"name": "ls", "arguments": ']


def test_one_call_only_where_they_may_not_be_parallel(server: Any) -> None:
    fields = {"tools": [function()], "tool_choice": "required", "parallel_tool_calls": False}
    assert tags_of(params(server, "/v1/chat/completions", **fields)).num_max == 1


def test_an_answer_with_a_schema_may_be_a_call_instead(server: Any) -> None:
    form = {"type": "json_schema", "json_schema": WIRE}
    tags = tags_of(params(server, "/v1/chat/completions", tools=[function()], response_format=form))
    assert msgspec.json.decode(tags.instead or "") == SCHEMA
    assert not tags.has_text


@pytest.mark.parametrize("fields", [{}, {"tools": [function()], "tool_choice": "none"}, {"tools": []}])
def test_nothing_is_held_where_nothing_is_asked(server: Any, fields: dict[str, object]) -> None:
    assert params(server, "/v1/chat/completions", **fields).grammar is None


def test_the_operator_may_leave_calls_alone(start: Any) -> None:
    server = start(source=FakeSource(chat_template=HERMES), server=ServerConfig(tool_grammar="off"))
    assert params(server, "/v1/chat/completions", tools=[function()]).grammar is None
    assert not tags_of(params(server, "/v1/chat/completions", tools=[function()], tool_choice="required")).has_text


def test_reasoning_comes_before_a_form(server: Any) -> None:
    form = {"response_format": {"type": "json_object"}}
    closed = params(server, "/v1/chat/completions", **form).grammar
    opened = params(server, "/v1/chat/completions", **form, enable_thinking=True).grammar
    assert closed is not None
    assert closed.lead == Lead("</think>", "<think>"), "the template speaks of reasoning, so the model may reason"
    assert opened is not None
    assert opened.lead == Lead("</think>"), "the prompt has opened it"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"thinking_token_budget": 7}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}),
    ],
)
def test_reasoning_has_a_budget(server: Any, path: str, fields: dict[str, object]) -> None:
    thinking = params(server, path, **fields).thinking
    encode = server.llm.tokenizer.encode
    marks = [tuple(encode(text, add_special_tokens=False)) for text in ("<think>", "</think>")]
    assert thinking == ThinkingBudget(7, path == "/v1/messages", *marks)


@pytest.mark.parametrize(
    ("path", "tools"),
    [
        ("/v1/chat/completions", [function("a", LOOK_AHEAD)]),
        ("/v1/responses", [{"type": "function", "name": "a", "parameters": LOOK_AHEAD}]),
        ("/v1/messages", [{"name": "a", "input_schema": LOOK_AHEAD}]),
    ],
)
def test_one_odd_keyword_does_not_refuse_the_request_and_is_told(server: Any, path: str, tools: Any) -> None:
    body = {"messages": USER, "input": "go", "max_tokens": 4, "tools": tools}
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-tokenspeed-warning"] == "tool 'a': parameters.properties.e.pattern is not enforced"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [function("a", LOOK_AHEAD, strict=True)]}, "tools", "tool 'a', parameters.properties.e: "),
        ({"tools": [function("a", {"properties": {"x": {"type": "wat"}}})]}, "tools", "'a', parameters.properties.x: "),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [function()], "tool_choice": "perhaps"}, "tool_choice", "'perhaps'"),
        ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice", "name"),
        (
            {"tools": [function()], "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
            "'no'",
        ),
        ({"guided_regex": "["}, "guided_regex", "unclosed"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "send one"),
        ({"guided_choice": []}, "guided_choice", "one text"),
        ({"guided_json": "{"}, "guided_json", "JSON"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**WIRE, "schema": {"type": "wat"}}}},
            "response_format.json_schema.schema",
            "wat",
        ),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "send one"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "0"),
    ],
)
def test_what_is_wrong_is_refused_by_name(server: Any, fields: dict[str, Any], param: str, words: str) -> None:
    response = server.client.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 4, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_engine_learns_the_vocabulary_once(server: Any) -> None:
    for _ in range(2):
        params(server, "/v1/chat/completions", guided_regex="a")
    assert len(server.worker.runner.vocabularies) == 1


def test_a_form_is_checked_off_the_event_loop(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check may take seconds, in which everyone else's tokens go on."""
    on_loop: list[bool] = []

    def fit(schema: dict[str, Any], *, strict: bool) -> Fitted:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_loop.append(False)
        else:
            on_loop.append(True)
        return Fitted(schema)

    monkeypatch.setattr(formats, "fit_schema", fit)
    asked = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    params(server, "/v1/chat/completions", response_format=asked)
    params(server, "/v1/chat/completions", guided_json=SCHEMA)
    params(server, "/v1/completions", json_schema=SCHEMA)
    params(server, "/v1/messages", output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    params(server, "/v1/messages", output_format={"type": "json_schema", "schema": SCHEMA})
    params(server, "/v1/responses", text={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert on_loop == [False] * 6
