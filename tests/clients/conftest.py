# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed serve` with a scripted model that speaks in tool calls, a relay before it that keeps what passes, and
the clients that `make test-clients` installs, each in a home folder of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from clients.prompts import BLOCK_SIZE, Prompts, Step
from clients.wire import Exchange, Relay
from e2e.conftest import ServerProcess
from scripted import CALLING_TEMPLATE, write_scripted_model

INSTALLED = Path(__file__).resolve().parents[2] / "build" / "clients"
MODEL = "scripted-agent"
CONTEXT_LENGTH = 262_144
CLIENT_S_MAX = 180.0
THREAD_REFUSAL = b"thread_unsupported_request"


class Place:
    """A server, the relay before it, and a home and a working folder for one client."""

    def __init__(self, folder: Path, replies: Sequence[tuple[str, str]]) -> None:
        model = write_scripted_model(
            folder / "model", replies, context_length=CONTEXT_LENGTH, template=CALLING_TEMPLATE
        )
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self._prompts = Prompts(model)
        self._server = ServerProcess(
            str(model), "--load-format", "scripted", "--served-name", MODEL, "--kv-tokens", str(2 * CONTEXT_LENGTH)
        )
        self._relay = Relay(self._server.port)
        self.url = self._relay.url

    def run(self, *command: str | Path, **environment: str) -> str:
        """What the client prints, run in the working folder without any variable of ours. Fails when it does."""
        variables = {"HOME": str(self.home), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environment}
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=self.work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, complaints = process.communicate(timeout=CLIENT_S_MAX)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the client did not end in {CLIENT_S_MAX} s\n{self.story()}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        assert process.returncode == 0, f"{printed}\n{complaints}\n{self.story()}"
        return printed

    def exchanges(self) -> list[Exchange]:
        """What passed so far; nothing was refused but threads, which a client takes for a wish."""
        found = self._relay.exchanges()
        refused = [exchange for exchange in found if exchange.status >= 400 and THREAD_REFUSAL not in exchange.answer]
        assert not refused, f"{refused[0]}\n{self._server.log}"
        return found

    def warm_steps(self, num_min: int) -> list[Step]:
        """The requests for replies, at least num_min. Each was counted as it is, and found in the cache what it shares
        with an earlier one, but for a block."""
        steps = self._prompts.steps(self.exchanges())
        assert len(steps) >= num_min, self.story()
        for step in steps:
            assert step.told_prompt_len == step.prompt_len
            assert step.cached >= step.shared - BLOCK_SIZE, f"{step.cached} of {step.shared} shared\n{self.story()}"
        return steps

    def story(self) -> str:
        """What passed, one line each, and the server's log."""
        lines = [f"{each.method} {each.path} {each.status} {each.answer[-600:]!r}" for each in self._relay.exchanges()]
        return "\n".join([*lines, self._server.log[-4000:]])

    def close(self) -> None:
        self._relay.close()
        self._server.close()


StartPlace = Callable[[Sequence[tuple[str, str]]], Place]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StartPlace]:
    """Starts a place that ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(replies: Sequence[tuple[str, str]]) -> Place:
            started = Place(tmp_path, replies)
            stack.callback(started.close)
            return started

        yield start


def program(*path: str) -> Path:
    """An installed client's file."""
    found = INSTALLED.joinpath(*path)
    assert found.exists(), f"{found} is missing: run `make test-clients`, which installs the clients"
    return found
