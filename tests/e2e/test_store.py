# SPDX-License-Identifier: Apache-2.0
"""Responses that outlive the server, and a file that is none of ours."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripted import write_scripted_model


def test_a_conversation_goes_on_after_restarts(start_server: Any, tmp_path: Path) -> None:
    """After a server that was told to end, and after one that was killed."""
    folder = write_scripted_model(tmp_path / "model", [("first", "One."), ("", "Two.")])
    flags = (str(folder), "--load-format", "scripted", "--store", str(tmp_path / "kept.db"))
    server = start_server(*flags)
    last = server.client.post("/v1/responses", json={"input": "first", "max_output_tokens": 20}).json()
    assert last["output"][0]["content"][0]["text"] == "One."
    roles = ["user"]
    for number in (signal.SIGTERM, signal.SIGKILL):
        stored = server.client.get(f"/v1/responses/{last['id']}").content
        if number is signal.SIGKILL:
            server.wait_until_idle()
            again = server.client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1, "store": False})
            assert again.status_code == 200, "the one before is written by now"
        server.stop(number)
        server = start_server(*flags)
        assert server.client.get(f"/v1/responses/{last['id']}").content == stored
        body = {"input": "and then", "previous_response_id": last["id"], "max_output_tokens": 20}
        last = server.client.post("/v1/responses", json=body).json()
        items = server.client.get(f"/v1/responses/{last['id']}/input_items?order=asc").json()["data"]
        roles += ["assistant", "user"]
        assert [item["role"] for item in items] == roles
        assert "Traceback" not in server.log


def test_a_file_that_is_no_store_is_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n" * 1000)
    command = [
        sys.executable,
        "-m",
        "tokenspeed.cli",
        "serve",
        str(tmp_path / "none"),
        "--port",
        "0",
        "--store",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60.0)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"error: --store {path}: no store of responses")
