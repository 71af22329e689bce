# SPDX-License-Identifier: Apache-2.0
"""The deliberate faults of csrc/control/mutants still apply. That each is caught is shown by `make mutants`."""

from __future__ import annotations

import subprocess
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
