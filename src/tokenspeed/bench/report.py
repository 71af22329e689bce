# SPDX-License-Identifier: Apache-2.0
"""How measured numbers are shown and kept: a table for a person, Markdown for a page, JSON for a program. Knows no
benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenspeed.core.errors import ConfigError

Row = Sequence[str]


def table(header: Row, rows: Iterable[Row]) -> str:
    """Columns of equal width, two spaces apart: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )


def markdown(header: Row, rows: Iterable[Row]) -> str:
    """The same table in Markdown."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def origin() -> dict[str, str]:
    """What a kept number carries: when, by which command, from which commit."""
    command = " ".join(["tokenspeed", *sys.argv[1:]])
    return {"date": time.strftime("%Y-%m-%d"), "command": command, "commit": _commit()}


def check_writable(path: str | None) -> None:
    """ConfigError when a file for results could not be written, said before anything is measured."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {Path(path).absolute().parent}")


def write_json(path: str, value: object) -> None:
    """Write results. Raises ConfigError."""
    try:
        Path(path).write_text(json.dumps(value, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror or error}") from error


def microseconds(seconds: float | None) -> str:
    """As a cell of a table."""
    return "-" if seconds is None else f"{seconds * 1e6:.1f}"


def ratio(measured: float | None, floor: float | None) -> str:
    """How many times the floor."""
    return "-" if measured is None or not floor else f"{measured / floor:.2f}"


def _commit() -> str:
    """The checkout's, where this is one, or the one that a pack was made from."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        packed = folder.parents[2] / "COMMIT"
        return packed.read_text().strip() if packed.is_file() else "unknown"
