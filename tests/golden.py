# SPDX-License-Identifier: Apache-2.0
"""Texts that are compared with files beside the tests.

To write the files anew after a change that is meant, and then to read what has changed:

    WRITE_GOLDEN=1 .venv/bin/python -m pytest -k golden tests/unit/spmd tests/unit/execution; git diff tests
"""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(path: Path, text: str) -> None:
    """The file holds exactly this text."""
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; tests/golden.py says how to write it anew"
