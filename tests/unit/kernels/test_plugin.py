# SPDX-License-Identifier: Apache-2.0
"""The example of a kernel plugin, installed as a user would: it joins the conformance suite, and may be chosen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "kernel_plugin"
SAY_WHAT_IS_BOUND = """
import sys, torch
from tokenspeed.cli.flags import _override
from tokenspeed.kernels.registry import KernelContext, bind
for overrides in ([], *([argument] for argument in sys.argv[1:])):
    bound = bind("silu_mul", KernelContext("cpu", torch.float32, dict(map(_override, overrides))))
    print(bound.solution, bound.passed_over)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the plugin. Nothing is fetched."""
    folder = tmp_path_factory.mktemp("plugin")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    run([*command, "--no-build-isolation", "--target", str(folder), str(EXAMPLE)], dict(os.environ))
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_joins_the_conformance_suite(environment: dict[str, str]) -> None:
    suite = "tests/unit/kernels/test_conformance.py"
    out = run(
        [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", suite, "-k", "silu_mul and gated"],
        environment,
    )
    passed = set(re.findall(r"(test_\w+)\[silu_mul-gated-(\w+)\] PASSED", out))
    names = ("test_agrees_with_the_reference", "test_keeps_its_promises_of_determinism_and_batch_invariance")
    assert {(name, dtype) for name in names for dtype in ("float32", "bfloat16")} <= passed, out
    assert "skipped" not in out


def test_it_is_bound_unless_another_is_chosen(environment: dict[str, str]) -> None:
    script = [sys.executable, "-c", SAY_WHAT_IS_BOUND, "silu_mul=gated", "silu_mul=reference"]
    free, chosen, other = run(script, environment).splitlines()
    assert free.startswith("gated ")
    assert chosen.startswith("gated ")
    assert other.startswith("reference ")
    assert "('gated', 'overridden by silu_mul=reference')" in other
