# SPDX-License-Identifier: Apache-2.0
"""Everything around the dialects: models, tokens, probes, metrics, keys, CORS, and what is not imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tokenspeed import __version__
from tokenspeed.core.config import ServerConfig


def test_models_say_how_long_a_request_may_be(shared: Any) -> None:
    (card,) = shared.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake-model", "model", 512)
    assert shared.client.get("/v1/models/fake-model").json() == card


def test_probes_answer(shared: Any) -> None:
    for path in ("/health", "/ready", "/ping", "/"):
        assert shared.client.get(path).status_code == 200, path
        assert shared.client.head(path).status_code == 200, path
    assert shared.client.get("/version").json() == {"version": __version__}


def test_tokenize_and_back(shared: Any) -> None:
    answer = shared.client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert answer["tokens"] == [257, 97, 0xC3, 0xA9]
    assert (answer["count"], answer["max_model_len"]) == (4, 512)
    assert answer["token_strs"] == ["<bos>", "a", "\ufffd", "\ufffd"]
    bare = shared.client.post("/tokenize", json={"prompt": "aé", "add_special_tokens": False}).json()
    assert bare["tokens"] == [97, 0xC3, 0xA9]
    assert shared.client.post("/detokenize", json={"tokens": bare["tokens"]}).json() == {"prompt": "aé"}
    assert shared.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    for body in ({"tokens": [-1]}, {"tokens": [10**9]}, {}):
        assert shared.client.post("/detokenize", json=body).status_code == 400
    assert shared.client.post("/tokenize", json={}).json()["error"]["param"] == "prompt"


def test_metrics_count_requests_under_both_names(start: Any) -> None:
    server = start()
    server.chat(max_tokens=4)
    server.chat(max_tokens=4, stream=True)
    server.chat(temperature=-1)
    text = server.client.get("/metrics").text
    labels = 'engine="0",model_name="fake-model"'
    for prefix in ("tokenspeed", "vllm"):
        assert f"{prefix}:num_requests_running{{{labels}}} 0.0" in text
        assert f"{prefix}:time_to_first_token_seconds_count{{{labels}}} 2.0" in text
        ended = 'engine="0",finished_reason="length",model_name="fake-model"'
        assert f"{prefix}:request_success_total{{{ended}}} 2.0" in text
        assert f"{prefix}:request_generation_tokens_sum{{{labels}}} 8.0" in text
    assert server.client.head("/metrics").status_code == 200


def test_the_key_is_asked_for_where_it_matters(start: Any) -> None:
    server = start(server=ServerConfig(api_key="secret"))
    for path in ("/health", "/metrics", "/version", "/ping"):
        assert server.client.get(path).status_code == 200, path
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        response = server.client.get("/v1/models", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.client.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 401
    assert server.client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


def test_cors_is_for_the_origins_that_were_named(start: Any) -> None:
    server = start(server=ServerConfig(cors_origins=("http://good.example",), api_key="k"))
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    good = server.client.options("/v1/chat/completions", headers={"origin": "http://good.example", **ask})
    assert good.headers["access-control-allow-origin"] == "http://good.example"
    bad = server.client.options("/v1/chat/completions", headers={"origin": "http://bad.example", **ask})
    assert "access-control-allow-origin" not in bad.headers


def test_importing_the_app_loads_no_torch() -> None:
    code = (
        "import sys, tokenspeed.server.app, tokenspeed.server.serve, tokenspeed.cli; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
