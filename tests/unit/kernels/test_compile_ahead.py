# SPDX-License-Identifier: Apache-2.0
"""Compiling ahead, with launches that only say what they were asked for."""

from __future__ import annotations

import importlib
import importlib.util
import threading

import pytest

from tokenspeed.kernels.compile_ahead import compiled_ahead

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


class Launches:
    """Stands for JITFunction."""

    def __init__(self) -> None:
        self.warmups: list[bool] = []

    def run(self, *, grid: object, warmup: bool) -> None:
        del grid
        self.warmups.append(warmup)

    def _do_compile(self) -> None:
        """Nothing is compiled here; a GPU's tests do."""


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(importlib.import_module("triton.runtime.jit"), "JITFunction", Launches)
    return Launches()


def test_only_compiles_within_and_launches_after(function: Launches) -> None:
    with compiled_ahead(1):
        function.run(grid=(1,), warmup=False)
    function.run(grid=(1,), warmup=False)
    assert function.warmups == [True, False]


def test_another_thread_launches_meanwhile(function: Launches) -> None:
    with compiled_ahead(1):
        other = threading.Thread(target=lambda: function.run(grid=(1,), warmup=False))
        other.start()
        other.join()
    assert function.warmups == [False]


def test_launches_again_after_an_error(function: Launches) -> None:
    with pytest.raises(ZeroDivisionError), compiled_ahead(1):
        raise ZeroDivisionError
    function.run(grid=(1,), warmup=False)
    assert function.warmups == [False]
