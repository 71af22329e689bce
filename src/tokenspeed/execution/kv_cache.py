# SPDX-License-Identifier: Apache-2.0
"""The KV pool: how many pages there are, and the tensors behind them.

Pages are numbered 1 to num_blocks; page 0 is the null page, never handed out, where padded rows point. Who owns a
page is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import CapacityError, ConfigError
from tokenspeed.execution.placement import available_memory_bytes, dtype_name
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.forward_batch import KvLayer

NUM_BLOCKS_MAX = (1 << 31) - 2


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks usable pages of block_size tokens; a request may be max_model_len tokens long."""

    num_blocks: int
    block_size: int
    max_model_len: int
    kv_bytes: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def blocks_per_seat(self) -> int:
        return -(-self.max_model_len // self.block_size)


def size_pool(config: EngineConfig, specs: Sequence[KvSpec], model_len: int, ctx: BuildContext) -> PoolSize:
    """How large the pool is: cache.kv_tokens, else memory_fraction of the available memory, but never more than all
    seats could fill. Raises CapacityError when one request would not fit, ConfigError when the model is shorter than
    max_model_len asks."""
    wanted_len = config.model.max_model_len
    if wanted_len is not None and wanted_len > model_len:
        raise ConfigError(
            f"--max-model-len {wanted_len} exceeds the {model_len} tokens that the model was made for; "
            f"give at most {model_len}"
        )
    block_size = config.cache.block_size
    token_bytes = sum(2 * spec.num_kv_heads * spec.head_dim for spec in specs) * ctx.dtype.itemsize
    request_len = wanted_len if wanted_len is not None else model_len
    num_tokens = config.cache.kv_tokens
    if num_tokens is None:
        num_tokens = _default_tokens(config, request_len, token_bytes, ctx)
    num_blocks = min(num_tokens // block_size, NUM_BLOCKS_MAX)
    needed = wanted_len if wanted_len is not None else min(model_len, 2 * block_size)
    if num_blocks * block_size < needed:
        raise CapacityError(_too_small(num_blocks * block_size, needed, token_bytes, ctx))
    return PoolSize(
        num_blocks, block_size, min(request_len, num_blocks * block_size), (num_blocks + 1) * block_size * token_bytes
    )


def allocate(size: PoolSize, specs: Sequence[KvSpec], ctx: BuildContext) -> tuple[KvLayer, ...]:
    """Zeroed pages for every layer. The system commits CPU memory only as pages are written, long after a pool that
    is too large could have been refused: hence the check."""
    available = available_memory_bytes(torch.device(ctx.device))
    if size.kv_bytes > available:
        raise CapacityError(
            f"out of memory: the KV pool of {size.num_tokens} tokens needs {_mib(size.kv_bytes)} MiB and "
            f"{available >> 20} MiB are available; lower --kv-tokens or --memory-fraction"
        )
    return tuple(_allocate_layer(size, spec, ctx) for spec in specs)


def copy_pages(layers: Sequence[KvLayer], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole pages inside the pool."""
    for layer in layers:
        layer.k[targets] = layer.k[sources]
        layer.v[targets] = layer.v[sources]


def zero_pages(layers: Sequence[KvLayer], pages: torch.Tensor) -> None:
    """Clear whole pages."""
    for layer in layers:
        layer.k[pages] = 0
        layer.v[pages] = 0


def _allocate_layer(size: PoolSize, spec: KvSpec, ctx: BuildContext) -> KvLayer:
    extent = (size.num_blocks + 1, size.block_size, spec.num_kv_heads, spec.head_dim)
    k, v = (_zeros(extent, ctx) for _ in range(2))
    return KvLayer(k, v)


def _zeros(extent: tuple[int, ...], ctx: BuildContext) -> torch.Tensor:
    if torch.device(ctx.device).type != "cpu":
        return torch.zeros(extent, dtype=ctx.dtype, device=ctx.device)
    # torch.zeros writes every page, which takes half a minute for a pool of 11 GB; numpy's comes zeroed and untouched.
    untouched = np.zeros(math.prod(extent) * ctx.dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(ctx.dtype).view(extent)


def _default_tokens(config: EngineConfig, request_len: int, token_bytes: int, ctx: BuildContext) -> int:
    block_size = config.cache.block_size
    seat_tokens = -(-request_len // block_size) * block_size
    most = config.scheduler.max_num_seqs * seat_tokens
    if token_bytes == 0:
        return most
    memory = int(available_memory_bytes(torch.device(ctx.device)) * config.cache.memory_fraction)
    return min(most, max(0, memory // token_bytes - block_size))


def _too_small(num_tokens: int, needed: int, token_bytes: int, ctx: BuildContext) -> str:
    return (
        f"the KV pool holds {num_tokens} tokens but one request may need {needed} "
        f"({_mib(needed * token_bytes)} MiB in {dtype_name(ctx.dtype)}); raise --kv-tokens or --memory-fraction, "
        "or lower --max-model-len"
    )


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
