# SPDX-License-Identifier: Apache-2.0
"""What the compiler must refuse: csrc/control/tests/must_not_compile has one file a promise, with several cases.

CASE 0 of a file is a control that compiles, so that no case can pass because the file is broken. Every other case must
fail, and its first error must be the diagnostic that the comment of the case names. With gcc, and in `make check` and
`make test-full` with clang too. Knows nothing of how the handles work.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

CONTROL = Path(__file__).parents[3] / "csrc" / "control"
FILES = sorted((CONTROL / "tests" / "must_not_compile").glob("*.cc"))
FLAGS = ["-std=c++20", "-Wall", "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable", f"-I{CONTROL}"]
ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"}

# What the first error says: by gcc, by clang.
UNHANDLED = r"static assertion failed.*: a \(state, signal\) pair has no Transitions::on"
DIAGNOSTICS = {
    "deleted": (r"use of deleted function", r"call to (implicitly-)?deleted|selected deleted|uses deleted function"),
    "private": (r"is private within this context", r"calling a private constructor|is a private member"),
    "protected": (r"is protected within this context", r"is a protected member"),
    "no-match": (
        r"no matching function for call|cannot bind rvalue reference",
        r"no matching (member function|function|constructor)|too few arguments",
    ),
    "no-conversion": (
        r"(cannot|could not) convert|conversion from .* to non-scalar type",
        r"no viable conversion|no matching member function",
    ),
    "no-operator": (r"no match for .operator", r"invalid operands to binary expression"),
    "discards-const": (
        r"discards qualifiers|no matching function for call to .*const",
        r"no viable overloaded .=|no matching member function",
    ),
    "unused": (r"ignoring return(ed)? value", r"ignoring return value"),
    "assert": (UNHANDLED, UNHANDLED),
}


@dataclass(frozen=True)
class Case:
    number: int
    tag: str
    names: str


def cases_of(source: Path) -> list[Case]:
    """The cases of a file, each with the comment that says what must be refused."""
    text = source.read_text()
    found = re.findall(r"^#elif CASE == (\d+)\n\s*// (\S+) (\S+): \S", text, re.MULTILINE)
    assert [int(number) for number, *_ in found] == list(range(1, text.count("CASE == "))), source.name
    return [Case(int(number), tag, names) for number, tag, names in found]


@dataclass(frozen=True)
class Compiler:
    path: str
    is_clang: bool
    precompiled: Path

    def check(self, source: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [self.path, *FLAGS[:-1], "-fsyntax-only", *options, FLAGS[-1], str(source)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=ENVIRONMENT)

    def check_case(self, source: Path, number: int) -> subprocess.CompletedProcess[str]:
        include = "-include-pch" if self.is_clang else "-include"
        return self.check(source, f"-DCASE={number}", include, str(self.precompiled))

    def fault_of(self, source: Path, case: Case) -> str | None:
        """What is wrong with how a case fails, or None."""
        done = self.check_case(source, case.number)
        where = f"{source.name} CASE {case.number}"
        if done.returncode == 0:
            return f"{where} compiles"
        first, _, rest = done.stderr.partition("error: ")[2].partition("\n")
        shown = first + rest.partition("error: ")[0]
        if not re.search(DIAGNOSTICS[case.tag][self.is_clang], "error: " + first):
            return f"{where} does not say {case.tag}: {first}"
        return None if case.names in shown else f"{where} does not name {case.names}: {shown}"


@pytest.fixture(scope="module", params=["g++", pytest.param("clang++-19", marks=pytest.mark.slow)])
def compiler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """A compiler of C++20 that is installed, with the headers of the control plane precompiled."""
    found = shutil.which(request.param)
    if found is None and "CI" in os.environ:
        pytest.fail(f"{request.param} is not installed")
    if found is None:
        pytest.skip(f"{request.param} is not installed")
    is_clang = "clang" in request.param
    header = tmp_path_factory.mktemp("headers") / "all.h"
    header.write_text('#include "sequence.h"\n')  # brings in what all cases include
    output = header.with_suffix(".pch") if is_clang else header.with_suffix(".h.gch")
    done = subprocess.run(
        [found, *FLAGS, "-x", "c++-header", str(header), "-o", str(output)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    return Compiler(found, is_clang, output if is_clang else header)


def test_there_is_one_file_a_promise() -> None:
    assert [path.name[:2] for path in FILES] == [f"0{number}" for number in range(1, 9)]
    assert all(len(cases_of(path)) >= 8 for path in FILES)


@pytest.mark.parametrize("source", FILES, ids=lambda path: path.stem)
def test_misuse_does_not_compile(compiler: Compiler, source: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        control = pool.submit(compiler.check_case, source, 0)
        faults = list(pool.map(lambda case: compiler.fault_of(source, case), cases_of(source)))
    assert control.result().returncode == 0, control.result().stderr
    assert [fault for fault in faults if fault is not None] == []


def without_a_pair(name: str, text: str) -> str:
    """transitions.h that lacks what becomes of a held session when its deadline comes."""
    return text.replace("  static To<Done> on(Held&&, X&&);\n", "") if name == "transitions.h" else text


def with_a_state(name: str, text: str) -> str:
    """states.h with a state more."""
    return text.replace("using State = std::variant<", "struct Paused {};\nusing State = std::variant<Paused, ")


def with_a_signal(name: str, text: str) -> str:
    """transitions.h with a signal more."""
    return text.replace("using Signals = TypeList<", "struct Paid {};\nusing Signals = TypeList<Paid, ")


@pytest.mark.parametrize("change", [without_a_pair, with_a_state, with_a_signal])
def test_the_transition_table_itself_must_be_whole(
    compiler: Compiler, change: Callable[[str, str], str], tmp_path: Path
) -> None:
    texts = {name: (CONTROL / name).read_text() for name in ("states.h", "transitions.h")}
    changed = {name: change(name, text) for name, text in texts.items()}
    assert changed != texts
    for name, text in changed.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "unit.cc").write_text('#include "transitions.h"\n')
    done = compiler.check(tmp_path / "unit.cc")
    first = re.search(r"error: .*", done.stderr)
    assert first is not None, "it compiles"
    assert re.search(UNHANDLED, first[0]), done.stderr
