# SPDX-License-Identifier: Apache-2.0
"""What a layer is given while a model is being built: where it lives and which kernels it gets.

Ops are bound here once and never on the launch path. Knows no op.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tokenspeed.kernels.registry import BoundKernel, Kernel, KernelContext, bind, check_overrides


class BuildContext:
    """Device, dtype and kernels of one model. `bindings` is the table of what was bound so far, by op."""

    def __init__(self, device: str, dtype: torch.dtype, overrides: Mapping[str, str] | None = None) -> None:
        self.device = device
        self.dtype = dtype
        self.kernels = KernelContext(device=device, dtype=dtype, overrides=dict(overrides or {}))
        self.bindings: dict[str, BoundKernel] = {}
        check_overrides(self.kernels.overrides)

    def bind(self, op: str) -> Kernel:
        """The callable of `op`; the same one for every layer of the model. ConfigError as in registry.bind."""
        if op not in self.bindings:
            self.bindings[op] = bind(op, self.kernels)
        return self.bindings[op].call

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """A parameter of the model's dtype whose values the loader fills in."""
        return torch.nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)
