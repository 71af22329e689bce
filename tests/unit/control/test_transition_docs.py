# SPDX-License-Identifier: Apache-2.0
"""The table and the diagram of docs/control-plane.md are what transitions.h declares, and the lines that it says do
not compile are cases of tests/must_not_compile.

csrc/control/tests/transition_table.cc prints both; here it writes them into a copy of the docs, which must not change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ("control-plane.md", "control-states.svg")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that prints the table, built with a compiler that is installed."""
    compiler = shutil.which("g++") or shutil.which("clang++-19")
    if compiler is None and "CI" in os.environ:
        pytest.fail("no compiler of C++20 is installed")
    if compiler is None:
        pytest.skip("no compiler of C++20 is installed")
    output = tmp_path_factory.mktemp("program") / "transition_table"
    control = ROOT / "csrc" / "control"
    command = [
        compiler,
        "-std=c++20",
        f"-I{control}",
        str(control / "tests" / "transition_table.cc"),
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return output


def write_into(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, folder], capture_output=True, text=True, timeout=60, check=False)


def test_the_page_and_the_diagram_are_up_to_date(program: Path, tmp_path: Path) -> None:
    for name in PAGES:
        shutil.copy(ROOT / "docs" / name, tmp_path)
    done = write_into(program, tmp_path)
    assert done.returncode == 0, done.stderr
    for name in PAGES:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), f"{name}: run make docs-control"


def test_an_old_page_is_rewritten_between_its_markers_only(program: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / PAGES[0]).read_text()
    row = next(line for line in page.splitlines() if line.startswith("| **Cancelled**"))
    (tmp_path / PAGES[0]).write_text(page.replace(row, "| **Cancelled** | never |"))
    assert write_into(program, tmp_path).returncode == 0
    assert (tmp_path / PAGES[0]).read_text() == page


def test_a_page_without_markers_is_refused(program: Path, tmp_path: Path) -> None:
    (tmp_path / PAGES[0]).write_text("# Control plane\n")
    done = write_into(program, tmp_path)
    assert done.returncode == 1
    assert "lacks the markers" in done.stderr
    assert not (tmp_path / PAGES[1]).exists()


def test_the_lines_that_do_not_compile_are_from_the_cases() -> None:
    rows = re.findall(r"^\| (\d) \| .*? \| `([^`]*;)` \| ", (ROOT / "docs" / PAGES[0]).read_text(), re.MULTILINE)
    assert [number for number, _ in rows] == ["1", "2", "3", "4", "5", "7", "8"]
    folder = ROOT / "csrc" / "control" / "tests" / "must_not_compile"
    for number, line in rows:
        (source,) = folder.glob(f"0{number}_*.cc")
        assert line in [text.strip() for text in source.read_text().splitlines()], line
