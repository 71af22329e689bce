# SPDX-License-Identifier: Apache-2.0
"""Compiles the device code of paged_attention's solution `gluon` for Hopper, without one, and writes what came of it
as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed.kernels.ops.paged_attention import gluon
from tokenspeed.kernels.ops.paged_attention._gluon import _triton

CONSTANTS = {
    "SINKS": False, "WINDOW": 0, "HEAD_DIM": 64, "KV_HEADS": 8, "GROUP": 4, "BLOCK_SIZE": 64, "BLOCK_R": 4,
    "HALF_M": gluon.HALF_M, "HALF_T": gluon.HALF_T, "STAGES": gluon.STAGES,
    "MERGE_M": gluon.MERGE_M, "sinks": None,
}  # fmt: skip
LAYOUT = gluon.descriptor(torch.empty(1, 64, 1, 64, dtype=torch.bfloat16)).layout
TYPES = {
    **dict.fromkeys(("q", "out"), "*bf16"),
    **dict.fromkeys(("partial_acc", "partial_stats"), "*fp32"),
    **dict.fromkeys(("next_item", "query_start", "seq_lens", "tables"), "*i32"),
    **dict.fromkeys(("k_pool", "v_pool"), f"tensordesc<bf16[{gluon.HALF_T}, {gluon.PANEL}],{LAYOUT}>"),
    "q_strides": ("i32", "i32"),
    "scale": "fp32",
}


def compiled(function: Any) -> dict[str, Any]:
    """As a launch on such a device would, for bf16 and 4 query heads to a K/V head."""
    names = [param.name for param in function.params]
    signature = {name: "constexpr" if name in CONSTANTS else TYPES.get(name, "i32") for name in names}
    known = {(place,): CONSTANTS[name] for place, name in enumerate(names) if name in CONSTANTS}
    source = GluonASTSource(function, signature, known, {})
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return {"shared": result.metadata.shared, "ptx": result.asm["ptx"]}


if __name__ == "__main__":
    print(json.dumps({"extend": compiled(_triton.extend), "merge": compiled(_triton.merge)}))
