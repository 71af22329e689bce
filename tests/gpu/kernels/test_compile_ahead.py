# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead on a CUDA device: nothing is computed meanwhile, and nothing is compiled afterwards."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.compile_ahead import compiled_ahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_compiles_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    from tokenspeed.kernels.ops.silu_mul.triton import build
    from tokenspeed.kernels.registry import KernelContext

    op = build(KernelContext("cuda", torch.bfloat16))
    inputs = [
        torch.randn(rows, 2 * width, device="cuda", dtype=torch.bfloat16) for rows in (1, 7) for width in (64, 96)
    ]
    expected = [each.float().chunk(2, -1) for each in inputs]
    with compiled_ahead(4):
        for each in inputs:
            op(each)

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("compiled although it was compiled ahead")

    monkeypatch.setattr(JITFunction, "_do_compile", refuse)
    for each, (gate, up) in zip(inputs, expected, strict=True):
        torch.testing.assert_close(op(each).float(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=2e-2)
