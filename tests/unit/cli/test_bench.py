# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed bench kernel` from the command line: tables, files, exit codes, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokenspeed import cli
from tokenspeed.bench import kernel
from tokenspeed.bench.floor import Ceilings
from tokenspeed.kernels import registry
from tokenspeed.kernels.registry import Band, Ok, Plugin, Solution


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "measure", lambda device, dtype: Ceilings("a machine", 1e12, 1e13, 1 << 16))
    monkeypatch.setattr(kernel, "_NUM_TIMES", 1)
    monkeypatch.setattr(kernel, "_TIME_S_MIN", 0.0)


def bench(*arguments: str) -> int:
    return cli.main(["bench", "kernel", *arguments, "--device", "cpu"])


def test_a_table_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "times.json"
    monkeypatch.setattr("sys.argv", ["/somewhere/tokenspeed", "bench", "kernel", "silu_mul"])
    assert bench("silu_mul", "--shape", "16", "--markdown", "--json", str(path), "--dtype", "bfloat16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Command: `tokenspeed bench kernel silu_mul`")
    assert "a machine: reads 1.000 TB/s, computes 10 TFLOP/s" in lines[0]
    assert lines[2] == "| op | shape | solution | floor µs | time µs | x floor | peer µs | check |"
    assert [line.split("|")[1:4] for line in lines[4:]] == [[" silu_mul ", " 16 ", " cpu "]]
    kept = json.loads(path.read_text())
    assert kept["dtype"] == "bfloat16"
    assert kept["ceilings"]["read_bytes_s"] == 1e12
    assert [each["shape"] for each in kept["times"]] == ["16"]


def test_a_wrong_kernel_makes_it_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Solution("wrong", Band.PLUGIN, lambda _ctx: Ok(), lambda _ctx: lambda x_TF: torch.zeros(len(x_TF), 12288))
    monkeypatch.setattr(registry, "_plugins", lambda: {"them": Plugin(1, {"silu_mul": (wrong,)})})
    assert bench("silu_mul", "--solution", "wrong", "--shape", "16") == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["silu"], "bench kernel silu: no op of this name has cases"),
        (["silu_mul", "--solution", "x"], "--solution x: no such solution"),
        (["silu_mul", "--shape", "x"], "no solution that runs on cpu has a size of these names"),
        (["silu_mul", "--json", "/no/such/x.json"], "there is no folder /no/such"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert bench(*arguments) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: ")
    assert text in told


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "kernel", "silu_mul", "--device", "cuda"]) == 1
    assert "no CUDA device is visible to torch" in capsys.readouterr().err
