# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at most, measured: bytes read and operations of a matrix product, in a second.

A floor is what a call must read or compute over these. As a program it prints them as JSON, so that a process that
measures an engine need not hold memory of the GPU itself. Knows no model and no kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
from typing import get_args

import torch

from tokenspeed.bench.clock import Call, Clock, clock_of
from tokenspeed.bench.floor import Ceilings
from tokenspeed.core.config import Device, DType

_MATRIX_SIZE = 8192
_CPU_MATRIX_SIZE = 1024
_READ_BYTES_MAX = 8 << 30
_CPU_READ_BYTES = 256 << 20
_NUM_READS = 8


def measure(device: str, dtype: torch.dtype) -> Ceilings:
    """Medians of a read of memory far larger than any cache, and of a large matrix product in `dtype`."""
    if torch.device(device).type == "cuda":
        return _measure_cuda(dtype)
    x_N = torch.ones(_CPU_READ_BYTES // 4)
    a_NN = torch.randn(_CPU_MATRIX_SIZE, _CPU_MATRIX_SIZE).to(dtype)
    clock = clock_of(device)
    read_s = _median_s(x_N.sum, _NUM_READS, clock)
    product_s = _median_s(lambda: a_NN @ a_NN, _NUM_READS, clock)
    name = f"{torch.get_num_threads()} CPU threads"
    return Ceilings(name, _CPU_READ_BYTES / read_s, 2 * _CPU_MATRIX_SIZE**3 / product_s, _CPU_READ_BYTES)


def _measure_cuda(dtype: torch.dtype) -> Ceilings:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_bytes, _ = torch.cuda.mem_get_info()
    num_bytes = min(_READ_BYTES_MAX, free_bytes // 2) // (1 << 20) * (1 << 20)
    read_s = _cuda_read_s(num_bytes // 4, properties.multi_processor_count)
    product_s = _cuda_product_s(dtype)
    torch.cuda.empty_cache()
    return Ceilings(properties.name, num_bytes / read_s, 2 * _MATRIX_SIZE**3 / product_s, properties.L2_cache_size)


def _cuda_read_s(size: int, num_processors: int) -> float:
    """To read `size` elements of four bytes."""
    x_N = torch.randint(-(1 << 31), (1 << 31) - 1, (size,), dtype=torch.int32, device="cuda")
    if importlib.util.find_spec("triton") is None:
        return _median_s(x_N.view(torch.float32).amax, _NUM_READS, clock_of("cuda"))
    from tokenspeed.bench._read import read_seconds

    return read_seconds(x_N, num_processors, _NUM_READS)


def _cuda_product_s(dtype: torch.dtype) -> float:
    a_NN, b_NN = torch.randn(2, _MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype, device="cuda")
    return _median_s(lambda: a_NN @ b_NN.T, 30, clock_of("cuda"))


def _median_s(call: Call, num_calls: int, clock: Clock) -> float:
    """The median time of a call after some that warm up."""
    return statistics.median([clock(call) for _ in range(num_calls + 3)][3:])


def main(arguments: list[str] | None = None) -> int:
    """Print the ceilings of the device that an engine with these settings would take."""
    parser = argparse.ArgumentParser(prog="tokenspeed.bench.ceilings")
    parser.add_argument("--device", choices=get_args(Device), default="auto")
    parser.add_argument("--dtype", choices=get_args(DType), default="auto")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available() and options.device != "cpu"
    default = torch.bfloat16 if has_gpu else torch.float32
    dtype = default if options.dtype == "auto" else getattr(torch, options.dtype)
    ceilings = measure("cuda" if has_gpu else "cpu", dtype)
    print(json.dumps({"is_gpu": has_gpu, **dataclasses.asdict(ceilings)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
