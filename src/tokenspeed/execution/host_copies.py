# SPDX-License-Identifier: Apache-2.0
"""Small arrays on their way to the device, and results on their way back, without anybody waiting for the device.

Copies of a CUDA device go through pinned memory in the order of the current stream. On the CPU nothing is copied.
Knows no step.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def uploaded(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a contiguous tensor on the device. On the CPU it is the array's own memory where that is contiguous:
    kernels take the last dimension to be, which a slice or a transposed pick need not be."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host. Made on the thread that computes them; wait may be called from any, and
    often."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self._event: torch.cuda.Event | None = None
        self._here = tensors
        if tensors and tensors[0].is_cuda:
            self._here = tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors)
            for here, there in zip(self._here, tensors, strict=True):
                here.copy_(there, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> tuple[NDArray[Any], ...]:
        """The tensors as arrays. Raises what the device raises."""
        with self._lock:
            if self._event is not None:
                self._event.synchronize()
                self._event = None
        return tuple(tensor.numpy() for tensor in self._here)
