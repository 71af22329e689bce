# SPDX-License-Identifier: Apache-2.0
"""Progress: bars for a terminal, few lines for a file."""

from __future__ import annotations

import io
from pathlib import Path

from tokenspeed.observability.machine import describe_machine
from tokenspeed.observability.progress import ProgressReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_first_and_a_last_line() -> None:
    stream = io.StringIO()
    report = ProgressReporter(stream)
    for done in range(0, 101):
        report("download", done * 2**20, 100 * 2**20, "B")
    report("load", 0, 272, "tensors")
    report("load", 272, 272, "tensors")
    report("load", 272, 272, "tensors")
    assert stream.getvalue().splitlines() == [
        "Downloading: 0.0 MiB of 100.0 MiB",
        "Downloading: 100.0 MiB of 100.0 MiB",
        "Loading weights: 0 tensors of 272 tensors",
        "Loading weights: 272 tensors of 272 tensors",
    ]


def test_a_terminal_gets_a_bar_a_stage() -> None:
    stream = Terminal()
    report = ProgressReporter(stream)
    report("load", 1, 2, "tensors")
    report("load", 2, 2, "tensors")
    report("warmup", 1, 1, "steps")
    report.close()
    text = stream.getvalue()
    assert "Loading weights: 100%" in text
    assert "Warming up: 100%" in text
    assert text.endswith("\n")


def test_the_machine_is_described_with_or_without_proc() -> None:
    machine = describe_machine()
    assert machine.num_cores_allowed >= 1
    assert machine.memory_total is None or machine.memory_total > 2**20
    blind = describe_machine(Path("/nowhere"))
    assert blind.memory_total is None
    assert blind.cpu
