# SPDX-License-Identifier: Apache-2.0
"""Where and in which number format a model runs, and how much of the machine it may take.

Knows no model. Reads /proc and /sys on Linux; elsewhere falls back to what Python says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tokenspeed.core.config import CacheConfig, DeviceConfig, DType, SchedulerConfig, WeightsForm
from tokenspeed.core.errors import ConfigError

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60
_FP8_CAPABILITY = (8, 9)
STEP_S = 0.25
STEP_TOKENS_MAX = 2048
GPU_STEP_TOKENS = 8192
GPU_MIXED_STEP_UNIT = 256
"""Tokens of a step that GPUs multiply well, and as many prompt tokens as cost a step that decodes little."""
_BLOCK_SIZE, _GPU_BLOCK_SIZE = 16, 64
_MEMORY_FRACTION, _GPU_MEMORY_FRACTION = 0.5, 0.9


def resolve_device(device: DeviceConfig) -> torch.device:
    """The device asked for; auto takes a GPU where there is one. ConfigError when a GPU is asked for and absent."""
    has_gpu = torch.cuda.is_available()
    if device.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    if device.device == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda")


def own_stream(device: torch.device) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """What another thread enters to run on the device that this one is on, in a stream of its own; nothing on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext
    stream = torch.cuda.Stream(torch.cuda.current_device())  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        torch.cuda.set_device(stream.device)
        with torch.cuda.stream(stream):
            yield

    return entered


def wait_for(device: torch.device) -> None:
    """Wait until all that was launched has run, so that other streams see it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def resolve_dtype(dtype: DType, device: torch.device, model_config: Mapping[str, object]) -> torch.dtype:
    """The dtype asked for; auto is float32 on a CPU and what the checkpoint was trained in on a GPU."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cpu":
        return torch.float32
    own = model_config.get("dtype", model_config.get("torch_dtype"))
    trained = _DTYPES.get(str(own), torch.bfloat16)
    return torch.bfloat16 if trained == torch.float32 else trained


def resolve_kv_dtype(
    cache: CacheConfig, device: torch.device, dtype: torch.dtype, *, is_packed: bool = False
) -> torch.dtype:
    """The dtype of the KV pool of a model of this dtype. is_packed: weights stay packed, and then a CPU that computes
    in float32 keeps bfloat16 unless told otherwise. ConfigError where kernels or the device do not have it."""
    widens = device.type == "cpu" and dtype is torch.float32  # what is kept in bfloat16
    if cache.kv_dtype == "auto":
        return torch.bfloat16 if widens and is_packed else dtype
    if cache.kv_dtype in _KV_DTYPES:
        wanted = _KV_DTYPES[cache.kv_dtype]
        if wanted is not dtype and not (wanted is torch.bfloat16 and widens):
            raise ConfigError(
                f"--kv-cache-dtype {cache.kv_dtype}: the model runs in {dtype_name(dtype)}, and the KV pool is of that "
                f"or of fewer bits that kernels read beside it; give --dtype {dtype_name(wanted)} too, or auto"
            )
        return wanted
    if cache.kv_dtype == "int8":
        if device.type != "cpu":
            raise ConfigError("--kv-cache-dtype int8: kernels of a GPU do not read it; use fp8 there, or auto")
        return torch.int8
    if device.type != "cuda":
        raise ConfigError("--kv-cache-dtype fp8: kernels of a CPU do not read it; use int8 there, or auto")
    if torch.cuda.get_device_capability(device) < _FP8_CAPABILITY:
        raise ConfigError("--kv-cache-dtype fp8: this GPU computes no fp8 (compute capability 8.9 does); use auto")
    return torch.float8_e4m3fn


def keeps_packed(form: WeightsForm, device: torch.device) -> bool:
    """Whether weights of few bits stay packed where a kernel can multiply by them; auto does so on a CPU."""
    return form == "packed" or (form == "auto" and device.type == "cpu")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as the configuration spells it."""
    return str(dtype).removeprefix("torch.")


def resolve_num_threads(device: DeviceConfig) -> int:
    """The threads asked for, else the physical cores that affinity and cgroup quota leave us."""
    if device.num_threads is not None:
        return device.num_threads
    allowed = sorted(os.sched_getaffinity(0)) if os.name == "posix" else list(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _cpu_quota()))


def available_memory_bytes(device: torch.device) -> int:
    """Bytes that could be allocated now: on a CPU what the kernel calls available, within our cgroup's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_system_memory_bytes(), _cgroup_memory_bytes())


def _siblings(cpu: int) -> str:
    try:
        return (_CPU_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_dirs() -> list[Path]:
    """Our cgroup (version 2) and those above it, innermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [_CGROUP]
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    innermost = _CGROUP / own.lstrip("/")
    return [innermost, *(parent for parent in innermost.parents if parent.is_relative_to(_CGROUP))]


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cpu_quota() -> int:
    quota = 1 << 16
    for directory in _cgroup_dirs():
        words = _read_words(directory / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            quota = min(quota, -(-int(words[0]) // int(words[1])))
    return max(1, quota)


def _system_memory_bytes() -> int:
    words = _read_words(Path("/proc/meminfo"))
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_memory_bytes() -> int:
    """What the tightest memory limit above us leaves; page cache that can be dropped counts as free."""
    available = _UNLIMITED_BYTES
    for directory in _cgroup_dirs():
        limit, current = _read_words(directory / "memory.max"), _read_words(directory / "memory.current")
        if not limit or not current or limit[0] == "max":
            continue
        stat = _read_words(directory / "memory.stat")
        droppable = int(stat[stat.index("inactive_file") + 1]) if "inactive_file" in stat else 0
        available = min(available, max(0, int(limit[0]) - int(current[0]) + droppable))
    words = _read_words(_CGROUP / "memory" / "memory.limit_in_bytes")
    used = _read_words(_CGROUP / "memory" / "memory.usage_in_bytes")
    if words and used:
        available = min(available, max(0, int(words[0]) - int(used[0])))
    return available


def step_tokens(scheduler: SchedulerConfig, device: torch.device, token_s: float | None) -> int:
    """Tokens of a step: as configured, else enough to fill a GPU, and on a CPU what takes about STEP_S by the seconds
    a prefill token was seen to take. Never below one token for each seat."""
    if scheduler.max_num_batched_tokens is not None:
        return scheduler.max_num_batched_tokens
    if device.type != "cpu":
        return max(GPU_STEP_TOKENS, scheduler.max_num_seqs)
    if not token_s:
        return max(STEP_TOKENS_MAX, scheduler.max_num_seqs)
    return max(scheduler.max_num_seqs, min(STEP_TOKENS_MAX, int(STEP_S / token_s)))


def mixed_prefill_tokens(scheduler: SchedulerConfig, num_step_tokens: int) -> int:
    """Prompt tokens of a step that also decodes, of at most num_step_tokens: as configured, else all."""
    return min(scheduler.max_num_mixed_prefill_tokens or num_step_tokens, num_step_tokens)


def mixed_step_unit(scheduler: SchedulerConfig, device: torch.device) -> int | None:
    """Steps that also decode have whole units of tokens and no more prompt tokens than what waits asks for, see
    control.ControlPlane; None where they have all that they may: on a CPU, and where the limit was given."""
    return None if device.type == "cpu" or scheduler.max_num_mixed_prefill_tokens is not None else GPU_MIXED_STEP_UNIT


def block_size(cache: CacheConfig, device: torch.device) -> int:
    """Tokens of a page: as configured, else what suits the device; a GPU reads long runs best."""
    return cache.block_size or (_BLOCK_SIZE if device.type == "cpu" else _GPU_BLOCK_SIZE)


def memory_fraction(cache: CacheConfig, device: torch.device) -> float:
    """The share of free memory for the pools: as configured, else more of a GPU, which is ours alone."""
    return cache.memory_fraction or (_MEMORY_FRACTION if device.type == "cpu" else _GPU_MEMORY_FRACTION)
