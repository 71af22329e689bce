# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine that `tokenspeed doctor` prints. Reads /proc; knows no kernels and no torch."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """cpu: its name. Memory in bytes, None when unknown."""

    cpu: str
    num_cores: int
    num_cores_allowed: int
    memory_total: int | None
    memory_available: int | None
    system: str


def describe_machine(proc: Path = Path("/proc")) -> Machine:
    """What /proc and the interpreter know."""
    cpu = _fields(proc / "cpuinfo")
    memory = _fields(proc / "meminfo")
    return Machine(
        cpu=cpu.get("model name") or platform.processor() or platform.machine(),
        num_cores=os.cpu_count() or 1,
        num_cores_allowed=len(os.sched_getaffinity(0)),
        memory_total=_bytes(memory.get("MemTotal")),
        memory_available=_bytes(memory.get("MemAvailable")),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def _fields(path: Path) -> dict[str, str]:
    """`name : value` lines, the first of each name."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _bytes(value: str | None) -> int | None:
    """`123 kB` of /proc/meminfo in bytes."""
    if value is None or not value.split():
        return None
    return int(value.split()[0]) * 1024
