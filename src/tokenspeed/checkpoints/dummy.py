# SPDX-License-Identifier: Apache-2.0
"""Random weights at whatever shapes the model asks for, the same on each run. Knows no model and no file."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from tokenspeed.checkpoints import Repeated

# Values are drawn once for this many elements and repeated. A prime, so that no two rows of a matrix are equal.
_PERIOD = 1_000_003


class DummyWeights:
    """Any name exists. Norms are ones, biases zeros, matrices normal with a variance of one over their inputs."""

    def infos(self) -> None:
        """Any name may be asked for."""
        return None

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic] | Repeated:
        """f32 values that depend on the name and the shape alone."""
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return np.full(shape, fill, np.float32)
        size = int(np.prod(shape, dtype=np.int64))
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        values = np.random.default_rng(seed).standard_normal(min(size, _PERIOD), np.float32)
        values *= np.float32(1.0 / np.sqrt(max(1, shape[-1])))
        return Repeated(values, shape)

    def close(self) -> None:
        """Nothing to let go."""
