# SPDX-License-Identifier: Apache-2.0
"""The KV pools: which layers share one, how many pages each has, and the tensors behind them.

Layers that look back equally far are a cache group with pages and page tables of its own, so that those with a window
hold only what they still look at. Pages are numbered 1 to num_blocks; page 0 is the null page, never handed out, where
padded rows point. Who owns a page is decided elsewhere.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenspeed.core.config import EngineConfig
from tokenspeed.core.errors import CapacityError, ConfigError
from tokenspeed.core.plan import CacheGroup, GroupKind
from tokenspeed.execution import placement
from tokenspeed.execution.placement import available_memory_bytes, dtype_name, step_tokens
from tokenspeed.kernels.kv_pages import page_dim
from tokenspeed.layers.attention import KvSpec
from tokenspeed.layers.build import BuildContext
from tokenspeed.layers.forward_batch import KvLayer
from tokenspeed.transfer import PageGroup

NUM_BLOCKS_MAX = (1 << 31) - 2
_BLOCKS_BESIDE_WINDOW = 7
_STEP_MARGINS = 4


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What there is room for; a request may be max_model_len tokens long. groups: in the order of a plan's group
    numbers, the first is the one that keeps most of a sequence. group_of_layer: the group of each attention layer."""

    groups: tuple[CacheGroup, ...]
    group_of_layer: tuple[int, ...]
    max_model_len: int
    kv_bytes: int
    host_bytes: int = 0

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    @property
    def num_blocks(self) -> int:
        """Usable pages of the first group, the one that bounds how long a request may be."""
        return self.groups[0].num_blocks

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def blocks_per_seat(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class _Demand:
    """What one cache group asks of the pool. most_blocks: beyond them more would lie idle; None for the first group,
    which is given what there is. block_bytes: of a page over all layers of the group."""

    window: int | None
    block_bytes: int
    most_blocks: int | None

    def num_blocks(self, num_first: int) -> int:
        """Pages, where the first group has num_first. No group needs more than the one that keeps most."""
        return num_first if self.most_blocks is None else min(num_first, self.most_blocks)


def size_pool(
    config: EngineConfig,
    specs: Sequence[KvSpec],
    model_len: int,
    ctx: BuildContext,
    agree: Callable[[int], int] = lambda num_blocks: num_blocks,
) -> PoolSize:
    """How large the pools of a rank are. The first group has cache.kv_tokens; else all together take memory_fraction of
    the available memory, but never more than all seats could fill. agree: the pages of the first group that all ranks
    have room for, given this one's. Each group has host pages for cache.host_tokens. Raises CapacityError when one
    request would not fit, ConfigError when the model is shorter than max_model_len asks."""
    wanted_len = config.model.max_model_len
    if wanted_len is not None and wanted_len > model_len:
        raise ConfigError(
            f"--max-model-len {wanted_len} exceeds the {model_len} tokens that the model was made for; "
            f"give at most {model_len}"
        )
    block_size = placement.block_size(config.cache, torch.device(ctx.device))
    windows, group_of_layer = group_layers(specs)
    demands = _demands(config, specs, (windows, group_of_layer), ctx)
    request_len = wanted_len if wanted_len is not None else model_len
    if config.cache.kv_tokens is not None:
        num_first = min(config.cache.kv_tokens // block_size, NUM_BLOCKS_MAX)
    else:
        num_first = _default_blocks(config, request_len, demands, ctx)
    num_first = agree(num_first)
    needed = wanted_len if wanted_len is not None else min(model_len, 2 * block_size)
    if num_first * block_size < needed:
        token_bytes = sum(spec.token_bytes(ctx.kv_dtype) for spec in specs)
        raise CapacityError(_too_small(num_first * block_size, needed, token_bytes, ctx))
    num_host = config.cache.host_tokens // block_size
    return PoolSize(
        tuple(_cache_group(demand, demand.num_blocks(num_first), num_host, block_size) for demand in demands),
        group_of_layer,
        min(request_len, num_first * block_size),
        _pool_bytes(demands, num_first),
        (num_host + 1) * sum(demand.block_bytes for demand in demands) if num_host else 0,
    )


def group_layers(specs: Sequence[KvSpec]) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """The window of each cache group, furthest look back first (None looks back on all), and the group of each layer.
    A model without attention layers has one group, which then costs nothing."""
    windows = sorted({spec.window for spec in specs}, key=lambda window: -math.inf if window is None else -window)
    return tuple(windows) or (None,), tuple(windows.index(spec.window) for spec in specs)


def allocate(size: PoolSize, specs: Sequence[KvSpec], ctx: BuildContext) -> tuple[KvLayer, ...]:
    """Zeroed pages for every layer. The system commits CPU memory only as pages are written, long after a pool that
    is too large could have been refused: hence the check, which the host tier is part of."""
    device, host = torch.device(ctx.device), torch.device("cpu")
    on_host = size.kv_bytes if device == host else 0
    available = available_memory_bytes(device)
    if size.kv_bytes > available:
        raise CapacityError(
            f"out of memory: the KV pool of {size.num_tokens} tokens needs {_mib(size.kv_bytes)} MiB and "
            f"{available >> 20} MiB are available; lower --kv-tokens or --memory-fraction"
        )
    available = available_memory_bytes(host) - on_host
    if size.host_bytes > available:
        raise CapacityError(
            f"out of memory: the host tier of {size.groups[0].num_host_blocks * size.block_size} tokens needs "
            f"{_mib(size.host_bytes)} MiB and {max(0, available) >> 20} MiB are available; lower --host-kv-tokens"
        )
    return tuple(
        _allocate_layer(size.groups[group], spec, ctx, group)
        for spec, group in zip(specs, size.group_of_layer, strict=True)
    )


def page_groups(size: PoolSize, layers: Sequence[KvLayer]) -> tuple[PageGroup, ...]:
    """The pages of each group, as block movers see them."""
    return tuple(
        PageGroup(
            tuple(_as_stored(t) for layer in layers if layer.group == g for t in layer.tensors), group.num_host_blocks
        )
        for g, group in enumerate(size.groups)
    )


def _as_stored(pages: torch.Tensor) -> torch.Tensor:
    """The pages with their dimensions in the order of memory, so that whole pages are copied in one piece."""
    return pages if pages.is_contiguous() else pages.transpose(1, 2)


def copy_pages(layers: Sequence[KvLayer], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole pages inside the pool of these layers."""
    for layer in layers:
        for tensor in map(_as_numbers, layer.tensors):
            tensor[targets] = tensor[sources]


def zero_pages(layers: Sequence[KvLayer], pages: torch.Tensor) -> None:
    """Clear whole pages of these layers."""
    for layer in layers:
        for tensor in map(_as_numbers, layer.tensors):
            tensor[pages] = 0


def _as_numbers(pages: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can pick from."""
    return pages.view(torch.uint8) if pages.dtype is torch.float8_e4m3fn else pages


def _demands(
    config: EngineConfig,
    specs: Sequence[KvSpec],
    grouping: tuple[tuple[int | None, ...], tuple[int, ...]],
    ctx: BuildContext,
) -> list[_Demand]:
    """What each group of group_layers asks for."""
    windows, group_of_layer = grouping
    block_bytes = [0] * len(windows)
    block_size = placement.block_size(config.cache, torch.device(ctx.device))
    for spec, group in zip(specs, group_of_layer, strict=True):
        block_bytes[group] += block_size * spec.token_bytes(ctx.kv_dtype)
    return [
        _Demand(window, block_bytes[g], None if g == 0 or window is None else _window_blocks(config, window, ctx))
        for g, window in enumerate(windows)
    ]


def _window_blocks(config: EngineConfig, window: int, ctx: BuildContext) -> int:
    """Pages that a window group can make use of. The planner charges each running sequence the blocks that its window
    may touch and seven more, and sets four margins aside, each for what one step writes before older blocks expire. The
    step budget may be measured later than this: its upper limit counts."""
    block_size = placement.block_size(config.cache, torch.device(ctx.device))
    window_blocks = -(-(window - 1) // block_size) + _BLOCKS_BESIDE_WINDOW
    step_blocks = -(-step_tokens(config.scheduler, torch.device(ctx.device), None) // block_size) + 1
    return config.scheduler.max_num_seqs * window_blocks + _STEP_MARGINS * step_blocks


def _cache_group(demand: _Demand, num_blocks: int, num_host_blocks: int, block_size: int) -> CacheGroup:
    kind = GroupKind.FULL if demand.window is None else GroupKind.WINDOW
    return CacheGroup(kind, block_size, num_blocks, num_host_blocks, demand.window)


def _allocate_layer(group: CacheGroup, spec: KvSpec, ctx: BuildContext, number: int) -> KvLayer:
    k = _pages(group, spec, ctx)
    if spec.value_dim is not None:
        return KvLayer(k, k[..., : spec.value_dim], number, v_in_k=True)
    return KvLayer(k, _pages(group, spec, ctx), number)


def _pages(group: CacheGroup, spec: KvSpec, ctx: BuildContext) -> torch.Tensor:
    """As KvLayer has them; the tokens of a head lie together, a run that is read at once."""
    extent = (group.num_blocks + 1, spec.num_kv_heads, group.block_size, page_dim(spec.head_dim, ctx.kv_dtype))
    return _zeros(extent, ctx).transpose(1, 2)


def _zeros(extent: tuple[int, ...], ctx: BuildContext) -> torch.Tensor:
    if torch.device(ctx.device).type != "cpu":
        return torch.zeros(extent, dtype=ctx.kv_dtype, device=ctx.device)
    # torch.zeros writes every page, which takes half a minute for a pool of 11 GB; numpy's comes zeroed and untouched.
    untouched = np.zeros(math.prod(extent) * ctx.kv_dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(ctx.kv_dtype).view(extent)


def _default_blocks(config: EngineConfig, request_len: int, demands: Sequence[_Demand], ctx: BuildContext) -> int:
    """Pages of the first group, so that all groups together stay within the memory that may be taken."""
    device = torch.device(ctx.device)
    blocks_per_seat = -(-request_len // placement.block_size(config.cache, device))
    most = min(config.scheduler.max_num_seqs * blocks_per_seat, NUM_BLOCKS_MAX)
    memory = int(available_memory_bytes(device) * placement.memory_fraction(config.cache, device))
    fitting = bisect.bisect_right(range(most + 1), memory, key=lambda num_first: _pool_bytes(demands, num_first))
    return max(0, fitting - 1)


def _pool_bytes(demands: Sequence[_Demand], num_first: int) -> int:
    return sum((demand.num_blocks(num_first) + 1) * demand.block_bytes for demand in demands)


def _too_small(num_tokens: int, needed: int, token_bytes: int, ctx: BuildContext) -> str:
    return (
        f"the KV pool holds {num_tokens} tokens but one request may need {needed} "
        f"({_mib(needed * token_bytes)} MiB in {dtype_name(ctx.kv_dtype)}); raise --kv-tokens or --memory-fraction, "
        "or lower --max-model-len"
    )


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // (1 << 20))
