# SPDX-License-Identifier: Apache-2.0
"""The persistent decode step on a CPU: its device code, compiled as C++ against emulated_cuda.hpp, run by the same
Python as on a GPU."""

from __future__ import annotations

import ctypes
import struct
import subprocess
from pathlib import Path

import torch

from tokenspeed.kernels.ops.decode_step import DecodeStep, DenseModel, Prepare, _persistent
from tokenspeed.kernels.registry import Reason

SHARED_MEMORY = 227 << 10
ENTRY = """
extern "C" int emulate(const Params* params, unsigned seed) {
  return emulated::run(NUM_BLOCKS, CONSUMERS + 32, CONSUMERS, MEMORY, seed, [=] { decode_step(*params); });
}
"""


def emulated(folder: Path, num_blocks: int, slot: int | None = None) -> Prepare:
    """A Prepare whose steps run on num_blocks emulated processors. folder: for what is compiled."""

    def prepare(model: DenseModel, max_rows: int) -> DecodeStep | Reason:
        why_not = _persistent.refusal(model, num_blocks)
        if why_not is not None:
            return Reason(why_not)
        constants = _persistent.constants_of(model, num_blocks, SHARED_MEMORY, slot)
        library, seeds = _compiled(folder, constants), iter(range(1 << 20))

        def launch(_num_blocks: int, _num_threads: int, params: ctypes.Structure) -> None:
            assert library.emulate(ctypes.byref(params), next(seeds)), "the step hangs"

        return _persistent.PersistentStep(model, constants, launch, _map)

    return prepare


def _compiled(folder: Path, constants: _persistent.Constants) -> ctypes.CDLL:
    machine = Path(__file__).with_name("emulated_cuda.hpp").read_text()
    code, library = folder / "step.cc", folder / "step.so"
    code.write_text("\n".join([machine, *_persistent.device_code()[1:], ENTRY]))
    macros = [f"-D{name}={value}" for name, value in constants.macros().items()]
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", *macros, "-o", str(library), str(code)],
        check=True,
        timeout=120,
    )
    return ctypes.CDLL(str(library))


def _map(pages: torch.Tensor, num_tokens: int) -> bytes:
    page_stride, token_stride, head_stride, _ = pages.stride()
    return struct.pack("<5q", pages.data_ptr(), page_stride, token_stride, head_stride, num_tokens)
