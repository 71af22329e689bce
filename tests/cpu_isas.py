# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that the compiled CPU kernels have on this machine, each to be tested in its turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tokenspeed.core.config import forced_cpu_isa
from tokenspeed.kernels.platform import cpu_module, require_cpu_module


def isas() -> list[str]:
    """Those to be tested: all, or the one that TOKENSPEED_CPU_ISA names; none where the kernels are not built."""
    module = cpu_module()
    if module is None:
        return []
    return list(module.isas()) if forced_cpu_isa() is None else [module.isa()]


@contextlib.contextmanager
def chosen(isa: str) -> Iterator[None]:
    """The kernels use that instruction set for a while."""
    module = require_cpu_module()
    before = module.isa()
    assert module.choose_isa(isa), isa
    yield
    module.choose_isa(before)
