# SPDX-License-Identifier: Apache-2.0
"""What a layer is given while a model is being built: where it lives, which rank it is and which kernels it gets.

Ops are bound here once and never on the launch path. Knows no op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from tokenspeed.kernels.registry import Band, BoundKernel, Kernel, KernelContext, bind, check_overrides
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh
from tokenspeed.spmd.shards import WHOLE, Cut, Shards

ONE_RANK = Mesh.of(GroupSizes())


class BuildContext:
    """Device, dtype and kernels of one rank of a model. `bindings` is the table of what was bound so far, by op and
    features. kv_dtype: of K and V in pages, None for the model's; settled before the first layer is built.
    deterministic: results are to be the same bits whatever else a step computes. `host_bound` names parts of the model
    that look at numbers of the device while they compute, so that no graph can be captured of them."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        overrides: Mapping[str, str] | None = None,
        mesh: Mesh = ONE_RANK,
        rank: int = 0,
        *,
        kv_dtype: torch.dtype | None = None,
        deterministic: bool = False,
    ) -> None:
        self.device = device
        self.dtype = dtype
        self.kv_dtype = kv_dtype or dtype
        self.mesh, self.rank = mesh, rank
        self.kernels = KernelContext(
            device=device, dtype=dtype, overrides=dict(overrides or {}), batch_invariant=deterministic
        )
        self.bindings: dict[str, BoundKernel] = {}
        self.host_bound: set[str] = set()
        check_overrides(self.kernels.overrides)

    def bind(self, op: str, *features: str) -> Kernel:
        """The callable of `op` that has these features; the same one for every layer of the model that asks alike.
        ConfigError as in registry.bind."""
        key = "+".join((op, *sorted(features)))
        if key not in self.bindings:
            self.bindings[key] = bind(op, dataclasses.replace(self.kernels, features=frozenset(features)))
        return self.bindings[key].call

    def bind_better(self, op: str) -> Kernel | None:
        """`op` as `bind` gives it, or None, and nothing in the table, where that is its reference: for a layer that has
        another way of computing the same. ConfigError as in registry.bind."""
        if op not in self.bindings:
            bound = bind(op, self.kernels)
            if bound.traits.band is Band.REFERENCE:
                return None
            self.bindings[op] = bound
        return self.bindings[op].call

    def uncapturable(self) -> list[str]:
        """What of the model cannot be captured as a graph, by name: ops as they are bound, and parts of layers."""
        ops = {each.op for each in self.bindings.values() if not each.traits.graph_safe}
        return sorted(ops | self.host_bound)

    def size_of(self, group: Group) -> int:
        """Ranks over which a group's weights are split."""
        return self.mesh.size_of(self.mesh.axes_of(group))

    def cut(self, name: str, shape: tuple[int, ...], shards: Shards = WHOLE) -> Cut:
        """This rank's part of a tensor. ConfigError, naming it and sizes that would work, when it does not divide."""
        shards.check(name, shape, self.mesh)
        return shards.part(shape, self.mesh, self.rank)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """A parameter whose values the loader fills in, of the model's dtype unless it needs one of its own."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(tensor, requires_grad=False)
