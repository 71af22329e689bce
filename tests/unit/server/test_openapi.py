# SPDX-License-Identifier: Apache-2.0
"""The document of the API: all routes, every reference resolved, errors in each dialect's own shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tokenspeed.core.config import ServerConfig

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


@pytest.fixture(scope="module")
def made(shared: Any) -> dict[str, Any]:
    response = shared.client.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    return dict(response.json())


def operations(made: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_route_is_in_the_document_and_something_is_said_of_it(shared: Any, made: dict[str, Any]) -> None:
    routes = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in shared.app.routes
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(method, path) for method, path, _ in operations(made)}
    for _, path, operation in operations(made):
        assert operation["summary"] != path, f"{path} has no Operation"
        assert "200" in operation["responses"]


def test_operation_ids_differ(made: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(made)]
    assert len(ids) == len(set(ids))


def test_every_reference_leads_somewhere_and_every_schema_is_used(made: dict[str, Any]) -> None:
    schemas = made["components"]["schemas"]
    found = set(references(made))
    assert found == {f"#/components/schemas/{name}" for name in schemas}
    assert all(re.fullmatch(r"[a-zA-Z0-9._-]+", name) for name in schemas)
    assert not any(name.startswith("tokenspeed") for name in schemas)


@pytest.mark.parametrize("path", GENERATING)
def test_what_generates_says_how_it_streams_and_how_it_fails(made: dict[str, Any], path: str) -> None:
    operation = made["paths"][path]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    busy = "529" if path == "/v1/messages" else "429"
    assert set(operation["responses"]) == {"200", "400", "404", "413", busy, "500", "503"}
    assert operation["requestBody"]["content"]["application/json"]["example"]


def test_errors_have_the_shape_of_their_dialect(made: dict[str, Any]) -> None:
    for _, path, operation in operations(made):
        answer = operation["responses"].get("400")
        if answer is None:
            continue
        name = answer["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        properties = made["components"]["schemas"][name]["properties"]
        assert ("type" in properties) == path.startswith("/v1/messages")


@pytest.mark.parametrize(("path", "is_theirs"), [("/v1/messages", True), ("/v1/chat/completions", False)])
def test_a_wrong_method_is_refused_in_the_shape_of_the_path(shared: Any, path: str, is_theirs: bool) -> None:
    response = shared.client.get(path)
    assert response.status_code == 405
    assert (response.json().get("type") == "error") is is_theirs


def test_the_examples_are_answered(shared: Any, made: dict[str, Any]) -> None:
    for method, path, operation in operations(made):
        if "requestBody" in operation:
            body = operation["requestBody"]["content"]["application/json"]["example"]
            assert shared.client.request(method, path, json=body).status_code == 200, path


def test_with_a_key_the_document_says_so_and_stays_open(start: Any) -> None:
    loopback = start(server=ServerConfig(api_key="k"))
    made = loopback.client.get("/openapi.json").json()
    assert made["security"] == [{"bearer": []}, {"x-api-key": []}]
    for method, path, operation in operations(made):
        if "{" in path or "requestBody" in operation:
            assert "401" in operation["responses"]
            continue
        is_open = operation.get("security") == []
        status = loopback.client.request(method, path).status_code
        assert (status == 200) is is_open, path


def test_the_page_hides_the_key_where_none_is_asked_for_whatever_its_style_sets(shared: Any) -> None:
    page = shared.client.get("/docs").text
    assert "[hidden] { display: none !important; }" in page
    assert 'id="key-row" hidden' in page


def test_the_page_marks_fields_that_are_refused_as_the_document_does(made: dict[str, Any]) -> None:
    refused = made["components"]["schemas"]["ChatBody"]["properties"]["cache_salt"]
    assert refused["enum"] == [None], "isRefused of the page looks for this"


def test_the_page_needs_no_other_host(shared: Any) -> None:
    response = shared.client.get("/docs")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"https?:|//[a-z]+\.|@import|\b(src|href)=", response.text)
    assert 'fetch("openapi.json")' in response.text


def limited_fields(made: dict[str, Any], path: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """(field, values that the document allows, values that it does not)."""
    name = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    for field, schema in made["components"]["schemas"][name]["properties"].items():
        if "enum" in schema:
            kinds = {each.get("type") for each in schema.get("anyOf", ())}
            wrong = True if "boolean" in kinds else 3 if "integer" in kinds else ["x"] if "array" in kinds else "x"
            yield field, schema["enum"], [wrong]
        elif "maximum" in schema:
            low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
            below = low - 1 if "minimum" in schema else low
            allowed = [low, high] if "minimum" in schema else [(low + high) / 2]
            yield field, [None, *allowed], [below] if high == 1e9 else [below, high * 2 + 1]


@pytest.mark.parametrize("path", GENERATING)
def test_what_the_document_allows_is_taken_and_nothing_else(shared: Any, made: dict[str, Any], path: str) -> None:
    example = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    limited = list(limited_fields(made, path))
    assert {"temperature", "top_p", "top_k"} <= {field for field, _, _ in limited}
    for field, allowed, wrong in limited:
        together = {"logprobs": True} if path == "/v1/chat/completions" and field == "top_logprobs" else {}
        example = {name: value for name, value in example.items() if "max_" not in name}
        for value in wrong:
            response = shared.client.post(path, json={**example, **together, field: value})
            assert response.status_code == 400, (field, value)
            error = response.json()["error"]
            assert field in (error["param"] if "param" in error else error["message"]), (field, response.text)
        for value in allowed if field not in ("n", "min_tokens") else allowed[:1]:
            response = shared.client.post(path, json={**example, **together, field: value})
            assert response.status_code == 200, (field, value, response.text)
