# SPDX-License-Identifier: Apache-2.0
"""Pages kept in host memory: a store copies whole pages there, a load copies them back.

Pages of a CPU device are copied at once. Those of a CUDA device go through pinned memory on a stream of their own,
with an event a lease, so that a step never waits for them.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed.core.plan import Int32Array
from tokenspeed.transfer import FinishedMove, PageGroup

Bytes = NDArray[np.uint8]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Run:
    """num_pages neighbouring pages that move alike."""

    group: int
    to_host: bool
    device_page: int
    host_page: int
    num_pages: int

    @property
    def on_device(self) -> slice:
        return slice(self.device_page, self.device_page + self.num_pages)

    @property
    def on_host(self) -> slice:
        return slice(self.host_page, self.host_page + self.num_pages)

    def joined(self, after: _Run) -> _Run | None:
        """Both as one, where `after` begins at the end of this one on either side."""
        num_pages = self.num_pages
        end = (self.group, self.to_host, self.device_page + num_pages, self.host_page + num_pages)
        if end != (after.group, after.to_host, after.device_page, after.host_page):
            return None
        return dataclasses.replace(self, num_pages=num_pages + after.num_pages)


class HostMover:
    """See transfer.BlockMover. Page 0 of the host is never used, as page 0 of the device."""

    def __init__(self, groups: Sequence[PageGroup]) -> None:
        tensors = [tensor for group in groups for tensor in group.tensors]
        assert len({tensor.device for tensor in tensors}) <= 1, "the pages are on several devices"
        self._groups = tuple(groups)
        self._pairs = tuple(
            tuple((tensor, _host_pages(tensor, group.num_host_blocks)) for tensor in group.tensors) for group in groups
        )
        self._stream = torch.Stream(tensors[0].device) if tensors and tensors[0].is_cuda else None
        self._byte_pairs = () if self._stream is not None else _byte_pairs(self._pairs)
        self._finished: list[FinishedMove] = []
        self._pending: list[tuple[int, torch.Event]] = []

    def start(self, load: Int32Array, store: Int32Array) -> None:
        for lease, runs in _by_lease(load, store).items():
            try:
                self._start(lease, runs)
            except Exception:  # noqa: BLE001 - whatever went wrong fails this transfer, never the process
                _log.exception("transfer %d failed", lease)
                self._finished.append((lease, False))

    def poll(self) -> tuple[FinishedMove, ...]:
        pending, self._pending = self._pending, []
        for lease, event in pending:
            try:
                if event.query():
                    self._finished.append((lease, True))
                else:
                    self._pending.append((lease, event))
            except Exception:  # noqa: BLE001 - as above: an asynchronous failure shows here
                _log.exception("transfer %d failed", lease)
                self._finished.append((lease, False))
        finished, self._finished = self._finished, []
        return tuple(finished)

    def _start(self, lease: int, runs: Sequence[_Run]) -> None:
        for run in runs:
            self._check(run)
        if self._stream is None:
            self._copy_at_once(runs)
            self._finished.append((lease, True))
            return
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))
        with self._stream:
            self._copy_in_stream(runs)
        event = self._stream.record_event()
        self._pending.append((lease, event))

    def _check(self, run: _Run) -> None:
        """All runs of a lease are looked at before the first copy, so that a failed lease has moved nothing."""
        if not 0 <= run.group < len(self._groups):
            raise ValueError(f"cache group {run.group} of {len(self._groups)}")
        group = self._groups[run.group]
        if not 0 < run.host_page <= group.num_host_blocks - run.num_pages + 1:
            raise ValueError(f"{run} is outside of {group.num_host_blocks} host blocks")
        num_device_blocks = min((len(tensor) - 1 for tensor in group.tensors), default=run.device_page + run.num_pages)
        if not 0 < run.device_page <= num_device_blocks - run.num_pages + 1:
            raise ValueError(f"{run} is outside of {num_device_blocks} device blocks")

    def _copy_at_once(self, runs: Sequence[_Run]) -> None:
        for run in runs:
            for device, host in self._byte_pairs[run.group]:
                if run.to_host:
                    host[run.on_host] = device[run.on_device]
                else:
                    device[run.on_device] = host[run.on_host]

    def _copy_in_stream(self, runs: Sequence[_Run]) -> None:
        for run in runs:
            for device, host in self._pairs[run.group]:
                if run.to_host:
                    host[run.on_host].copy_(device[run.on_device], non_blocking=True)
                else:
                    device[run.on_device].copy_(host[run.on_host], non_blocking=True)


def build(groups: Sequence[PageGroup]) -> HostMover:
    """Host pages for these groups."""
    return HostMover(groups)


def _by_lease(load: Int32Array, store: Int32Array) -> dict[int, list[_Run]]:
    """The runs of each lease, neighbours joined: one copy of ten pages costs little more than one of a page."""
    by_lease: dict[int, list[_Run]] = {}
    for lease, page in (*_pages(load, to_host=False), *_pages(store, to_host=True)):
        runs = by_lease.setdefault(lease, [])
        joined = runs[-1].joined(page) if runs else None
        if joined is None:
            runs.append(page)
        else:
            runs[-1] = joined
    return by_lease


def _pages(rows: Int32Array, *, to_host: bool) -> Iterator[tuple[int, _Run]]:
    for lease, group, device_page, host_page in rows.tolist():
        yield lease, _Run(group, to_host, device_page, host_page, 1)


def _byte_pairs(
    pairs: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
) -> tuple[tuple[tuple[Bytes, Bytes], ...], ...]:
    """The same memory as arrays of bytes: a page is small, and numpy copies it in less than half of torch's time."""
    return tuple(
        tuple((device.view(torch.uint8).numpy(), host.view(torch.uint8).numpy()) for device, host in group)
        for group in pairs
    )


def _host_pages(device_pages: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """One page more than num_blocks, since page 0 is unused. Pageable memory is committed only as pages are written;
    pinned memory at once."""
    extent = (num_blocks + 1, *device_pages.shape[1:])
    if device_pages.is_cuda:
        return torch.zeros(extent, dtype=device_pages.dtype, pin_memory=True)
    untouched = np.zeros(math.prod(extent) * device_pages.dtype.itemsize, np.uint8)
    return torch.from_numpy(untouched).view(device_pages.dtype).view(extent)
