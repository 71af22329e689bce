# SPDX-License-Identifier: Apache-2.0
"""Processes with a CUDA device each. Sums are the library's own, in an order of its choice.

Exchanges run on the device, behind the caller: what is lost shows where a result is read on the host (in joining, in
gather and all_to_all), or when torch's watchdog, which may take a minute longer than the timeout, ends the process.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d, is_nccl_available
from torch.distributed.distributed_c10d import Store

from tokenspeed.kernels.ops.collective import Communicator, Rendezvous
from tokenspeed.kernels.ops.collective._process_groups import Carrier, ProcessGroup, ProcessRanks
from tokenspeed.kernels.registry import Band, KernelContext, Ok, Reason, Solution, Support


def supports(ctx: KernelContext) -> Support:
    if ctx.device != "cuda":
        return Reason(f"carries tensors of cuda devices, not of {ctx.device}")
    return Ok() if is_nccl_available() else Reason("this torch is built without nccl")


def join(rendezvous: Rendezvous) -> Communicator:
    """A device without an index is this rank's own on its host, when all hosts have as many devices."""
    device = torch.device(rendezvous.device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", rendezvous.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return ProcessRanks(rendezvous, Carrier(_connect, _leave, _NcclGroup), device)


class _NcclGroup(ProcessGroup):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        with self._ranks.peers_answer():
            if self._size > 1 and x.numel():
                self._process_group.allreduce([total]).wait()
        return total

    def reduce_scatter(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        self._check(counts, len(x), sum(counts))
        most = max(counts)
        padded = x.contiguous()
        if min(counts) < most:
            padded = x.new_zeros(self._size, most, *x.shape[1:])
            for run, rows in zip(padded, torch.split(x, list(counts)), strict=True):
                run[: len(rows)] = rows
        mine = x.new_empty(most, *x.shape[1:])
        with self._ranks.peers_answer():
            if self._size == 1:
                mine.copy_(x)
            elif mine.numel():
                self._process_group._reduce_scatter_base(mine, padded.view(-1, *x.shape[1:])).wait()
        return mine[: counts[self._place]]


def _connect(store: Store, place: int, size: int, timeout: datetime.timedelta) -> Any:
    backend: Any = distributed_c10d.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout
    process_group = backend(store, place, size, options)
    process_group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return process_group


def _leave(process_group: Any) -> None:
    process_group.abort()


SOLUTION = Solution("nccl", Band.PERFORMANT, supports, lambda _ctx: join)
