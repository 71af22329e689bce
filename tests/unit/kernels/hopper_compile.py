# SPDX-License-Identifier: Apache-2.0
"""Compiles the device code of an op's solution `gluon` for Hopper, without one, and writes what came of it as JSON, by
name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tokenspeed.kernels.ops.gated_linear import gluon as gated_linear
from tokenspeed.kernels.ops.paged_attention import gluon as paged_attention

Compiled = dict[str, Any]


def compiled(function: Any, constants: Mapping[str, Any], types: Mapping[str, Any]) -> Compiled:
    """As a launch on such a device would."""
    names = [param.name for param in function.params]
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    known = {(place,): constants[name] for place, name in enumerate(names) if name in constants}
    source = GluonASTSource(function, signature, known, {})
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return {"shared": result.metadata.shared, "ptx": result.asm["ptx"], "local_bytes": local_bytes(result.asm["ptx"])}


def local_bytes(ptx: str) -> int:
    """What a thread keeps in memory for want of registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder) / "code.ptx").write_text(ptx)
        command = [tool, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder) / "code.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(number) for number in re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said))


def descriptor_type(matrix: torch.Tensor, descriptor: Any) -> str:
    dtype = "bf16" if matrix.dtype is torch.bfloat16 else "fp16"
    return f"tensordesc<{dtype}{descriptor.block_shape},{descriptor.layout}>"


def of_paged_attention() -> Iterator[tuple[str, Compiled]]:
    """For bf16 and 4 query heads to a K/V head."""
    from tokenspeed.kernels.ops.paged_attention._gluon import _triton

    constants = {
        "SINKS": False, "WINDOW": 0, "HEAD_DIM": 64, "KV_HEADS": 8, "GROUP": 4, "BLOCK_SIZE": 64, "BLOCK_R": 4,
        "HALF_M": paged_attention.HALF_M, "HALF_T": paged_attention.HALF_T, "STAGES": paged_attention.STAGES,
        "MERGE_M": paged_attention.MERGE_M, "sinks": None,
    }  # fmt: skip
    pages = torch.empty(1, 64, 1, 64, dtype=torch.bfloat16)
    types = {
        **dict.fromkeys(("q", "out"), "*bf16"),
        **dict.fromkeys(("partial_acc", "partial_stats"), "*fp32"),
        **dict.fromkeys(("next_item", "query_start", "seq_lens", "tables"), "*i32"),
        **dict.fromkeys(("k_pool", "v_pool"), descriptor_type(pages, paged_attention.descriptor(pages))),
        "q_strides": ("i32", "i32"),
        "scale": "fp32",
    }
    yield "extend", compiled(_triton.extend, constants, types)
    yield "merge", compiled(_triton.merge, constants, types)


def of_gated_linear() -> Iterator[tuple[str, Compiled]]:
    """At the sizes of an 8B decoder."""
    from tokenspeed.kernels.ops.gated_linear._gluon import _triton

    plan = gated_linear.PLAN
    for name, dtype, is_biased in (("plain", torch.bfloat16, False), ("biased", torch.float16, True)):
        matrix = torch.empty(128, 128, dtype=dtype)
        boxes = {"x": (gated_linear.PART_M, gated_linear.STEP_K), "weight": (gated_linear.TILE_N, gated_linear.STEP_K),
                 "out": (gated_linear.PART_M, gated_linear.TILE_N)}  # fmt: skip
        types = {key: descriptor_type(matrix, gated_linear.descriptor(matrix, *box)) for key, box in boxes.items()}
        constants = {
            "NUM_N": 96, "NUM_STEPS": 64, "GROUP": plan.group, "STAGES": plan.stages,
            "SKEW": plan.skew, "HAS_BIAS": is_biased, "GELU": is_biased,
            **({} if is_biased else {"bias": None}),
        }  # fmt: skip
        types["bias"] = "*fp16"
        yield name, compiled(_triton.product, constants, types)


if __name__ == "__main__":
    print(json.dumps(dict({"paged_attention": of_paged_attention, "gated_linear": of_gated_linear}[sys.argv[1]]())))
