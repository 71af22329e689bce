# SPDX-License-Identifier: Apache-2.0
"""What this machine and a model are, printed: `tokenspeed doctor` and `tokenspeed models`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenspeed import __version__
from tokenspeed.cli.flags import PLAN_FLAGS, given
from tokenspeed.core.config import EngineConfig, ModelConfig, ParallelConfig
from tokenspeed.core.errors import ConfigError
from tokenspeed.observability.progress import shown_progress


def run_models(_: argparse.Namespace) -> int:
    """Print the models known by a short name."""
    from tokenspeed.checkpoints import list_models

    rows = [("MODEL", "SIZE", "CACHED", "WHAT", "LICENCE")]
    rows += [
        (
            model.name,
            f"{model.num_bytes / 2**20:,.0f} MiB",
            "yes" if model.is_cached else "no",
            model.description,
            model.licence,
        )
        for model in list_models()
    ]
    _print_table(rows)
    return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Print what this machine offers; 1 when a compiled module is missing. Raises ConfigError."""
    if options.plan is not None:
        return _print_plan(options)
    if given(options, PLAN_FLAGS):
        raise ConfigError("doctor reads flags of ranks only to print a plan: give --plan MODEL too")
    from tokenspeed.observability.machine import describe_machine

    machine = describe_machine()
    torch = importlib.import_module("torch")
    platform = importlib.import_module("tokenspeed.kernels.platform").describe()
    cuda = ", ".join(platform.cuda_devices) or "none"
    built = {name: _is_built(f"tokenspeed.{name}") for name in ("control._control", "kernels._cpu")}
    _print_table(
        [
            ("tokenspeed", f"{__version__}, {machine.system}"),
            ("cpu", f"{machine.cpu}, {machine.num_cores_allowed} of {machine.num_cores} cores allowed"),
            ("cpu kernels", _cpu_kernels(platform)),
            ("memory", f"{_gib(machine.memory_available)} available of {_gib(machine.memory_total)}"),
            ("torch", str(torch.__version__)),
            ("cuda devices", cuda),
            *((f"module {name}", "built" if there else "missing") for name, there in built.items()),
        ]
    )
    _print_kernels(torch, "cuda" if platform.cuda_devices else "cpu")
    if options.model:
        _print_model(options.model)
    return 0 if all(built.values()) else 1


def _cpu_kernels(platform: Any) -> str:
    if platform.cpu_isa is None:
        return "not built; `make setup` builds them"
    return f"{platform.cpu_isa}, as TOKENSPEED_CPU_ISA says" if platform.is_cpu_isa_forced else str(platform.cpu_isa)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_plan(options: argparse.Namespace) -> int:
    from tokenspeed.checkpoints import open_model
    from tokenspeed.execution.sharding_report import sharding_report

    named = [name for name in (options.model, options.plan) if isinstance(name, str)]
    if len(named) != 1:
        raise ConfigError("doctor --plan takes one model, as in `tokenspeed doctor --plan MODEL --tp 2`")
    parts: dict[type[msgspec.Struct], dict[str, Any]] = {ModelConfig: {}, ParallelConfig: {}}
    for flag in PLAN_FLAGS:
        parts[flag.struct] |= given(options, (flag,))
    # Dummy weights need no files of weights.
    model = ModelConfig(model=named[0], load_format="dummy", **parts[ModelConfig])
    parallel = EngineConfig(parallel=ParallelConfig(**parts[ParallelConfig])).validate().parallel
    with shown_progress() as progress:
        source = open_model(model, progress)
    print(sharding_report(named[0], source.config, model.dtype, parallel), end="")
    return 0


def _print_kernels(torch: Any, device: str) -> None:
    registry = importlib.import_module("tokenspeed.kernels.registry")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    print(f"\nkernels on {device} in {str(dtype).removeprefix('torch.')}")
    for bound in registry.bindings_table(registry.KernelContext(device, dtype)):
        print(f"  {bound.op}: {bound.solution}")
        for name, reason in bound.passed_over:
            print(f"    not {name}: {reason}")


def _print_model(name: str) -> None:
    from tokenspeed.checkpoints import open_model

    with shown_progress() as progress:
        source = open_model(ModelConfig(model=name), progress)
    print(f"\nmodel {name}")
    rows = [("path", str(source.path)), ("type", str(source.config.get("model_type")))]
    rows += [("tokenizer", "none" if source.tokenizer is None else type(source.tokenizer).__name__)]
    rows += [("chat template", "none" if source.chat_template is None else "yes")]
    rows += [("context", str(source.config.get("max_position_embeddings")))]
    _print_table([(f"  {label}", text) for label, text in rows])


def _is_built(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
