# SPDX-License-Identifier: Apache-2.0
"""What a model would be as one of several ranks, told without any of them: memory of a rank, and the plan of a step.

Builds the model without storage, from its configuration alone. Knows no weights, no processes and no devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tokenspeed.core.config import DType, ParallelConfig
from tokenspeed.execution.forward import plan_of
from tokenspeed.execution.placement import dtype_name, resolve_dtype
from tokenspeed.layers.build import ONE_RANK, BuildContext
from tokenspeed.models import CausalLM, resolve
from tokenspeed.spmd.mesh import Group, GroupSizes, Mesh

_QUANTISED = "quantization_config"
_DEVICE = torch.device("meta")
"""Tensors there have a shape and no storage."""


def sharding_report(name: str, config: Mapping[str, object], dtype: DType, parallel: ParallelConfig) -> str:
    """The report, for people. name: of the model, for the first line. dtype: auto is what a GPU would take; weights
    that the checkpoint has quantised are counted in it, whether or not such a checkpoint can be served. ConfigError
    for sizes that do not nest or do not divide the model, UnsupportedModelError and CheckpointError as in building."""
    mesh = Mesh.of(
        GroupSizes.of(parallel.tp, attention_dp=parallel.dp_attention, ep=parallel.ep, moe_tp=parallel.moe_tp)
    )
    config = {name: value for name, value in config.items() if name != _QUANTISED}  # sizes are those of the dtype
    family, resolved = resolve(config), resolve_dtype(dtype, _DEVICE, config)
    ctx = BuildContext(str(_DEVICE), resolved, mesh=mesh)
    model = family.build(config, ctx)
    whole = model if mesh == ONE_RANK else family.build(config, BuildContext(str(_DEVICE), resolved))
    plan = plan_of(model, ctx)
    rows = (
        ("model", f"{name} ({family.model_type}) in {dtype_name(resolved)}"),
        ("ranks", _ranks(mesh)),
        ("weights", f"{_mib(weight_bytes(model))} MiB a rank, {_mib(weight_bytes(whole))} MiB in one piece"),
        ("K/V", _kv(kv_token_bytes(model, ctx), kv_token_bytes(whole, ctx), mesh)),
        ("plan", f"digest {plan.digest()}"),
    )
    head = "".join(f"{label:<9}{text}\n" for label, text in rows)
    return f"{head}\n{plan.text()}"


def weight_bytes(model: CausalLM) -> int:
    """Bytes of the parameters of a rank: all ranks have parts of equal size."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def kv_token_bytes(model: CausalLM, ctx: BuildContext) -> int:
    """Bytes that a rank keeps for a token that every layer can see."""
    return sum(spec.token_bytes(ctx.kv_dtype) for spec in model.kv_specs)


def _ranks(mesh: Mesh) -> str:
    sizes = mesh.sizes
    split = f"--tp {sizes.attention_tp} --dp-attention {sizes.attention_dp} --ep {sizes.ep} --moe-tp {sizes.moe_tp}"
    return f"{mesh.num_ranks}: {split}"


def _kv(token_bytes: int, whole_bytes: int, mesh: Mesh) -> str:
    """What a token takes on a rank, and how often its request's ranks have it."""
    num_ranks = mesh.size_of(mesh.axes_of(Group.ATTENTION))
    holders = "1 rank a request holds" if num_ranks == 1 else f"{num_ranks} ranks a request hold"
    num_copies = token_bytes * num_ranks / whole_bytes
    copies = "1 copy" if math.isclose(num_copies, 1) else f"{num_copies:g} copies"
    return f"{token_bytes:,} bytes a token a rank; {holders} {copies} of it"


def _mib(num_bytes: int) -> str:
    mib = num_bytes / 2**20
    return f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"
