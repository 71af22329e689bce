# SPDX-License-Identifier: Apache-2.0
"""Ceilings are measured by a process of their own, and tables hold what they are given."""

from __future__ import annotations

import json

import pytest

from tokenspeed.bench import ceilings, report, speed
from tokenspeed.core.config import DeviceConfig, EngineConfig
from tokenspeed.core.errors import ConfigError, StartError


def test_the_program_prints_what_an_engine_of_these_settings_could_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ceilings, "_CPU_READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "_CPU_MATRIX_SIZE", 64)
    assert ceilings.main(["--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("is_gpu") is False
    assert found["read_bytes_s"] > 0
    assert found["flop_s"] > 0


def test_a_machine_that_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed.sys, "executable", "/bin/false")
    with pytest.raises(StartError, match="could not be measured"):
        speed.machine_of(EngineConfig(device=DeviceConfig(device="cpu")))


def test_tables() -> None:
    header, rows = ("name", "µs"), [("a", "10.5"), ("longer", "-")]
    assert report.table(header, rows) == "name      µs\na       10.5\nlonger     -"
    assert report.markdown(header, rows).splitlines() == [
        "| name | µs |",
        "| --- | ---: |",
        "| a | 10.5 |",
        "| longer | - |",
    ]
    assert (report.microseconds(1.5e-6), report.microseconds(None)) == ("1.5", "-")
    assert (report.ratio(3.0, 2.0), report.ratio(None, 2.0), report.ratio(3.0, None)) == ("1.50", "-", "-")


def test_results_are_written_or_refused(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="--json"):
        report.write_json(str(tmp_path), {})
    assert set(report.origin()) == {"date", "command", "commit"}
