# SPDX-License-Identifier: Apache-2.0
"""The deliberate faults of csrc/control/mutants still apply. That each is caught is shown by `make mutants`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATCHES = sorted((ROOT / "csrc" / "control" / "mutants").glob("*.patch"))


def test_there_are_twenty() -> None:
    assert len(PATCHES) >= 20


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_fault_applies(patch: Path) -> None:
    done = subprocess.run(
        ["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["no-such-fault"], "no-such-fault"),
        ([PATCHES[0].stem, "no-such-fault"], "no-such-fault"),
        ([PATCHES[0].name], PATCHES[0].name),
        (["--seeds", "0"], "'0'"),
        (["--seeds", "-1"], "'-1'"),
        (["--seeds", "1,000"], "'1,000'"),
        (["--jobs", "0"], "'0'"),
    ],
)
def test_a_word_that_is_not_understood_is_no_success(words: list[str], named: str) -> None:
    program = ROOT / "csrc" / "control" / "mutants" / "run.py"
    done = subprocess.run([sys.executable, program, *words], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert named in done.stderr.splitlines()[-1]
    assert "mutants" not in done.stdout
