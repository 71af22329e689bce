# SPDX-License-Identifier: Apache-2.0
"""The task that every agent is given, and the script of a model that does it: read a file, write another, say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clients.conftest import Place
from clients.prompts import Step

SECRET = "heron-4711"
TASK = "Copy the word of note.txt into answer.txt."
DONE = "The word is copied."
WRITE = f"printf %s {SECRET} > answer.txt && echo written-$((40 + 2))"
WRITTEN = "written-42"
"""What WRITE prints; the call itself does not contain it."""
THOUGHT = "Read it first."


def replies(read: str, write: str, done: str = DONE) -> list[tuple[str, str]]:
    """read and write are replies with calls. What came last in a conversation is matched first."""
    return [(WRITTEN, done), (SECRET, write), (TASK, read)]


def lay_out(work: Path) -> None:
    """What the agent finds in its folder."""
    (work / "note.txt").write_text(f"{SECRET}\n")


def check_done(place: Place, path: str) -> None:
    """The file is there, and every step after the first found the one before it in the cache, its reply included."""
    assert (place.work / "answer.txt").read_text().strip() == SECRET
    steps = [step for step in place.warm_steps(3) if step.exchange.path == path and not _is_aside(step)]
    check_warm(steps, 1, place.story())


def check_warm(steps: Sequence[Step], num_runs: int, story: str) -> None:
    """The task was done num_runs times in three steps each, in which a prompt goes on where the last reply ended."""
    assert len(steps) == 3 * num_runs, story
    for at, step in enumerate(steps):
        assert at % 3 == 0 or step.shared > steps[at - 1].prompt_len + len(SECRET), story


def _is_aside(step: Step) -> bool:
    """Whether it is no step of the agent: a question without tools, such as one for a title."""
    body = step.exchange.json()
    return "tools" not in body and not any("tools" in item for item in body.get("input", []))
