# SPDX-License-Identifier: Apache-2.0
"""Sockets, names and the banner; the server as a process is in tests/e2e."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from fakes import engine_info
from tokenspeed.core.config import EngineConfig, ModelConfig
from tokenspeed.core.errors import ConfigError, PortInUseError
from tokenspeed.server.app import served_name
from tokenspeed.server.serve import address_of, banner, bind


def test_port_0_takes_a_free_one() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        assert address_of(sock, "127.0.0.1") == f"http://127.0.0.1:{port}"


def test_a_port_in_use_is_named() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.7", 0), ("127.0.0.1", 99_999), ("no.such.host.invalid", 0)])
def test_an_impossible_address_is_named(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=f"--host {host} --port {port}"):
        bind(host, port)


def test_the_banner_says_what_matters() -> None:
    info = engine_info(model_type="t", num_parameters=134_515_008, num_kv_blocks=64, kv_bytes=3 * 2**20)
    text = banner(info, "small", "http://127.0.0.1:1")
    for words in ("small (t, 135 M parameters)", "cpu, float32, 1 threads", "1,024 tokens", "3 MiB", "512 tokens"):
        assert words in text
    assert text.splitlines()[-1] == "Press Ctrl-C to stop."
    assert "host tier" not in text and "weights" not in text
    numbers = banner(engine_info(weight_bytes=513 << 20), "small", "http://127.0.0.1:1")
    assert "  weights    513 MiB in float32\n" in numbers
    packed = banner(engine_info(weight_bytes=94 << 20, packed_bytes=92 << 20), "small", "http://127.0.0.1:1")
    assert "  weights    92.0 MiB packed, 2.0 MiB in float32\n" in packed
    tiered = banner(engine_info(num_host_blocks=128), "small", "http://127.0.0.1:1")
    assert "host tier  2,048 tokens in 128 blocks" in tiered


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/model", "org/model"), ("{folder}/m.gguf", "m"), ("{folder}", "{name}"), ("alias", "alias")],
)
def test_a_local_model_is_called_by_its_own_name(tmp_path: Path, model: str, name: str) -> None:
    (tmp_path / "m.gguf").touch()
    path = model.format(folder=tmp_path)
    llm = SimpleNamespace(config=EngineConfig(model=ModelConfig(model=path)))
    assert served_name(llm) == name.format(name=tmp_path.name)  # type: ignore[arg-type]
    named = SimpleNamespace(config=EngineConfig(model=ModelConfig(model=path, served_name="other")))
    assert served_name(named) == "other"  # type: ignore[arg-type]
