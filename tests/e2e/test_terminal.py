# SPDX-License-Identifier: Apache-2.0
"""generate, chat and the demonstration with a scripted model: the faces that a person sees first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripted import write_scripted_model
from tokenspeed.bench import demo
from tokenspeed.core.config import EngineConfig, ModelConfig
from tokenspeed.core.errors import RequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.llm.input_processor import TextPrompt, TokensPrompt
from tokenspeed.server.terminal import StreamingLLM

REPLIES = [("poem", "Roses are red,\nviolets are blue."), ("", "Paris — c'est à voir. 🗼")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("terminal") / "model", REPLIES, step_s=0.002)


def tokenspeed(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenspeed.cli", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120.0)


def test_generate_writes_nothing_but_text_to_stdout(folder: Path) -> None:
    done = tokenspeed("generate", "--model", str(folder), "--load-format", "scripted", "a poem", "else")
    assert (done.returncode, done.stdout) == (0, f"{REPLIES[0][1]}\n{REPLIES[1][1]}\n")


def test_chat_talks_until_exit(folder: Path) -> None:
    done = tokenspeed("chat", str(folder), "--load-format", "scripted", stdin="a poem please\n/exit\n")
    assert done.returncode == 0, done.stderr
    assert REPLIES[0][1] in done.stdout


def test_streams_are_whole_refused_and_abandoned(folder: Path) -> None:
    config = EngineConfig(model=ModelConfig(model=str(folder), load_format="scripted"))
    with StreamingLLM(config) as model:
        pieces = [output.outputs[0].text for output in model.stream(TextPrompt("x"), SamplingParams(max_tokens=99))]
        assert "".join(pieces) == REPLIES[1][1]
        assert len(pieces) > 5
        with pytest.raises(RequestError):
            next(model.stream(TokensPrompt([10**9]), SamplingParams()))
        abandoned = model.stream(TextPrompt("x"), SamplingParams(max_tokens=4000, ignore_eos=True))
        next(abandoned)
        assert model.llm.num_live == 1
        abandoned.close()
        again = [output.outputs[0].text for output in model.stream(TextPrompt("poem"), SamplingParams(max_tokens=99))]
        assert "".join(again) == REPLIES[0][1]
        assert model.llm.num_live == 0


def test_the_demonstration_talks_three_turns(
    start_server: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(str(folder), "--load-format", "scripted")
    turns = demo.converse(server.port, 96)
    said = capsys.readouterr().out
    assert [turn.text for turn in turns] == [REPLIES[1][1], REPLIES[1][1], REPLIES[0][1]]
    assert all(turn.ttft_s > 0 and turn.num_generated > 5 for turn in turns)
    assert turns[1].num_cached > 0
    assert said.count("TTFT") == said.count("tokens/s") == said.count("cached") == 3


def test_the_demonstration_fails_when_the_server_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert demo.main(["--model", str(tmp_path / "none.gguf")]) == 1
    assert "the server did not start" in capsys.readouterr().err
