# SPDX-License-Identifier: Apache-2.0
"""Fetching by hub id, from a stand-in hub on loopback: which files, resuming, progress, and every refusal."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save

from tokenspeed.checkpoints import open_model
from tokenspeed.core.config import ModelConfig
from tokenspeed.core.errors import ModelNotFoundError

COMMIT = {"main": "a" * 40, "v2": "b" * 40}
WEIGHTS = save({"a": np.arange(60_000, dtype=np.float32)})
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"T",
    "model.safetensors": WEIGHTS,
    "small.gguf": b"GGUF but not really",
    "pytorch_model.bin": b"pickled",
    "README.md": b"# about",
    "onnx/config.json": b"{}",
}


class Hub:
    """What the stand-in holds and how it fails. cuts: how many more weight downloads end half way."""

    def __init__(self) -> None:
        self.cuts = 0
        self.fail_ranges = False
        self.drop_ranges = False
        self.gets: list[tuple[str, str | None]] = []

    def fetched(self) -> set[str]:
        return {name for name, _ in self.gets}


class Handler(BaseHTTPRequestHandler):
    """The few routes of the hub's interface that a snapshot needs."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for pattern, answer in (
            (r"/api/models/(\w+/\w+)/revision/(\w+)", self.revision),
            (r"/api/models/(\w+/\w+)/tree/(\w+)", self.tree),
            (r"/(\w+/\w+)/resolve/(\w+)/(.+)", self.resolve),
        ):
            match = re.fullmatch(pattern, path)
            if match:
                answer(*match.groups())
                return
        self.refuse(404, "EntryNotFound")

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def reply(self, status: int, body: bytes, headers: dict[str, str], declared_len: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if declared_len is None else declared_len))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def may_read(self, repo: str, revision: str) -> bool:
        if repo == "org/gated":
            self.refuse(403, "GatedRepo")
        elif repo != "org/model":
            self.refuse(404, "RepoNotFound")
        elif revision not in COMMIT and revision not in COMMIT.values():
            self.refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def revision(self, repo: str, revision: str) -> None:
        if self.may_read(repo, revision):
            sha = COMMIT.get(revision, revision)
            self.json({"id": repo, "sha": sha, "siblings": [{"rfilename": name} for name in FILES]})

    def tree(self, repo: str, revision: str) -> None:
        if self.may_read(repo, revision):
            self.json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in FILES.items()
                ]
            )

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if not self.may_read(repo, revision):
            return
        if name not in FILES:
            self.refuse(404, "EntryNotFound")
            return
        data, asked = FILES[name], self.headers.get("Range")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            self.reply(200, data, headers)
            return
        self.hub.gets.append((name, asked))
        if asked and self.hub.drop_ranges:
            self.close_connection = True
        elif asked and self.hub.fail_ranges:
            self.refuse(500, "Down")
        elif asked:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self.reply(206, data[begin:], headers)
        elif name.endswith(".safetensors") and self.hub.cuts:
            self.hub.cuts -= 1
            self.reply(200, data[: len(data) // 2], headers, len(data))
            self.close_connection = True
        else:
            self.reply(200, data, headers)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Small enough that half of the small weights here arrives before a cut.
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 16 * 1024)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    yield state
    server.shutdown()
    server.server_close()
    thread.join(10)


def refusal(model: str, revision: str | None = None) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        open_model(ModelConfig(model=model, revision=revision))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_by_its_id(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, str]] = []
    source = open_model(ModelConfig(model="org/model"), lambda *args: seen.append(args))
    assert source.config == {"model_type": "llama"}
    assert source.chat_template == "T"
    np.testing.assert_array_equal(source.weights().read("a", (60_000,)), np.arange(60_000, dtype=np.float32))
    # Neither pickles nor GGUF files nor other formats are fetched unasked.
    assert hub.fetched() == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert source.path.is_relative_to(tmp_path / "cache" / "hub")
    assert {(stage, unit) for stage, _, _, unit in seen} == {("download", "B")}
    num_bytes = sum(len(FILES[name]) for name in hub.fetched())
    assert seen[-1] == ("download", num_bytes, num_bytes, "B")
    assert [done for _, done, _, _ in seen] == sorted(done for _, done, _, _ in seen)


def test_nothing_is_fetched_twice(hub: Hub) -> None:
    open_model(ModelConfig(model="org/model"))
    hub.gets.clear()
    open_model(ModelConfig(model="org/model"))
    assert hub.gets == []


def test_a_revision(hub: Hub) -> None:
    source = open_model(ModelConfig(model="org/model", revision="v2"))
    assert source.path.name == COMMIT["v2"]
    assert "has no revision 'v3'" in refusal("org/model", "v3")


def test_dummy_weights_are_not_fetched(hub: Hub) -> None:
    open_model(ModelConfig(model="org/model", load_format="dummy"))
    assert "model.safetensors" not in hub.fetched()
    assert "config.json" in hub.fetched()


def test_a_cut_connection_goes_on_where_it_stopped(hub: Hub) -> None:
    hub.cuts = 1
    source = open_model(ModelConfig(model="org/model"))
    np.testing.assert_array_equal(source.weights().read("a", (60_000,)), np.arange(60_000, dtype=np.float32))
    ranges = [asked for name, asked in hub.gets if name == "model.safetensors"]
    assert len(ranges) == 2
    assert ranges[0] is None
    assert ranges[1] is not None
    assert int(ranges[1].removeprefix("bytes=").rstrip("-")) > 0


def test_the_next_run_fetches_only_what_is_missing(hub: Hub) -> None:
    hub.cuts, hub.fail_ranges = 1, True
    assert "hub model org/model could not be fetched" in refusal("org/model")
    hub.fail_ranges = False
    hub.gets.clear()
    source = open_model(ModelConfig(model="org/model"))
    np.testing.assert_array_equal(source.weights().read("a", (60_000,)), np.arange(60_000, dtype=np.float32))
    assert hub.fetched() == {"model.safetensors"}


def test_a_hub_that_keeps_hanging_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.cuts, hub.drop_ranges = 1, True
    assert "hub model org/model could not be fetched: Server disconnected" in refusal("org/model")


def test_a_gguf_file_is_fetched_when_asked_for(hub: Hub) -> None:
    with pytest.raises(Exception, match=r"small\.gguf.*(GGUF|gguf)"):
        open_model(ModelConfig(model="org/model:small.gguf"))
    assert hub.fetched() == {"small.gguf"}
    assert "has no file other.gguf" in refusal("org/model:other.gguf")


def test_a_hub_model_without_safetensors(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FILES, "model.safetensors")
    assert "has no *.safetensors; where it has a GGUF file, name it: org/model:file.gguf" in refusal("org/model")


def test_refusals(hub: Hub) -> None:
    assert "no model org/nothing" in refusal("org/nothing")
    assert "org/gated is gated" in refusal("org/gated")


def test_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "the hub cannot be reached" in refusal("org/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "the hub cannot be reached" in refusal("org/model")


def test_what_is_cached_is_served_without_a_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_model(ModelConfig(model="org/model")).path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert open_model(ModelConfig(model="org/model")).path == path
