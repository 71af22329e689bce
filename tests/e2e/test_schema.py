# SPDX-License-Identifier: Apache-2.0
"""The server keeps to its own OpenAPI document: whatever a client sends, right or wrong, the status and the answer are
among those that the document has, and never is it the server's fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from scripted import write_scripted_model

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
CALL = 'I look.<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'


@pytest.fixture(scope="module")
def server(start_module_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    replies = [("use a tool", CALL), ("", "Well said.")]
    folder = write_scripted_model(tmp_path_factory.mktemp("schema") / "model", replies, context_length=256)
    return start_module_server(
        str(folder), "--load-format", "scripted", "--served-name", "scripted", "--tool-call-parser", "hermes"
    )


def operations(server: Any) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path not in ("/", "/docs", "/openapi.json"):
            yield operation


def check(server: Any, operation: Any, mode: GenerationMode, num_examples: int) -> None:
    """Sends num_examples requests of a kind to an operation."""

    @seed(1)
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        case.call_and_validate(base_url=f"http://127.0.0.1:{server.port}", checks=CHECKS, timeout=60.0)

    run: Callable[[], None] = send
    run()


USER = [{"role": "user", "content": "use a tool"}]
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}),
    ("/v1/chat/completions", {"messages": USER, "n": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {"messages": USER, "n": 2, "logprobs": True, "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [5, 6], "stop": "a", "prompt_logprobs": 1}),
    ("/v1/messages", {"messages": USER, "tools": [{"name": "look", "input_schema": PARAMETERS}]}),
    ("/v1/messages", {"messages": USER, "max_tokens": 2}),
    ("/v1/responses", {"input": "use a tool", "tools": [{"type": "function", **FUNCTION}], "metadata": {"a": "b"}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "reasoning": {"effort": "low"}}),
]


class Document:
    """What the server says of itself, and whether something is as it says."""

    def __init__(self, server: Any) -> None:
        self.made = server.client.get("/openapi.json").json()

    def check(self, schema: dict[str, Any], value: object) -> None:
        jsonschema_rs.validate({**schema, "components": self.made["components"]}, value)

    def check_answer(self, path: str, method: str, response: Any) -> None:
        answers = self.made["paths"][path][method]["responses"]
        self.check(answers[str(response.status_code)]["content"]["application/json"]["schema"], response.json())


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_calls_log_probabilities_and_choices_are_as_the_document_says(
    server: Any, path: str, body: dict[str, Any]
) -> None:
    document = Document(server)
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    document.check_answer(path, "post", response)
    if "prompt_logprobs" in body:
        return
    content = document.made["paths"][path]["post"]["responses"]["200"]["content"]
    streamed = server.client.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].partition(";")[0] == "text/event-stream"
    data = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert len(data) > 2
    event = content["text/event-stream"]["schema"].get("x-event")
    for each in data if event is not None else []:
        if each != "[DONE]":
            document.check(event, json.loads(each))


@pytest.mark.parametrize("index", [0, 3, 5, 7])
def test_streams_are_as_the_document_says_to_a_reader_of_events(server: Any, index: int) -> None:
    path, body = ASKED[index]
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    case = schema[path]["POST"].Case(body={**body, "stream": True}, media_type="application/json")
    response = case.call_and_validate(base_url=f"http://127.0.0.1:{server.port}", checks=CHECKS, timeout=60.0)
    assert response.headers["content-type"][0].startswith("text/event-stream")


def test_stored_responses_and_models_are_as_the_document_says(server: Any) -> None:
    document = Document(server)
    made = server.client.post("/v1/responses", json={"input": "hi"}).json()
    place = "/v1/responses/{id}"
    document.check_answer(place, "get", server.client.get(f"/v1/responses/{made['id']}"))
    document.check_answer(place, "get", server.client.get(f"/v1/responses/{made['id']}?stream=true"))
    document.check_answer(f"{place}/cancel", "post", server.client.post(f"/v1/responses/{made['id']}/cancel"))
    document.check_answer(place, "delete", server.client.delete(f"/v1/responses/{made['id']}"))
    for headers in ({}, {"anthropic-version": "2023-06-01"}):
        document.check_answer("/v1/models", "get", server.client.get("/v1/models", headers=headers))
        for name in ("scripted", "another"):
            answer = server.client.get(f"/v1/models/{name}", headers=headers)
            document.check_answer("/v1/models/{model}", "get", answer)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.value))
def test_answers_are_what_the_document_says(server: Any, mode: GenerationMode) -> None:
    for operation in operations(server):
        if operation.body:
            check(server, operation, mode, 12)
        elif mode is GenerationMode.POSITIVE:
            check(server, operation, mode, 3 if operation.path_parameters else 1)
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0.0


def test_an_answer_that_differs_from_the_document_is_seen(server: Any) -> None:
    made = Document(server).made
    path = "/v1/messages/count_tokens"
    ref = made["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    made["components"]["schemas"][ref.rsplit("/", 1)[1]]["properties"]["input_tokens"] = {"type": "string"}
    operation = schemathesis.openapi.from_dict(made)[path]["POST"]
    with pytest.raises(FailureGroup):
        check(server, operation, GenerationMode.POSITIVE, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: str(mode.value))
def test_answers_are_what_the_document_says_at_length(server: Any, mode: GenerationMode) -> None:
    for operation in operations(server):
        if operation.body:
            check(server, operation, mode, 100)
    assert server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0.0
