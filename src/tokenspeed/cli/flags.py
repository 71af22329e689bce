# SPDX-License-Identifier: Apache-2.0
"""Flags of the command line: which configuration field each one sets, and the configuration that they make."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from tokenspeed.cli.parser import size
from tokenspeed.core.config import (
    DEFAULT_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenspeed.core.errors import ConfigError
from tokenspeed.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and the configuration field that it sets; type and default come from the field. const: the value that the
    flag stands for, where it takes none."""

    names: tuple[str, ...]
    struct: type[msgspec.Struct]
    field: str
    help: str
    metavar: str | None = None
    const: str | None = None


_SIZES = ("TOKENS", "BYTES")

MODEL_FLAGS = (
    Flag(("--revision",), ModelConfig, "revision", "branch, tag or commit of a hub model"),
    Flag(("--load-format",), ModelConfig, "load_format", "how the model is stored"),
    Flag(("--dtype",), ModelConfig, "dtype", "what is computed in; auto chooses by device"),
    Flag(("--weights",), ModelConfig, "weights", "weights of few bits as numbers, or packed; auto packs on a CPU"),
    Flag(("--exact",), ModelConfig, "weights", "the same as --weights exact", const="exact"),
    Flag(("--packed-cache",), ModelConfig, "packed_cache", "keep packed weights on disk for the next start"),
    Flag(("--packed-cache-bytes-max",), ModelConfig, "packed_cache_bytes_max", "disk for those of all models", "BYTES"),
    Flag(
        ("--max-model-len", "--context-length"),
        ModelConfig,
        "max_model_len",
        "context window in tokens (the model's own)",
        "TOKENS",
    ),
    Flag(("--chat-template",), ModelConfig, "chat_template", "jinja file in place of the model's own", "FILE"),
    Flag(("--device",), DeviceConfig, "device", "where it runs"),
    Flag(("--threads",), DeviceConfig, "num_threads", "CPU threads (the physical cores allowed to us)", "N"),
    Flag(("--graphs",), DeviceConfig, "graphs", "replay small steps as graphs of the device"),
    Flag(
        ("--deterministic", "--enable-deterministic-inference"),
        DeviceConfig,
        "deterministic",
        "the same bits whatever else runs",
    ),
    Flag(("--block-size", "--page-size"), CacheConfig, "block_size", "tokens of a KV block (16; GPU: 64)", "TOKENS"),
    Flag(
        ("--kv-tokens", "--max-total-tokens"),
        CacheConfig,
        "kv_tokens",
        "KV pool in tokens (a share of free memory)",
        "TOKENS",
    ),
    Flag(
        ("--memory-fraction", "--gpu-memory-utilization", "--mem-fraction-static"),
        CacheConfig,
        "memory_fraction",
        "that share (0.5, on a GPU 0.9)",
        "F",
    ),
    Flag(("--kv-cache-dtype",), CacheConfig, "kv_dtype", "numbers of the KV pool: fp8 is of a GPU, int8 of a CPU"),
    Flag(("--host-kv-tokens",), CacheConfig, "host_tokens", "host memory for evicted blocks; 0 is off", "TOKENS"),
    Flag(("--host-store",), CacheConfig, "host_store", "copy blocks there when full, or when memory runs short"),
    Flag(
        ("--prefix-caching", "--enable-prefix-caching"),
        CacheConfig,
        "prefix_caching",
        "reuse the K/V of a prompt's known beginning",
    ),
    Flag(
        ("--max-num-seqs", "--max-running-requests"),
        SchedulerConfig,
        "max_num_seqs",
        "requests that run at once",
        "N",
    ),
    Flag(
        ("--max-num-batched-tokens",),
        SchedulerConfig,
        "max_num_batched_tokens",
        "tokens of a step (by speed)",
        "TOKENS",
    ),
    Flag(
        ("--max-num-mixed-prefill-tokens",),
        SchedulerConfig,
        "max_num_mixed_prefill_tokens",
        "prompt tokens of a step that also decodes (by device)",
        "TOKENS",
    ),
    Flag(
        ("--max-num-waiting", "--max-queued-requests"),
        SchedulerConfig,
        "max_num_waiting",
        "requests that may wait; more get 429",
        "N",
    ),
    Flag(("--overlap-depth",), SchedulerConfig, "overlap_depth", "steps planned ahead, 0 or 1", "N"),
    Flag(("--ageing-steps",), SchedulerConfig, "ageing_steps", "steps of waiting that lift a request", "N"),
    Flag(
        ("--tp", "--tensor-parallel-size", "--tp-size"),
        ParallelConfig,
        "tp",
        "ranks that split the attention heads",
        "N",
    ),
    Flag(("--dp-attention",), ParallelConfig, "dp_attention", "partitions of the requests, of --tp ranks each", "N"),
    Flag(("--ep", "--ep-size"), ParallelConfig, "ep", "ways the experts are spread over the ranks", "N"),
    Flag(("--moe-tp",), ParallelConfig, "moe_tp", "ranks that split one expert (those that --ep leaves)", "N"),
    Flag(("--rank-timeout",), ParallelConfig, "rank_timeout_s", "a rank that takes longer for a step ends all", "S"),
)
PLAN_FLAGS = tuple(
    flag for flag in MODEL_FLAGS if flag.field in ("revision", "dtype", "tp", "dp_attention", "ep", "moe_tp")
)
SERVED_NAME = Flag(("--served-name", "--served-model-name"), ModelConfig, "served_name", "name on the wire", "NAME")
SERVER_FLAGS = (
    Flag(("--host",), ServerConfig, "host", "address to listen on"),
    Flag(("--port",), ServerConfig, "port", "port to listen on; 0 takes a free one"),
    Flag(("--grpc-port",), ServerConfig, "grpc_port", "port to serve gateways on over gRPC; 0 takes a free one (none)"),
    Flag(("--api-key",), ServerConfig, "api_key", "ask clients for this key"),
    Flag(("--store",), ServerConfig, "store", "keep stored responses in this file (in memory)", "PATH"),
    Flag(("--body-bytes-max",), ServerConfig, "body_bytes_max", "largest request body", "BYTES"),
    Flag(("--tool-grammar",), ServerConfig, "tool_grammar", "hold calls to the schemas of their tools"),
    Flag(("--tool-call-parser",), ServerConfig, "tool_call_parser", "what reads calls in replies", "NAME"),
    Flag(("--strict-model-name",), ServerConfig, "strict_model_name", "refuse requests for other model names"),
)
SAMPLING_FLAGS = (
    Flag(("--max-tokens",), SamplingParams, "max_tokens", "generate at most so many (until the model stops)", "TOKENS"),
    Flag(("--temperature",), SamplingParams, "temperature", "0 is greedy (the model's own)", "T"),
    Flag(("--top-p",), SamplingParams, "top_p", "nucleus sampling", "P"),
    Flag(("--top-k",), SamplingParams, "top_k", "only the k most likely; 0 is off", "K"),
    Flag(("--seed",), SamplingParams, "seed", "makes sampling repeatable", "N"),
)


def add_model(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    """Add the model and everything that says how it is run; its command starts an engine."""
    text = f"alias (see `tokenspeed models`), folder, GGUF file or hub id (default: {DEFAULT_MODEL})"
    if positional:
        parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--model", "--model-path", help=text)
    parser.set_defaults(builds_model=True)
    add_flags(parser, MODEL_FLAGS)
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="OP=SOLUTION", help="use this solution for this op"
    )


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add flags to a command; types, choices and defaults are those of their fields."""
    for flag in flags:
        info = next(known for known in msgspec.structs.fields(flag.struct) if known.name == flag.field)
        has_default = flag.const is None and info.default not in (None, msgspec.NODEFAULT)
        default = f" (default: {info.default})" if has_default else ""
        settings: dict[str, Any] = {"dest": flag.field, "default": None, "help": flag.help + default}
        kind, choices = _kind(info.type)
        if flag.const is not None:
            settings.update(action="store_const", const=flag.const)
        elif kind is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            is_size = kind is int and flag.metavar in _SIZES
            settings.update(type=size if is_size else kind, choices=choices, metavar=flag.metavar)
        parser.add_argument(*flag.names, **settings)


def given(options: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Fields of flags that were given."""
    named = {flag.field: getattr(options, flag.field, None) for flag in flags}
    return {name: value for name, value in named.items() if value is not None}


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """What a command that builds a model was told. Raises ConfigError."""
    positional = getattr(options, "positional_model", None)
    if positional and options.model and positional != options.model:
        raise ConfigError(f"two models are given, {positional} and --model {options.model}; give one")
    overrides = tuple(_override(text) for text in options.kernel)
    model = {"model": positional or options.model or DEFAULT_MODEL, **given(options, (SERVED_NAME,))}
    parts: dict[type[msgspec.Struct], dict[str, Any]] = {
        ModelConfig: model,
        CacheConfig: {},
        SchedulerConfig: {},
        DeviceConfig: {"kernel_overrides": overrides},
        ParallelConfig: {},
    }
    for flag in MODEL_FLAGS:
        parts[flag.struct] |= given(options, (flag,))
    return EngineConfig(
        model=ModelConfig(**parts[ModelConfig]),
        cache=CacheConfig(**parts[CacheConfig]),
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        device=DeviceConfig(**parts[DeviceConfig]),
        parallel=ParallelConfig(**parts[ParallelConfig]),
        debug=options.debug,
    ).validate()


def _kind(annotation: Any) -> tuple[type, tuple[str, ...] | None]:
    """The type that a field's value is read as, and the choices of a Literal."""
    options = [option for option in get_args(annotation) if option is not type(None)]
    if options and all(isinstance(option, str) for option in options):
        return str, tuple(options)
    return (options[0] if options else annotation), None


def _override(text: str) -> tuple[str, str]:
    op, equals, solution = text.partition("=")
    if not (op and equals and solution):
        raise ConfigError(f"--kernel {text}: write OP=SOLUTION; `tokenspeed doctor` lists both")
    return op, solution
