# SPDX-License-Identifier: Apache-2.0
"""SDKs do the task twice each, as programs/NAME.py says: whole and streamed, or in two dialects."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients import agents
from clients.conftest import MODEL, Place, StartPlace, program
from clients.prompts import CHAT, MESSAGES, RESPONSES
from scripted import spoken_call

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs"


def run(place: StartPlace, name: str, thought: str = agents.THOUGHT) -> Place:
    """The place after the task was done twice."""
    read = spoken_call("bash", thought=thought, text="Let me look.", command="cat note.txt")
    here = place(agents.replies(read, spoken_call("bash", command=agents.WRITE)))
    agents.lay_out(here.work)
    printed = here.run(
        program("python", "bin", "python"), PROGRAMS / f"{name}.py", here.url, MODEL, agents.TASK,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    assert printed.splitlines() == [agents.DONE, agents.DONE]
    assert (here.work / "answer.txt").read_text() == agents.SECRET
    return here


@pytest.mark.parametrize(
    ("name", "thought"),
    [("openai_sdk", agents.THOUGHT), ("pydantic_ai_sdk", agents.THOUGHT), ("langchain_sdk", "")],
)
def test_by_chat_completions(place: StartPlace, name: str, thought: str) -> None:
    """langchain-openai sends no reasoning back, so the prompt of its next step would break off there."""
    here = run(place, name, thought)
    steps = here.warm_steps(6)
    assert {step.exchange.path for step in steps} == {CHAT}
    assert {bool(step.exchange.json().get("stream")) for step in steps} == {True, False}
    agents.check_warm(steps, 2, here.story())


def test_litellm_by_both_dialects(place: StartPlace) -> None:
    here = run(place, "litellm_sdk")
    steps = here.warm_steps(6)
    agents.check_warm(steps, 2, here.story())
    assert [step.exchange.path for step in steps] == [CHAT] * 3 + [MESSAGES] * 3


def test_anthropic_and_its_tool_runner(place: StartPlace) -> None:
    here = run(place, "anthropic_sdk")
    steps = here.warm_steps(6)
    agents.check_warm(steps, 2, here.story())
    assert {step.exchange.path.split("?")[0] for step in steps} == {MESSAGES}
    refused = [exchange for exchange in here.exchanges() if exchange.status == 400]
    assert refused and all(exchange.json()["thread"] for exchange in refused)
    assert all(len(step.exchange.json()["messages"]) == 2 * at + 1 for at, step in enumerate(steps[3:]))


def test_openai_by_responses(place: StartPlace) -> None:
    """The second run names the answer before instead of sending the history."""
    here = run(place, "responses_sdk")
    steps = here.warm_steps(6)
    agents.check_warm(steps, 2, here.story())
    assert {step.exchange.path for step in steps} == {RESPONSES}
    assert all(step.exchange.json().get("previous_response_id") for step in steps[4:])
