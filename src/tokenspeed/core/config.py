# SPDX-License-Identifier: Apache-2.0
"""Configuration: frozen, validated once, handed on in parts. The only reader of environment variables.

A new flag needs a decision record.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tokenspeed.core.errors import ConfigError

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy", "scripted"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
KvDType = Literal["auto", "fp32", "bf16", "fp8", "int8"]
WeightsForm = Literal["auto", "exact", "packed"]
HostStoreName = Literal["seal", "pressure"]

DEFAULT_MODEL = "smollm2-135m"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, from where. model: alias, local folder, GGUF file or hub id. max_model_len: None takes the
    model's own, cut to the KV pool; a given value larger than the pool is refused. weights: blocks of a few bits become
    numbers when they are loaded (exact), or stay packed where a kernel multiplies by them as they are (packed); auto is
    packed on a CPU and exact elsewhere. packed_cache: weights that were packed are kept on disk, those of all models in
    at most packed_cache_bytes_max."""

    model: str = DEFAULT_MODEL
    served_name: str | None = None
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"
    weights: WeightsForm = "auto"
    packed_cache: bool = True
    packed_cache_bytes_max: int = 16 << 30
    max_model_len: int | None = None
    chat_template: str | None = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool. block_size: tokens of a page; None takes 16, on a GPU 64. kv_tokens: its size in tokens; None takes
    memory_fraction of what is free after loading. memory_fraction: None takes 0.5, on a GPU 0.9.
    host_tokens: size in tokens of the host tier, where evicted blocks wait to come back; 0 means none. host_store: a
    block goes there as soon as it is full (seal), or when its memory is about to be wanted (pressure). events: the
    engine can tell what the prefix cache gains and loses. kv_dtype: of what is kept; auto is that of the model, but
    bf16 where a CPU computes in float32 on weights that stay packed; fp8 is e4m3 without a scale, on a GPU;
    int8 has a scale for each head of a token, on a CPU."""

    block_size: int | None = None
    kv_tokens: int | None = None
    memory_fraction: float | None = None
    kv_dtype: KvDType = "auto"
    prefix_caching: bool = True
    host_tokens: int = 0
    host_store: HostStoreName = "seal"
    events: bool = False


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step. max_num_batched_tokens: None takes 8192 on a GPU, and on a CPU what it computes in a quarter of
    a second, so that a long prompt holds up neither other streams nor a cancellation. max_num_mixed_prefill_tokens: of
    these, those of prompts in a step that also decodes, however many decode; None takes on a GPU what the queue asks
    for, and on a CPU all. overlap_depth: steps planned ahead of the last result, 0 or 1. ageing_steps: waiting this
    many steps lifts a request by one priority class."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_num_mixed_prefill_tokens: int | None = None
    max_num_waiting: int = 1024
    overlap_depth: int = 1
    ageing_steps: int = 256


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where it runs. num_threads: CPU threads of kernels; None takes the physical cores allowed to us. graphs: steps of
    few tokens are captured as graphs of the device, where it has such. deterministic: a request's results are the same
    bits whatever else runs, and however much of it was cached."""

    device: Device = "auto"
    num_threads: int | None = None
    kernel_overrides: tuple[tuple[str, str], ...] = ()
    graphs: bool = True
    deterministic: bool = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of a replica: tp split the attention heads within each of dp_attention partitions of the requests.
    Experts are spread ep ways, each expert split moe_tp ways; None takes what is left of the ranks. Whether the numbers
    nest is not checked here. rank_timeout_s: a rank that needs longer for a step has hung."""

    tp: int = 1
    ep: int = 1
    dp_attention: int = 1
    moe_tp: int | None = None
    rank_timeout_s: float = 120.0

    @property
    def num_ranks(self) -> int:
        """Processes of the replica."""
        return self.tp * self.dp_attention


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that the engine is told."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    debug: bool = False

    def validate(self) -> EngineConfig:
        """This configuration, or ConfigError naming the flag."""
        cache, scheduler, model = self.cache, self.scheduler, self.model
        block_size = cache.block_size or 16
        _require(block_size in (8, 16, 32, 64, 128), f"--block-size {block_size}: use 8, 16, 32, 64 or 128")
        if cache.kv_tokens is not None:
            _require(
                cache.kv_tokens >= 2 * block_size,
                f"--kv-tokens {cache.kv_tokens}: the KV pool is too small for one request; "
                f"give at least {2 * block_size}",
            )
        _validate_host_tier(cache)
        fraction = cache.memory_fraction
        _require(fraction is None or 0.0 < fraction <= 0.95, f"--memory-fraction {fraction}: use 0.05 to 0.95")
        _require(1 <= scheduler.max_num_seqs <= 4096, f"--max-num-seqs {scheduler.max_num_seqs}: use 1 to 4096")
        if scheduler.max_num_batched_tokens is not None:
            _require(
                scheduler.max_num_batched_tokens >= scheduler.max_num_seqs,
                f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} is below --max-num-seqs "
                f"{scheduler.max_num_seqs}: each running request needs one token a step",
            )
        mixed = scheduler.max_num_mixed_prefill_tokens
        _require(mixed is None or mixed >= 1, f"--max-num-mixed-prefill-tokens {mixed}: give at least 1")
        _require(scheduler.max_num_waiting >= 0, f"--max-num-waiting {scheduler.max_num_waiting}: give 0 or more")
        _require(scheduler.ageing_steps >= 1, f"--ageing-steps {scheduler.ageing_steps}: give at least 1")
        _require(scheduler.overlap_depth in (0, 1), f"--overlap-depth {scheduler.overlap_depth}: use 0 or 1")
        kept_max = model.packed_cache_bytes_max
        _require(kept_max >= 1, f"--packed-cache-bytes-max {kept_max}: give at least 1, or --no-packed-cache")
        if model.max_model_len is not None:
            _require(model.max_model_len >= 2, f"--max-model-len {model.max_model_len}: give at least 2")
            if cache.kv_tokens is not None:
                _require(
                    model.max_model_len <= cache.kv_tokens,
                    f"--max-model-len {model.max_model_len} exceeds --kv-tokens {cache.kv_tokens}: one request of "
                    "that length would never fit; lower the first or raise the second",
                )
        if self.device.num_threads is not None:
            _require(self.device.num_threads >= 1, f"--threads {self.device.num_threads}: give at least 1")
        _validate_parallel(self.parallel)
        return self


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP face. Binds loopback unless told otherwise. tool_call_parser: what reads reasoning and calls in replies;
    auto asks the chat template. tool_grammar: whether calls that the model is free to make are held to their schemas.
    grpc_port: where gateways that speak gRPC are served too; None serves none. store: a file in which stored responses
    outlive the server; None keeps them in memory."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    body_bytes_max: int = 64 * 1024 * 1024
    store: str | None = None
    strict_model_name: bool = False
    tool_call_parser: str = "auto"
    tool_grammar: Literal["on", "off"] = "on"

    def validate(self) -> ServerConfig:
        """This configuration, or ConfigError naming the flag."""
        _require(self.body_bytes_max >= 1, f"--body-bytes-max {self.body_bytes_max}: give at least 1")
        _require(self.api_key != "", "--api-key is empty: give a key, or leave the flag out")
        return self


def cache_dir() -> Path:
    """Where downloaded models live, and what is made of them: TOKENSPEED_CACHE, else XDG_CACHE_HOME/tokenspeed, else
    ~/.cache/tokenspeed."""
    own = os.environ.get("TOKENSPEED_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenspeed"


def forced_cpu_isa() -> str | None:
    """TOKENSPEED_CPU_ISA: the instruction set that the compiled CPU kernels are to use; None for the best one."""
    return os.environ.get("TOKENSPEED_CPU_ISA") or None


def hub_endpoint() -> str | None:
    """HF_ENDPOINT, where the hub is another than the public one."""
    return os.environ.get("HF_ENDPOINT") or None


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where spans go: the URL of an OpenTelemetry collector, and how it is spoken to."""

    url: str
    protocol: str


def trace_settings() -> TraceSettings | None:
    """OTEL_EXPORTER_OTLP_ENDPOINT and what goes with it; None where no spans are wanted."""
    url = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not url or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    given = [os.environ[name] for name in names if os.environ.get(name)]
    return TraceSettings(url, given[0] if given else "http/protobuf")


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """This process among those that a launcher such as torchrun has started, on all hosts and on this one.
    master_host: the host of rank 0, as the others reach it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_host: str


def launched_rank() -> LaunchedRank | None:
    """What the launcher has set in the environment; None where there is none. ConfigError when it makes no sense."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    values = [os.environ.get(name) for name in names]
    rank, world_size, local_rank, local_world_size, master_host = values
    if not (rank and world_size and local_rank and local_world_size and master_host):
        return None
    numbers = (rank, world_size, local_rank, local_world_size)
    given = " ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    _require(all(number.isdecimal() for number in numbers), f"the launcher's {given} are not all numbers")
    launched = LaunchedRank(int(rank), int(world_size), int(local_rank), int(local_world_size), master_host)
    _require(
        launched.rank < launched.world_size and launched.local_rank < launched.local_world_size,
        f"the launcher's {given}: a rank is not below the number of ranks",
    )
    return launched


_CALM_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "1"}


def calm_own_threads() -> None:
    """Tell OpenMP in this process not to spin either. It reads this once, when it is loaded: too late has no effect."""
    for name, value in _CALM_OPENMP.items():
        os.environ.setdefault(name, value)


def child_environment(num_threads: int | None) -> dict[str, str]:
    """The environment of an engine process: ours, with OpenMP told not to spin and how many threads to use."""
    environment = {**_CALM_OPENMP, **os.environ}
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def _validate_host_tier(cache: CacheConfig) -> None:
    if cache.host_tokens == 0:
        _require(
            cache.host_store == "seal", f"--host-store {cache.host_store} without a host tier: give --host-kv-tokens"
        )
        return
    block_size = cache.block_size or 16
    _require(
        cache.host_tokens >= block_size,
        f"--host-kv-tokens {cache.host_tokens}: the host tier is too small for one block; give at least "
        f"{block_size}, or 0 for none",
    )
    _require(
        cache.prefix_caching,
        f"--host-kv-tokens {cache.host_tokens} with --no-prefix-caching: what comes back from the host tier is found "
        "through the prefix cache; drop one of the two",
    )


def _validate_parallel(parallel: ParallelConfig) -> None:
    for flag, value in (("--tp", parallel.tp), ("--ep", parallel.ep), ("--dp-attention", parallel.dp_attention)):
        _require(value >= 1, f"{flag} {value}: give at least 1")
    _require(parallel.moe_tp is None or parallel.moe_tp >= 1, f"--moe-tp {parallel.moe_tp}: give at least 1")
    _require(parallel.rank_timeout_s > 0, f"--rank-timeout {parallel.rank_timeout_s:g}: give more than 0 seconds")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
