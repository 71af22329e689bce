# SPDX-License-Identifier: Apache-2.0
"""Claude Code does the task through /v1/messages, with its small prompt and its full one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from clients import agents
from clients.conftest import CONTEXT_LENGTH, MODEL, Place, StartPlace, program
from scripted import spoken_call

pytestmark = pytest.mark.clients

QUIET = {
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


def run_claude_code(here: Place, *flags: str) -> dict[str, Any]:
    """What Claude Code prints."""
    printed = here.run(
        program("claude", "node_modules", "@anthropic-ai", "claude-code-linux-x64", "claude"),
        "-p", agents.TASK, "--model", MODEL, "--permission-mode", "dontAsk", "--allowedTools", "Read Bash",
        "--output-format", "json", *flags,
        ANTHROPIC_BASE_URL=here.url, ANTHROPIC_API_KEY="any", CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(CONTEXT_LENGTH),
        **QUIET,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(printed)
    return answer


@pytest.mark.parametrize("flags", [("--bare",), ()], ids=["bare", "full"])
def test_claude_code(place: StartPlace, tmp_path: Path, flags: tuple[str, ...]) -> None:
    note = str(tmp_path / "work" / "note.txt")
    read = spoken_call("Read", thought=agents.THOUGHT, text="Let me look.", file_path=note)
    here = place(agents.replies(read, spoken_call("Bash", command=agents.WRITE), f"<think>Yes.</think>{agents.DONE}"))
    agents.lay_out(here.work)
    answer = run_claude_code(here, *flags)
    assert answer["result"] == agents.DONE
    assert not answer["is_error"]
    agents.check_done(here, "/v1/messages?beta=true")
    thinking = [block for block in _replayed_blocks(here.exchanges()[-1].json()) if block["type"] == "thinking"]
    assert [block["thinking"] for block in thinking] == [agents.THOUGHT], "the reasoning came back"


def test_claude_code_loads_a_tool_later(place: StartPlace, tmp_path: Path) -> None:
    """Its schema joins the prompt where it was asked for, so that all before stays in the cache."""
    search = spoken_call("ToolSearch", query="select:NotebookEdit")
    read = spoken_call("Read", file_path=str(tmp_path / "work" / "note.txt"))
    schema_read = ('"notebook_path"', read)
    written, secret, task = agents.replies(search, spoken_call("Bash", command=agents.WRITE))
    here = place([written, secret, schema_read, task])
    agents.lay_out(here.work)
    assert run_claude_code(here)["result"] == agents.DONE
    assert (here.work / "answer.txt").read_text() == agents.SECRET
    steps = here.warm_steps(4)
    assert len(steps) == 4, here.story()
    assert "NotebookEdit" in {tool["name"] for tool in steps[-1].exchange.json()["tools"]}
    for earlier, later in itertools.pairwise(steps):
        assert later.shared > earlier.prompt_len, here.story()


def test_claude_code_with_agents_of_its_own(place: StartPlace) -> None:
    """Two run while it goes on; their words come back to it later."""
    agents_asked = "".join(
        spoken_call("Agent", description="A word", prompt=prompt, subagent_type="Explore")
        for prompt in ("Say the first word.", "Say the second word.")
    )
    here = place(
        [
            ("ultramarine", agents.DONE),
            ("Do NOT Read or tail", "I wait for them."),
            ("Say the first word.", "vermilion"),
            ("Say the second word.", "ultramarine"),
            (agents.TASK, agents_asked),
        ]
    )
    assert run_claude_code(here)["result"] == agents.DONE
    steps = here.warm_steps(5)
    asked_by_agents = [step for step in steps if "x-claude-code-agent-id" in step.exchange.headers]
    assert len(asked_by_agents) == 2, here.story()


def _replayed_blocks(body: dict[str, list[dict[str, list[dict[str, str]]]]]) -> list[dict[str, str]]:
    """The blocks of all replies in the history."""
    return [block for message in body["messages"] if message["role"] == "assistant" for block in message["content"]]
