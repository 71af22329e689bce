# SPDX-License-Identifier: Apache-2.0
"""Attention for Hopper where there is none: who is turned away and why, and device code that compiles for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed.kernels.ops.paged_attention import FP8_PAGES, gluon
from tokenspeed.kernels.registry import KernelContext, Ok, Reason

SHARED_MEMORY_BYTES = 227 * 1024
HOPPER = KernelContext("cuda", torch.bfloat16)

IS_INSTALLED = importlib.util.find_spec("triton") is not None
HAS_LANGUAGE = IS_INSTALLED and importlib.metadata.version("triton").startswith(f"{gluon.TRITON_VERSION}.")

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs Triton")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device of some compute capability, and a version of Triton."""

    def pretend(capability: tuple[int, int], version: str = "3.6.0") -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)

    return pretend


def test_is_for_hopper_alone(on: Any) -> None:
    on((9, 0))
    assert isinstance(gluon.supports(HOPPER), Ok)
    for capability in ((8, 0), (10, 0), (12, 0)):
        on(capability)
        assert gluon.supports(HOPPER) == Reason("its device code is for compute capability 9")
    assert isinstance(gluon.supports(KernelContext("cpu", torch.bfloat16)), Reason)


def test_is_for_the_version_of_the_language_that_it_is_written_in(on: Any) -> None:
    on((9, 0), "3.7.1")
    assert gluon.supports(HOPPER) == Reason("triton is 3.7.1, not 3.6")


def test_is_for_16_bit_numbers(on: Any) -> None:
    on((9, 0))
    assert gluon.supports(KernelContext("cuda", torch.float32)) == Reason("torch.float32 is not bfloat16 or float16")
    assert FP8_PAGES in gluon.SOLUTION.features  # which go the way of `triton`


@pytest.mark.skipif(not HAS_LANGUAGE, reason="needs the Triton that the device code is written in")
def test_compiles_for_hopper() -> None:
    """In a process of its own, since here Triton interprets."""
    compiles = [sys.executable, str(Path(__file__).with_name("hopper_compile.py")), "paged_attention"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(compiles, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found["extend"]["shared"] <= SHARED_MEMORY_BYTES
    assert found["extend"]["ptx"].count("setmaxnreg.inc") >= 2  # warps that attend have the registers of others
    assert "wgmma.mma_async" in found["extend"]["ptx"]
    assert "cp.async.bulk.tensor" in found["extend"]["ptx"]
    assert found["merge"]["shared"] <= SHARED_MEMORY_BYTES
