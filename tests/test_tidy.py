# SPDX-License-Identifier: Apache-2.0
"""The package is tidy, and each rule of tests/tidy.py is shown to catch its fault."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tidy import FILE_LINES_MAX, FUNCTION_LINES_MAX, faults

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tokenspeed"
HEADER = '# SPDX-License-Identifier: Apache-2.0\n"""A room."""\n'


def test_package_is_tidy() -> None:
    found = [
        fault
        for path in sorted(PACKAGE.rglob("*.py"))
        for fault in faults(path.relative_to(PACKAGE).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("engine/utils.py", HEADER, "no room"),
        ("engine/step.py", '"""A room."""\n', "SPDX"),
        ("engine/step.py", "# SPDX-License-Identifier: Apache-2.0\nx = 1\n", "docstring"),
        ("engine/step.py", HEADER + "x = 1\n" * FILE_LINES_MAX, "at most"),
        ("engine/step.py", HEADER + "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX, "f has"),
        ("layers/norm.py", HEADER + "import torch.distributed as dist\n", "spmd"),
        ("layers/norm.py", HEADER + "def f(tp_rank): return tp_rank\n", "spmd"),
        ("layers/norm.py", HEADER + 'x = "flashinfer"\n', "vendor"),
        ("execution/sampler.py", HEADER + "from x import LlamaForCausalLM\n", "family"),
        ("engine/step.py", HEADER + "import asyncio\n", "asyncio"),
        ("llm/llm.py", HEADER + 'import os\nx = os.environ["A"]\n', "environment"),
        ("engine/step.py", HEADER + 'x = hasattr(1, "a")\n', "hasattr"),
        ("engine/step.py", HEADER + "print(1)\n", "print"),
        ("engine/step.py", HEADER + "try:\n    x = 1\nexcept:\n    x = 2\n", "bare except"),
    ],
)
def test_each_rule_catches_its_fault(path: str, text: str, expected: str) -> None:
    assert any(expected in fault for fault in faults(path, text)), list(faults(path, text))


def test_the_api_process_is_torch_free() -> None:
    code = "import sys, tokenspeed.server.app, tokenspeed.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_links_of_the_documents_lead_somewhere() -> None:
    dead = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith(("http:", "https:", "mailto:")) and not (page.parent / target).exists():
                dead.append(f"{page.relative_to(ROOT)} → {target}")
    assert not dead, "\n".join(dead)


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        requirements += extra
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    names = [re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements]
    assert not [name for name in names if f"`{name}`" not in reasons]
    assert not [requirement for requirement in requirements if "<" not in requirement], "pinned ranges only"
