# SPDX-License-Identifier: Apache-2.0
"""`tokenspeed bench`: its flags, and how what was measured is shown. Knows terminals; measuring is done in the room
bench."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from tokenspeed.bench import report
from tokenspeed.bench.floor import Ceilings
from tokenspeed.cli.flags import add_model, engine_config
from tokenspeed.core.errors import ConfigError
from tokenspeed.observability.progress import shown_progress

_LATENCY, _THROUGHPUT = "AB", "CD"
_MODEL_LEN = 36_864
_GPU_DEFAULTS: dict[str, Any] = {"block_size": 64, "memory_fraction": 0.9, "max_num_batched_tokens": 8192}
_DTYPES = ("float32", "bfloat16", "float16")


def add_bench(parser: argparse.ArgumentParser, add_debug: Any) -> None:
    """Add what can be measured. add_debug: gives a parser what every command has."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    text = "one request at a time: decode and first token after 1K and 32K tokens"
    _add_speed(kinds.add_parser("latency", help=text, description=text), _LATENCY, add_debug)
    text = "many requests: 16 and 64 at once after 8K tokens, and 16 sessions of four turns"
    _add_speed(kinds.add_parser("throughput", help=text, description=text), _THROUGHPUT, add_debug)
    text = "every solution of an op at the sizes of a real model"
    kernel = kinds.add_parser("kernel", help=text, description=text)
    kernel.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    kernel.add_argument("--solution", action="append", default=[], metavar="NAME", help="only this solution")
    kernel.add_argument(
        "--shape", action="append", default=[], metavar="TEXT", help="only shapes with this in the name"
    )
    kernel.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where it runs")
    kernel.add_argument("--dtype", choices=_DTYPES, help="what is computed in (bfloat16 on a GPU, else float32)")
    _add_output(kernel)
    add_debug(kernel, run_kernel)


def run_speed(options: argparse.Namespace) -> int:
    """`bench latency` and `bench throughput`."""
    from tokenspeed.bench.speed import HEADER, Wanted, machine_of, rows, run

    wanted = Wanted(options.phases.upper(), options.reps, options.shrink, options.seed).check(_LATENCY + _THROUGHPUT)
    report.check_writable(options.json)
    machine = machine_of(engine_config(options))
    defaults = {
        "max_model_len": _MODEL_LEN // wanted.shrink,
        "max_num_seqs": 64,
        **(_GPU_DEFAULTS if machine.is_gpu else {}),
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    with shown_progress() as progress:

        def say(text: str) -> None:
            progress.close()
            print(text, file=sys.stderr, flush=True)

        result = run(engine_config(options), machine, wanted, progress, say)
    _tell(options, HEADER, list(rows(result)), result)
    return 0


def run_kernel(options: argparse.Namespace) -> int:
    """`bench kernel`."""
    import torch

    from tokenspeed.bench.kernel import HEADER, KernelTime, Wanted, rows, run

    wanted = Wanted(tuple(options.ops), tuple(options.solution), tuple(options.shape)).check()
    report.check_writable(options.json)
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    device = "cuda" if has_gpu and options.device != "cpu" else "cpu"
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    times: list[KernelTime] = []

    def on_time(each: KernelTime) -> None:
        times.append(each)
        print("  ".join(next(rows([each]))), file=sys.stderr, flush=True)

    result = run(wanted, device, dtype, on_time)
    if not times:
        raise ConfigError(f"bench kernel: no solution that runs on {device} has a size of these names")
    _tell(options, HEADER, list(rows(times)), result)
    return 1 if any(each.is_wrong for each in times) else 0


def _add_speed(parser: argparse.ArgumentParser, phases: str, add_debug: Any) -> None:
    add_model(parser)
    parser.add_argument(
        "--phases", default=phases, metavar="LETTERS", help=f"what is measured, of ABCD (default: {phases})"
    )
    parser.add_argument("--reps", type=int, default=3, metavar="N", help="repetitions; medians are shown (default: 3)")
    parser.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="divide all lengths by N, for small machines"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes the prompts the same each time")
    _add_output(parser)
    builds_model = parser.get_default("builds_model")
    add_debug(parser, run_speed)
    parser.set_defaults(builds_model=builds_model)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="also write everything measured to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def _tell(options: argparse.Namespace, header: tuple[str, ...], rows: list[tuple[str, ...]], result: Any) -> None:
    """Print the table, in Markdown with what a kept number carries, and write the file."""
    if options.markdown:
        ceilings = Ceilings(**result["ceilings"])
        print(f"Command: `{result['command']}` · commit {result['commit']} · {result['date']} · {ceilings}\n")
    print((report.markdown if options.markdown else report.table)(header, rows))
    if options.json is not None:
        report.write_json(options.json, result)
