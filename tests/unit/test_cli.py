# SPDX-License-Identifier: Apache-2.0
"""The command line: flags become configuration, every user error is one line, exit codes mean what they say."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed import __version__, cli
from tokenspeed.cli import flags
from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import ConfigError, ContextLengthError, EngineDeadError
from tokenspeed.core.request import SamplingParams
from tokenspeed.server import serve as serving
from tokenspeed.server import terminal


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `serve` was called with; nothing is served."""
    seen: list[Any] = []

    def record(asked: Any) -> int:
        seen.append(asked)
        return 0

    monkeypatch.setattr(serving, "serve", record)
    return seen


def test_flags_become_configuration(configs: list[Any]) -> None:
    command = (
        "serve some/model --served-name m --max-model-len 100 --kv-tokens 640 --block-size 32 --threads 2 --port 0 "
        "--no-prefix-caching --max-num-seqs 3 --overlap-depth 0 --dtype float32 --load-format gguf --api-key k "
        "--strict-model-name --cors-origin a --cors-origin b --kernel linear=reference --memory-fraction 0.25 "
        "--kv-cache-dtype fp8 --max-num-mixed-prefill-tokens 1k"
    )
    assert cli.main(command.split()) == 0
    (asked,) = configs
    engine, server = asked.engine, asked.server
    assert (engine.model.model, engine.model.served_name, engine.model.max_model_len) == ("some/model", "m", 100)
    assert (engine.model.dtype, engine.model.load_format) == ("float32", "gguf")
    assert (engine.cache.kv_tokens, engine.cache.block_size, engine.cache.prefix_caching) == (640, 32, False)
    assert (engine.cache.memory_fraction, engine.cache.kv_dtype) == (0.25, "fp8")
    assert (engine.scheduler.max_num_seqs, engine.scheduler.overlap_depth) == (3, 0)
    assert engine.scheduler.max_num_mixed_prefill_tokens == 1000
    assert (engine.device.num_threads, engine.device.kernel_overrides) == (2, (("linear", "reference"),))
    assert (server.port, server.api_key, server.strict_model_name) == (0, "k", True)
    assert server.cors_origins == ("a", "b")


def test_the_host_tier_has_a_size_and_a_time_to_store(configs: list[Any]) -> None:
    assert cli.main(["serve", "--host-kv-tokens", "64", "--host-store", "pressure"]) == 0
    cache = configs[0].engine.cache
    assert (cache.host_tokens, cache.host_store) == (64, "pressure")


@pytest.mark.parametrize(
    ("arguments", "form"),
    [([], "auto"), (["--exact"], "exact"), (["--weights", "exact"], "exact"), (["--weights", "packed"], "packed")],
)
@pytest.mark.parametrize("command", [["serve"], ["generate", "hello"], ["chat"]], ids=" ".join)
def test_exact_weights_have_a_flag_of_their_own(command: list[str], arguments: list[str], form: str) -> None:
    options = cli._parser().parse_args([*command, *arguments])
    assert flags.engine_config(options).model.weights == form


def test_without_flags_everything_is_the_default(configs: list[Any]) -> None:
    assert cli.main(["serve"]) == 0
    assert configs[0].engine == EngineConfig()
    assert configs[0].server.host == "127.0.0.1", "loopback unless told otherwise"


def test_every_configuration_field_has_a_flag_or_a_reason() -> None:
    # positional, --kernel, --cors-origin, --grpc-port
    without = {"model", "kernel_overrides", "cors_origins", "events"}
    known = (*flags.MODEL_FLAGS, flags.SERVED_NAME, *flags.SERVER_FLAGS)
    for struct in {flag.struct for flag in known}:
        mine = {flag.field for flag in known if flag.struct is struct}
        assert set(struct.__struct_fields__) - without == mine, struct


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--block-size", "7"], "--block-size 7"),
        (["serve", "--kv-tokens", "1"], "too small for one request"),
        (["serve", "a", "--model", "b"], "two models"),
        (["serve", "--kernel", "linear"], "OP=SOLUTION"),
        (["serve", "--max-model-len", "99", "--kv-tokens", "64"], "--max-model-len 99"),
        (["serve", "--host-kv-tokens", "15"], "at least 16"),
        (["serve", "--host-kv-tokens", "-16"], "--host-kv-tokens -16"),
        (["serve", "--host-kv-tokens", "64", "--no-prefix-caching"], "--no-prefix-caching"),
        (["serve", "--host-store", "pressure"], "give --host-kv-tokens"),
        (["serve", "--max-num-waiting", "-1"], "--max-num-waiting -1"),
        (["serve", "--ageing-steps", "0"], "--ageing-steps 0"),
        (["serve", "--max-num-mixed-prefill-tokens", "0"], "--max-num-mixed-prefill-tokens 0: give at least 1"),
    ],
)
def test_a_wrong_flag_is_one_line(
    configs: list[Any], capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not configs


def raising(error: BaseException) -> Any:
    def run(_: argparse.Namespace) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("wrong\nin two lines"), 1, "error: wrong in two lines"),
        (EngineDeadError("it died"), 1, "error: it died"),
        (MemoryError(), 1, "out of memory"),
        (ZeroDivisionError("a bug"), 1, "internal error: ZeroDivisionError: a bug; --debug shows where"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    monkeypatch.setattr(cli, "run_models", raising(error))
    assert cli.main(["models"]) == code
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "run_models", raising(ConfigError("wrong")))
    assert cli.main(["models", "--debug"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("error: wrong\n")


class FakeStream:
    """Stands in for StreamingLLM: says the last message backwards, in pieces."""

    prompts: list[Any]

    def __init__(self, config: EngineConfig, progress: Any) -> None:
        type(self).prompts = []
        progress("load", 1, 1, "tensors")
        self.llm = SimpleNamespace(default_params=SamplingParams(temperature=0.5))

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, prompt: Any, params: SamplingParams) -> Iterator[Any]:
        self.prompts.append((prompt, params))
        text = getattr(prompt, "text", None) or prompt.messages[-1]["content"]
        if text == "interrupt":
            yield SimpleNamespace(outputs=(SimpleNamespace(text="par"),))
            raise KeyboardInterrupt
        if text == "long":
            raise ContextLengthError(900, 512)
        for piece in text[::-1]:
            yield SimpleNamespace(outputs=(SimpleNamespace(text=piece),))


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> type[FakeStream]:
    monkeypatch.setattr(terminal, "StreamingLLM", FakeStream)
    return FakeStream


def test_generate_continues_each_prompt(fake_model: type[FakeStream], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "abc", "xy", "--max-tokens", "5", "--stop", "q", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "cba\nyx\n"
    params = fake_model.prompts[0][1]
    assert (params.max_tokens, params.stop, params.seed, params.temperature) == (5, ("q",), 3, 0.5)


def test_generate_reads_stdin(
    fake_model: type[FakeStream], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "from stdin"))
    assert cli.main(["generate"]) == 0
    assert capsys.readouterr().out == "nidts morf\n"


@pytest.mark.parametrize("arguments", [["generate"], ["generate", ""], ["generate", "one", ""]])
def test_generate_refuses_an_empty_prompt(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert cli.main(arguments) == 1
    assert "the prompt is empty" in capsys.readouterr().err


def test_chat_answers_one_prompt(fake_model: type[FakeStream], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--prompt", "abc", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "cba\n"
    assert [message["role"] for message in fake_model.prompts[0][0].messages] == ["system", "user"]


def test_chat_remembers_until_cleared(
    fake_model: type[FakeStream], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["abc", "", "interrupt", "long", "/nonsense", "xy", "/clear", "z", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert cli.main(["chat"]) == 0
    said = capsys.readouterr().out
    assert "cba" in said
    assert "[stopped]" in said, "an interrupt ends the answer, not the program"
    assert "900" in said, "a refused message is said and forgotten"
    asked = [[message["content"] for message in prompt.messages] for prompt, _ in fake_model.prompts]
    assert asked[0] == ["abc"]
    assert asked[-2] == ["abc", "cba", "interrupt", "par", "xy"]
    assert asked[-1] == ["z"]
    assert next(lines) == "never"


def test_chat_ends_with_the_input(fake_model: type[FakeStream], monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nothing)
    assert cli.main(["chat"]) == 0


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    said = capsys.readouterr().out
    assert "smollm2-135m" in said
    assert "94 MiB" in said


def run_tokenspeed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenspeed", *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_version() -> None:
    assert run_tokenspeed("--version").stdout == f"tokenspeed {__version__}\n"


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = run_tokenspeed("serve", str(tmp_path / "nothing.gguf"), "--port", "0")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("error: ")
    assert "nothing.gguf" in lines[-1]
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said_before_the_model_is_looked_for() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = run_tokenspeed("serve", "/no/such/model.gguf", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: 127.0.0.1:{port} is in use; stop the other program, or pass --port N (0 picks a free one)"
    ]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--body-bytes-max", "0"),
        ("--api-key", ""),
        ("--tool-call-parser", "nonsense"),
        ("--chat-template", "/no/such/file"),
        ("--store", "/no/such/folder/file"),
        ("--port", "65536"),
    ],
)
def test_a_value_that_cannot_work_is_said_before_the_model_is_looked_for(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "/no/such/model.gguf", *(() if flag == "--port" else ("--port", "0")), flag, value]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert f"{flag} {value}".strip() in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host {host}"):
        serving.bind(host, 0)


def test_a_closed_pipe_ends_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from tokenspeed import cli; sys.exit(cli.main(['models']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (cli.BROKEN_PIPE, b"")


def test_doctor_says_what_is_bound_and_why() -> None:
    done = run_tokenspeed("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("cpu", "memory", "torch", "cuda devices", "kernels on", "linear: "):
        assert word in done.stdout, word


LLAMA = (
    '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "intermediate_size": 128, '
    '"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}'
)


@pytest.fixture
def config_only(tmp_path: Path) -> str:
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_text(LLAMA)
    return str(tmp_path)


@pytest.mark.parametrize("before", [True, False], ids=["--plan MODEL", "MODEL --plan"])
def test_doctor_prints_a_plan_for_ranks_that_are_not_there(
    config_only: str, before: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--plan", config_only] if before else [config_only, "--plan"]
    assert cli.main(["doctor", *named, "--tp", "2", "--dtype", "float16"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"model    {config_only} (llama) in float16\nranks    2: --tp 2 ")
    assert "mesh of 2 ranks" in said
    assert "kernels on" not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan",), "takes one model"),
        (("other", "--plan", "{}"), "takes one model"),
        (("{}", "--tp", "2"), "give --plan MODEL"),
        (("--plan", "{}", "--tp", "4", "--ep", "3"), "ep may be 1, 2 or 4"),
        (("--plan", "{}", "--tp", "8"), "4 attention heads"),
        (("--plan", "{}", "--tp", "0"), "--tp 0"),
    ],
)
def test_a_plan_that_cannot_be_is_one_line(
    config_only: str, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *(argument.format(config_only) for argument in arguments)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert words in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("is_released", [True, False], ids=["released", "left"])
def test_a_signal_that_came_while_held_is_told_once_it_no_longer_is(is_released: bool) -> None:
    before, reached = signal.getsignal(signal.SIGINT), []

    def load() -> None:
        with cli._held_signals() as release:
            signal.raise_signal(signal.SIGINT)
            reached.append("held")
            if is_released:
                release()
                reached.append("lost")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert reached == ["held"]
    assert signal.getsignal(signal.SIGINT) is before
