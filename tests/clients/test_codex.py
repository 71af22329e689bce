# SPDX-License-Identifier: Apache-2.0
"""Codex does the task through /v1/responses: as a model that it does not know, which has functions only, as one that it
lets patch files by a custom tool, and as one whose only tool takes programs and comes as an item of the conversation.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clients import agents
from clients.conftest import CONTEXT_LENGTH, MODEL, Place, StartPlace, program
from clients.prompts import RESPONSES
from scripted import spoken_call

pytestmark = pytest.mark.clients

BINARY = "codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
READ = spoken_call("exec_command", thought=agents.THOUGHT, text="Let me look.", cmd="cat note.txt")
PATCH = f"*** Begin Patch\n*** Add File: answer.txt\n+{agents.SECRET}\n*** End Patch\n"


def run_codex(here: Place, model: str) -> str:
    """What Codex prints."""
    settings = f"""
model = "{model}"
model_provider = "local"
model_context_window = {CONTEXT_LENGTH}
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{here.url}/v1"
wire_api = "responses"
env_key = "LOCAL_KEY"
[analytics]
enabled = false
[feedback]
enabled = false
"""
    (here.home / ".codex").mkdir()
    (here.home / ".codex" / "config.toml").write_text(settings)
    return here.run(
        program("codex", "node_modules", "@openai", *Path(BINARY).parts), "exec", "--skip-git-repo-check", "--json",
        "--sandbox", "danger-full-access", "--disable", "plugins", "--disable", "apps", "-c", 'web_search="disabled"',
        agents.TASK,
        LOCAL_KEY="any",
    )  # fmt: skip


def test_codex_as_an_unknown_model(place: StartPlace) -> None:
    here = place(agents.replies(READ, spoken_call("exec_command", cmd=agents.WRITE)))
    agents.lay_out(here.work)
    assert agents.DONE in run_codex(here, MODEL)
    agents.check_done(here, RESPONSES)


def test_codex_as_a_known_model_with_a_custom_tool(place: StartPlace) -> None:
    patched = "Success. Updated the following files"
    here = place(
        [(patched, agents.DONE), (agents.SECRET, spoken_call("apply_patch", input=PATCH)), (agents.TASK, READ)]
    )
    agents.lay_out(here.work)
    assert agents.DONE in run_codex(here, "gpt-5.5")
    agents.check_done(here, RESPONSES)
    assert any(item["type"] == "custom_tool_call" for item in here.exchanges()[-1].json()["input"])


@pytest.mark.parametrize("model", ["gpt-5.6-luna", "gpt-6.1-sol"])
def test_codex_as_a_model_that_writes_programs(place: StartPlace, model: str) -> None:
    read, write = (
        spoken_call("functions__exec", input=f"text(await tools.exec_command({{cmd: {json.dumps(command)}}}));")
        for command in ("cat note.txt", agents.WRITE)
    )
    here = place(agents.replies(read, write))
    agents.lay_out(here.work)
    assert agents.DONE in run_codex(here, model)
    agents.check_done(here, RESPONSES)
    assert here.exchanges()[0].json()["input"][0]["type"] == "additional_tools"
