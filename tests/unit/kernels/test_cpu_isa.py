# SPDX-License-Identifier: Apache-2.0
"""TOKENSPEED_CPU_ISA chooses the instruction set of the CPU kernels; one that this machine lacks is refused by naming
those that it has."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tokenspeed import cli
from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels import platform
from tokenspeed.kernels.registry import KernelContext, bind

pytestmark = pytest.mark.skipif(platform.cpu_module() is None, reason="the compiled CPU kernels are not built")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    module = platform.require_cpu_module()
    isa = module.isa()
    platform.cpu_module.cache_clear()
    yield
    platform.cpu_module.cache_clear()
    assert module.choose_isa(isa)


def test_the_best_one_is_used_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENSPEED_CPU_ISA", raising=False)
    module = platform.require_cpu_module()
    assert module.isas()[-1] == "portable"
    assert module.choose_isa(module.isas()[0])
    found = platform.describe()
    assert (found.cpu_isa, found.is_cpu_isa_forced) == (module.isas()[0], False)


@pytest.mark.parametrize("isa", platform.require_cpu_module().isas() if platform.cpu_module() else [])
def test_doctor_shows_the_one_that_is_named(
    isa: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENSPEED_CPU_ISA", isa)
    assert cli.main(["doctor"]) == 0
    assert f"{isa}, as TOKENSPEED_CPU_ISA says" in capsys.readouterr().out
    assert platform.require_cpu_module().isa() == isa


@pytest.mark.parametrize("isa", ["base", "AVX2", "avx512fp16"])
def test_another_is_refused(isa: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = ", ".join(platform.require_cpu_module().isas())
    platform.cpu_module.cache_clear()
    monkeypatch.setenv("TOKENSPEED_CPU_ISA", isa)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == f"error: TOKENSPEED_CPU_ISA={isa}: this machine runs {names}\n"
    with pytest.raises(ConfigError, match="this machine runs"):
        bind("linear", KernelContext("cpu", torch.float32))


def test_without_the_compiled_module_there_is_none_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_CPU_ISA", "portable")
    monkeypatch.setitem(sys.modules, "tokenspeed.kernels._cpu", None)
    with pytest.raises(ConfigError, match="is not built"):
        platform.cpu_module()
