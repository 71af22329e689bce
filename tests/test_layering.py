# SPDX-License-Identifier: Apache-2.0
"""Import contracts hold, and a wrong import of each class is seen to break its contract."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

WRONG_IMPORTS = {
    "Floors": ("core/request.py", "import tokenspeed.llm.outputs"),
    "Floors, type-checking only": (
        "observability/__init__.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tokenspeed.llm.outputs",
    ),
    "Floors, inside a function": ("core/request.py", "def late() -> None:\n    import tokenspeed.llm.outputs"),
    "Floors, control and execution": ("control/__init__.py", "import tokenspeed.execution"),
    "Floors, a room without a floor": ("attic/__init__.py", "x = 1"),
    "No circles": ("core/errors.py", "import tokenspeed.core.config"),
    "Models do not know": ("models/llama.py", "import tokenspeed.models.qwen2"),
    "Kernel ops do not know": ("kernels/ops/rms_norm/__init__.py", "import tokenspeed.kernels.ops.rotary"),
    "A leaf is reached": ("execution/__init__.py", "import tokenspeed.models.llama"),
    "The control plane and the API process": ("server/app.py", "import torch"),
    "The server reaches": ("server/app.py", "import tokenspeed.engine.process"),
    "Models speak layers": ("models/llama.py", "import tokenspeed.kernels.registry"),
}


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package below `root`/src."""
    script = (
        f"import sys; sys.path.insert(0, {str(root / 'src')!r})\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'ScikitBuildRedirectingFinder']\n"
        "from importlinter.cli import lint_imports\n"
        f"sys.exit(lint_imports(config_filename={str(ROOT / 'pyproject.toml')!r}, no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=lambda _, names: [n for n in names if n in ("__pycache__",)])
    return tmp_path


def test_contracts_hold(tree: Path) -> None:
    done = lint(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("contract", WRONG_IMPORTS)
def test_a_wrong_import_breaks_its_contract(tree: Path, contract: str) -> None:
    name, line = WRONG_IMPORTS[contract]
    path = tree / "src" / "tokenspeed" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + "\n" + line + "\n")
    done = lint(tree)
    assert done.returncode != 0, f"not noticed: {line}"
    broken = [line for line in done.stdout.splitlines() if line.rstrip().endswith("BROKEN")]
    assert [line for line in broken if line.startswith(contract.split(",", maxsplit=1)[0])], done.stdout + done.stderr
