# SPDX-License-Identifier: Apache-2.0
"""The page of the Python interface: what it shows runs, and what it lists is all there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from scripted import write_scripted_model
from tokenspeed import AsyncLLM
from tokenspeed.core import errors
from tokenspeed.llm.llm import _PARTS, LLM

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SAYS = {1: "ok stop", 2: "['ok', 'ok']", 3: '{"city": "Oslo"}', 4: "tokens of the prompt were there", 5: "temperature"}

FOR_THE_SERVER = {"num_restarts", "tell_stacks", "watch_cache"}


@pytest.mark.parametrize("number", range(1, len(SNIPPETS) + 1))
def test_a_snippet_runs(number: int, tmp_path: Path) -> None:
    replies = [("Name a city", '{"city": "Oslo"}'), ("", "ok")]
    model = write_scripted_model(tmp_path / "model", replies)
    text = SNIPPETS[number - 1].replace('"smollm2-135m"', f'"{model}", load_format="scripted"')
    program = tmp_path / "program.py"
    program.write_text(text)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert SAYS[number] in done.stdout
    comments = [line.partition("# ")[2] for line in text.splitlines() if "print(" in line and "# " in line]
    for comment in comments:
        assert comment in done.stdout
    if number == 4:
        assert int(done.stdout.split()[0]) > 0, "the turn before was found"


def test_every_option_is_on_the_page_with_its_default() -> None:
    part = PAGE.partition("\n## Options\n")[2].partition("\n## ")[0]
    written = dict(re.findall(r"^\| `(\w+)` \| `(.+)` \|$", part, re.MULTILINE))
    known = {field.name: repr(field.default) for kind in _PARTS.values() for field in msgspec.structs.fields(kind)}
    assert written == {**known, "debug": "False"}


def test_every_error_and_method_is_on_the_page() -> None:
    names = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {name for name in names if f"`{name}`" not in PAGE} == set()
    for kind in (LLM, AsyncLLM):
        public = {name for name in vars(kind) if not name.startswith("_")} - {
            "num_restarts",
            "tell_stacks",
            "watch_cache",
        }
        assert {name for name in public if not re.search(rf"`[^`\n]*\b{name}\b", PAGE)} == set(), kind
