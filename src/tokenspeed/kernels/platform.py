# SPDX-License-Identifier: Apache-2.0
"""What this machine offers to kernels: processors, instruction sets, the compiled CPU module, CUDA devices.

Knows the machine. Does not know which op wants what.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType

import torch

from tokenspeed.core.config import forced_cpu_isa
from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels.registry import KernelContext, Ok, Reason, Support

CPU_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""dtypes of the compiled CPU kernels and their codes there."""

CPU_PAGE_DTYPES = {**CPU_DTYPES, torch.int8: 2}
"""The same of pages of K and V."""


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes of the Triton kernels."""


@dataclass(frozen=True, slots=True)
class Platform:
    """cpu_isa: instruction set that the compiled CPU kernels use, None where the module is not built.
    is_cpu_isa_forced: whether the environment names it. cuda_devices: names of the CUDA devices, empty without one."""

    num_cpus: int
    cpu_isa: str | None
    is_cpu_isa_forced: bool
    cuda_devices: tuple[str, ...]


def describe() -> Platform:
    """What the machine offers now. Raises ConfigError, as cpu_module."""
    module = cpu_module()
    names: tuple[str, ...] = ()
    if torch.cuda.is_available():
        names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    isa = None if module is None else str(module.isa())
    return Platform(num_cpus(), isa, forced_cpu_isa() is not None, names)


def num_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


@functools.cache
def cpu_module() -> ModuleType | None:
    """The compiled CPU kernels, None where they are not built. ConfigError when the environment names an instruction
    set that they do not have here."""
    module: ModuleType | None
    try:
        module = importlib.import_module("tokenspeed.kernels._cpu")
    except ImportError:
        module = None
    if module is not None and "paged_attention" not in vars(module):
        module = None
    isa = forced_cpu_isa()
    if isa is not None and module is None:
        raise ConfigError(f"TOKENSPEED_CPU_ISA={isa}: the compiled module tokenspeed.kernels._cpu is not built")
    if isa is not None and module is not None and not module.choose_isa(isa):
        raise ConfigError(f"TOKENSPEED_CPU_ISA={isa}: this machine runs {', '.join(module.isas())}")
    return module


def compiled_cpu(ctx: KernelContext) -> Support:
    """Whether the compiled CPU kernels run for this device and dtype."""
    if ctx.device != "cpu":
        return Reason(f"runs on the CPU, not on {ctx.device}")
    if ctx.dtype not in CPU_DTYPES:
        return Reason(f"{ctx.dtype} is not float32 or bfloat16")
    if cpu_module() is None:
        return Reason("the compiled module tokenspeed.kernels._cpu is not built")
    return Ok()


def triton_on_cuda(ctx: KernelContext) -> Support:
    """Whether Triton kernels run for this device and dtype."""
    if torch.device(ctx.device).type != "cuda":
        return Reason(f"runs on a CUDA device, not on {ctx.device}")
    if ctx.dtype not in TRITON_DTYPES:
        return Reason(f"{ctx.dtype} is not float32, bfloat16 or float16")
    if importlib.util.find_spec("triton") is None:
        return Reason("triton is not installed")
    return Ok()


def gluon_on_hopper(ctx: KernelContext, triton_version: str) -> Support:
    """Whether Gluon kernels for compute capability 9 and 16-bit numbers run, of the Triton that they are written in:
    the language changes from version to version."""
    support = triton_on_cuda(ctx)
    if not isinstance(support, Ok):
        return support
    if torch.cuda.get_device_capability(ctx.device)[0] != 9:
        return Reason("its device code is for compute capability 9")
    if ctx.dtype not in (torch.bfloat16, torch.float16):
        return Reason(f"{ctx.dtype} is not bfloat16 or float16")
    version = importlib.metadata.version("triton")
    return Ok() if version.startswith(f"{triton_version}.") else Reason(f"triton is {version}, not {triton_version}")


def has_dependent_launch(device: str) -> bool:
    """Whether a kernel may start there before the one ahead of it has ended (programmatic dependent launch)."""
    return torch.device(device).type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def require_cpu_module() -> ModuleType:
    """The compiled CPU kernels, for solutions whose support was checked."""
    module = cpu_module()
    assert module is not None
    return module


def set_num_threads(num_threads: int) -> None:
    """Threads of the CPU kernels and of torch. Call before the first step."""
    assert num_threads >= 1, num_threads
    torch.set_num_threads(num_threads)
    module = cpu_module()
    if module is not None:
        module.set_num_threads(num_threads)
