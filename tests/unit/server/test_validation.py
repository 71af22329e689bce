# SPDX-License-Identifier: Apache-2.0
"""Bad requests: each gets 400 with the field's name, and the server lives on."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.core.config import ServerConfig

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, '{"prompt": [[-1]]}', "prompt"),
        (COMPLETIONS, '{"prompt": [[1000000000]]}', "prompt"),
        (COMPLETIONS, '{"prompt": [99999999999999999999999999]}', "prompt"),
        (COMPLETIONS, '{"prompt": []}', "prompt"),
        (COMPLETIONS, '{"prompt": [[]]}', "prompt"),
        (COMPLETIONS, '{"prompt": ""}', "prompt"),
        (COMPLETIONS, '{"prompt": ["a", 1]}', "prompt"),
        (COMPLETIONS, '{"prompt": ["a", [1]]}', "prompt"),
        (COMPLETIONS, '{"prompt": [true]}', "prompt[0]"),
        (COMPLETIONS, '{"prompt": "a", "max_tokens": 0}', "max_tokens"),
        (COMPLETIONS, '{"prompt": "a", "suffix": "b"}', "suffix"),
        (COMPLETIONS, '{"prompt": "a", "best_of": 3}', "best_of"),
        (COMPLETIONS, '{"prompt": "a", "logprobs": 21}', "logprobs"),
        (COMPLETIONS, "{}", "prompt"),
        (CHAT, '{"messages": []}', "messages"),
        (CHAT, '{"messages": [{}]}', "messages[0].role"),
        (CHAT, "{}", "messages"),
        (CHAT, "{", "body"),
        (CHAT, "", "body"),
        (CHAT, "[]", "body"),
        (CHAT, '{"messages": "\\ud800"', "body"),
        (CHAT, f'{{{MESSAGES}, "stream": "true"}}', "stream"),
        (CHAT, f'{{{MESSAGES}, "temperature": -1}}', "temperature"),
        (CHAT, f'{{{MESSAGES}, "temperature": "hot"}}', "temperature"),
        (CHAT, f'{{{MESSAGES}, "stop": [""]}}', "stop"),
        (CHAT, f'{{{MESSAGES}, "stop": [1]}}', "stop[0]"),
        (CHAT, f'{{{MESSAGES}, "n": 0}}', "n"),
        (CHAT, f'{{{MESSAGES}, "n": 1000000000}}', "n"),
        (CHAT, f'{{{MESSAGES}, "top_p": 0}}', "top_p"),
        (CHAT, f'{{{MESSAGES}, "top_k": -2}}', "top_k"),
        (CHAT, f'{{{MESSAGES}, "max_tokens": -5}}', "max_tokens"),
        (CHAT, f'{{{MESSAGES}, "min_tokens": 9, "max_tokens": 3}}', "min_tokens"),
        (CHAT, f'{{{MESSAGES}, "presence_penalty": 3}}', "presence_penalty"),
        (CHAT, f'{{{MESSAGES}, "repetition_penalty": 0}}', "repetition_penalty"),
        (CHAT, f'{{{MESSAGES}, "seed": 123456789012345678901234567890}}', "seed"),
        (CHAT, f'{{{MESSAGES}, "logit_bias": {{"x": 1}}}}', "logit_bias"),
        (CHAT, f'{{{MESSAGES}, "logit_bias": {{"999999": 1}}}}', "logit_bias"),
        (CHAT, f'{{{MESSAGES}, "logit_bias": {{"1": 101}}}}', "logit_bias"),
        (CHAT, f'{{{MESSAGES}, "stop_token_ids": [-1]}}', "stop_token_ids"),
        (CHAT, f'{{{MESSAGES}, "logprobs": true, "top_logprobs": 21}}', "top_logprobs"),
        (CHAT, f'{{{MESSAGES}, "thinking_token_budget": 2147483648}}', "thinking_token_budget"),
        (CHAT, f'{{{MESSAGES}, "stop_regex": "a+"}}', "stop_regex"),
        (CHAT, f'{{{MESSAGES}, "chat_template": "{{{{ messages }}}}"}}', "chat_template"),
        (CHAT, f'{{{MESSAGES}, "lora_path": "x"}}', "lora_path"),
        (CHAT, f'{{{MESSAGES}, "max_completion_tokens": 0}}', "max_completion_tokens"),
        (CHAT, f'{{{MESSAGES}, "priority": 99999999999}}', "priority"),
        (CHAT, f'{{{MESSAGES}, "stream": true, "prompt_logprobs": 1}}', "prompt_logprobs"),
        (CHAT, f'{{{MESSAGES}, "cache_salt": "x"}}', "cache_salt"),
        (CHAT, f'{{{MESSAGES}, "modalities": ["audio"]}}', "modalities"),
        (CHAT, '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages[0].content[0].text"),
        (CHAT, f'{{{MESSAGES}, "metadata": {"[" * 3000 + "]" * 3000}}}', "body"),
        (COMPLETIONS, '{"prompt": ' + f"{['a'] * 100}".replace("'", '"') + ', "n": 128}', "n"),
    ],
)
def test_bad_fields_are_named(shared: Any, path: str, body: str, param: str) -> None:
    response = shared.client.post(path, content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    assert shared.chat(max_tokens=4).status_code == 200, "the server lives on"


@pytest.mark.parametrize("kind", [{}, [], 1, True, ["message"]])
def test_the_type_of_an_item_is_text(shared: Any, kind: object) -> None:
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        response = shared.client.post(path, json={"input": [{"type": "message", "role": "user"}, {"type": kind}]})
        falsy_is_left_out = not kind
        assert response.status_code == (200 if falsy_is_left_out else 400), response.text
        if not falsy_is_left_out:
            assert response.json()["error"]["param"] == "input[1].type"


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1e2", "9" * 5_000, "%C2%B2"])
def test_the_size_of_a_page_is_a_small_number(shared: Any, limit: str) -> None:
    response = shared.client.get(f"/v1/responses/x/input_items?limit={limit}")
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "limit"


def test_what_an_error_quotes_steers_no_terminal(shared: Any) -> None:
    for path in (CHAT, "/v1/messages"):
        body = {"messages": [{"role": "\x1b[31m\r\n\u202e", "content": "hi"}]}
        message = shared.client.post(path, json=body).json()["error"]["message"]
        assert message.isprintable(), message
    for name in ("%1B%5B31m", "%E2%80%AE"):
        response = shared.client.get(f"/v1/responses/{name}")
        assert response.json()["error"]["message"].isprintable()
        assert shared.client.get(f"/v1/{name}").json()["error"]["message"].isprintable()


def test_nonsense_bytes_never_break_the_server(shared: Any) -> None:
    for body in (b"\xff\xfe", b'{"messages": "\xff"}', b"nul", b"[" * 100_000, b'{"n": ' + b"9" * 10_000 + b"}"):
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            assert shared.client.post(path, content=body).status_code == 400, (path, body[:20])
    assert shared.chat(max_tokens=4).status_code == 200


def test_a_lone_surrogate_in_the_text_is_harmless(shared: Any) -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b"}], "max_tokens": 2}'
    assert shared.client.post(CHAT, content=body).status_code in (200, 400)
    assert shared.chat(max_tokens=4).status_code == 200


def test_unknown_fields_and_odd_content_types_are_accepted(shared: Any) -> None:
    extra = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "user": "u"}
    assert shared.chat(**extra).status_code == 200
    body = f'{{{MESSAGES}, "max_tokens": 2, "temperature": null, "tools": null, "n": null, "stop": null}}'
    response = shared.client.post(CHAT, content=body, headers={"content-type": "text/plain"})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_beyond_the_window_is_refused_before_the_first_byte(shared: Any, path: str, stream: bool) -> None:
    text = "word " * 400
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    response = shared.client.post(path, json={**prompt, "stream": stream, "max_tokens": 4})
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    count = shared.client.post("/tokenize", json=prompt).json()["count"]
    assert str(count) in error["message"]
    assert "512" in error["message"]
    assert shared.chat(max_tokens=4).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_413(start: Any, chunked: bool) -> None:
    server = start(server=ServerConfig(body_bytes_max=1000))
    body = b"x" * 2000
    content = iter([body[:700], body[700:]]) if chunked else body
    response = server.client.post(CHAT, content=content)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert server.chat().status_code == 200


def test_an_unknown_model_is_served_with_a_warning(shared: Any) -> None:
    response = shared.chat(model="gpt-\u00fc\n9")
    assert response.status_code == 200
    assert response.json()["model"] == "fake-model"
    assert "gpt-" in response.headers["x-tokenspeed-warning"]
    assert "x-tokenspeed-warning" not in shared.chat(model="fake-model").headers
    assert "x-tokenspeed-warning" in shared.chat(model="other", stream=True).headers


def test_an_unknown_model_is_404_when_names_are_strict(start: Any) -> None:
    server = start(server=ServerConfig(strict_model_name=True))
    for response in (server.chat(model="other"), server.complete(model="other"), server.client.get("/v1/models/other")):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    assert server.chat(model="fake-model").status_code == 200
    assert server.chat().status_code == 200


def test_wrong_paths_and_methods_have_the_error_shape(shared: Any) -> None:
    missing = shared.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = shared.client.get(CHAT)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


def test_a_wrong_method_is_told_the_right_ones_on_every_path(shared: Any) -> None:
    known: dict[str, set[str]] = {}
    for route in shared.app.routes:
        known.setdefault(route.path.replace("{model:path}", "m"), set()).update(route.methods)
    for path, methods in known.items():
        answer = shared.client.patch(path)
        assert answer.status_code == 405
        allowed = answer.headers["allow"].split(", ")
        assert methods <= set(allowed), path  # more where a path with a name in it matches too
        assert f"PATCH {path} is not available: use {' or '.join(allowed)}" in answer.json()["error"]["message"]


def test_the_roles_that_are_taken_are_those_that_are_named(shared: Any) -> None:
    def asked(role: str) -> Any:
        return shared.chat(messages=[{"role": "user", "content": "hi"}, {"role": role, "content": "x"}])

    refused = asked("wizard")
    assert refused.status_code == 400
    roles = refused.json()["error"]["message"].partition("use one of ")[2].split(", ")
    assert set(roles) == {"system", "developer", "user", "assistant", "tool", "function"}
    for role in roles:
        assert asked(role).status_code == 200, role
