# SPDX-License-Identifier: Apache-2.0
"""Every answer has a name: those of endpoints, of refusals, and of paths that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.core.config import ServerConfig

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PATHS = (
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 4, "stream": True}),
    ("POST", "/v1/completions", {"prompt": [[-1]]}),
    ("POST", "/v1/messages", CHAT),
    ("POST", "/v1/messages", {"messages": 3}),
    ("POST", "/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ("POST", "/v1/responses", {"input": []}),
    ("GET", "/v1/responses/none", None),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
    ("GET", "/no/such/path", None),
    ("DELETE", "/v1/messages", None),
)


@pytest.mark.parametrize(("method", "path", "body"), PATHS)
def test_every_answer_is_named(shared: Any, method: str, path: str, body: object) -> None:
    first, second = (shared.client.request(method, path, json=body) for _ in range(2))
    assert first.headers["x-request-id"] and first.headers["x-request-id"] != second.headers["x-request-id"]
    mine = {"x-request-id": "run-7/step:3", "anthropic-version": "2023-06-01"}
    answer = shared.client.request(method, path, json=body, headers=mine)
    assert answer.headers.get_list("x-request-id") == answer.headers.get_list("request-id") == ["run-7/step:3"]
    assert ("request-id" in first.headers) == path.startswith("/v1/messages")


@pytest.mark.parametrize("name", ["", "two words", "x" * 129, "-x", 'a"b', "a\tb", "\xe9"])
def test_a_name_that_could_do_harm_is_not_taken(shared: Any, name: str) -> None:
    answer = shared.client.get("/health", headers={"x-request-id": name.encode("latin-1")})
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "invalid_request_error"), ("/v1/messages", "authentication_error"),
     ("/v1/responses", "invalid_request_error")],
)  # fmt: skip
def test_a_wrong_key_is_refused_in_each_shape_and_named(start: Any, path: str, kind: str) -> None:
    loopback = start(server=ServerConfig(api_key="right"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        answer = loopback.client.post(path, json=CHAT, headers={**headers, "x-request-id": "mine"})
        assert answer.status_code == 401 and answer.headers["x-request-id"] == "mine"
        assert answer.json()["error"]["type"] == kind and "API key" in answer.json()["error"]["message"]
    body = {"input": "hi", "max_output_tokens": 4} if path.endswith("responses") else CHAT
    for headers in ({"authorization": "Bearer right"}, {"x-api-key": "right"}):
        assert loopback.client.post(path, json=body, headers=headers).status_code == 200
    assert not loopback.cancels()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "invalid_request_error"), ("/v1/completions", "invalid_request_error"),
     ("/v1/messages", "request_too_large"), ("/v1/responses", "invalid_request_error")],
)  # fmt: skip
@pytest.mark.parametrize("declared", [True, False])
def test_a_body_above_the_limit_is_refused_in_each_shape(start: Any, path: str, kind: str, declared: bool) -> None:
    loopback = start(server=ServerConfig(body_bytes_max=1000))
    data = b'{"input": "' + b"x" * 100_000 + b'"}'
    content = data if declared else iter([data[:600], data[600:]])
    answer = loopback.client.post(path, content=content)
    assert answer.status_code == 413 and answer.headers["x-request-id"]
    assert answer.json()["error"]["type"] == kind and "1000 bytes" in answer.json()["error"]["message"]
    assert loopback.client.get("/health").status_code == 200 and not loopback.submits()
