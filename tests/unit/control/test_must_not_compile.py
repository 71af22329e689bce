# SPDX-License-Identifier: Apache-2.0
"""What the compiler must refuse: each case of csrc/control/tests/must_not_compile fails with the expected diagnostic.

CASE 0 of each file is a control that compiles, so that a case cannot pass because the file is broken.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CONTROL = Path(__file__).parents[3] / "csrc" / "control"

# (file, case): what the first error of gcc, or of clang, must say.
DELETED = r"use of deleted function|call to deleted constructor|call to implicitly-deleted copy constructor"
PRIVATE = r"is private within this context|private constructor|is a private member|calling a private"
NO_MATCH = r"no matching function|no matching member function|too few arguments"
MISMATCH = r"(cannot|could not) convert|no viable conversion"
UNUSED = r"ignoring return(ed)? value|nodiscard"
CASES = {
    ("pages", 1): DELETED,
    ("pages", 2): r"cannot bind rvalue reference|no matching member function|rvalue reference to type",
    ("pages", 3): NO_MATCH,
    ("pages", 4): PRIVATE,
    ("pages", 5): DELETED,
    ("pages", 6): r"conversion from .* to non-scalar type|no viable conversion",
    ("pages", 7): PRIVATE,
    ("pages", 8): UNUSED,
    ("pages", 9): MISMATCH,
    ("pages", 10): DELETED,
    ("pages", 11): MISMATCH,
    ("states", 1): NO_MATCH,
    ("states", 2): PRIVATE,
    ("states", 3): PRIVATE,
    ("states", 4): PRIVATE,
    ("states", 5): DELETED,
    ("states", 6): UNUSED,
    ("states", 7): MISMATCH,
}


@pytest.fixture(scope="module", params=["g++", "clang++-19"])
def compiler(request: pytest.FixtureRequest) -> str:
    """A compiler of C++20 that is installed."""
    found = shutil.which(request.param)
    if found is None and "CI" in os.environ:
        pytest.fail(f"{request.param} is not installed")
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    return found


def compile_case(compiler: str, name: str, case: int) -> subprocess.CompletedProcess[str]:
    source = CONTROL / "tests" / "must_not_compile" / f"{name}.cc"
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Werror", "-Wno-unused-variable"]
    return subprocess.run(
        [*command, f"-DCASE={case}", f"-I{CONTROL}", str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"LC_ALL": "C", "PATH": "/usr/bin:/bin:/usr/local/bin"},
    )


@pytest.mark.parametrize("name", ["pages", "states"])
def test_the_control_case_compiles(compiler, name):
    done = compile_case(compiler, name, 0)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "case"), CASES)
def test_misuse_does_not_compile(compiler, name, case):
    done = compile_case(compiler, name, case)
    assert done.returncode != 0
    first = re.search(r"error: .*", done.stderr)
    assert first is not None, done.stderr
    assert re.search(CASES[name, case], first[0]), done.stderr
