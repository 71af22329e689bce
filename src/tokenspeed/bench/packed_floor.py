# SPDX-License-Identifier: Apache-2.0
"""The least time that a processor needs for a piece of work on a file of packed weights: bytes over what it was seen to
read, operations over what it was seen to compute. Knows no engine."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.bench.floor import ModelCost
from tokenspeed.bench.pairs import Cell
from tokenspeed.checkpoints import ModelSource, TensorInfo
from tokenspeed.core.errors import ConfigError
from tokenspeed.kernels.ops.packed_linear import FORMATS

_PLAIN = {"f32": 4, "f16": 2, "bf16": 2}
_KV_ITEMSIZE = 2
"""Of the smallest cache that either engine has by default."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """In a second, by all threads together: bytes read from memory, and operations on float32 and on bytes."""

    read_bytes_s: float
    float_op_s: float
    byte_op_s: float
    byte_kind: str
    num_threads: int

    @classmethod
    def measure(cls, program: Path, num_threads: int) -> Peaks:
        """By the program that is built of peaks.cc. Raises ConfigError where it is not."""
        if not program.exists():
            raise ConfigError(f"there is no {program}: `make bench-cpu` builds it")
        done = subprocess.run([program, str(num_threads)], capture_output=True, text=True, check=True, timeout=300)
        return cls(**json.loads(done.stdout))

    def as_json(self) -> dict[str, Any]:
        """As it is kept."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        rates = f"{self.byte_op_s / 1e9:.0f} G on bytes ({self.byte_kind}) and {self.float_op_s / 1e9:.0f} G on float32"
        return f"{self.num_threads} threads: {self.read_bytes_s / 1e9:.1f} GB/s read, operations a second: {rates}"


@dataclass(frozen=True, slots=True)
class Floors:
    """Of one model file."""

    cost: ModelCost
    peaks: Peaks

    @classmethod
    def of(cls, source: ModelSource, peaks: Peaks) -> Floors:
        """Raises ConfigError where the file does not say what it holds."""
        weights = source.weights()
        try:
            infos = weights.infos()
        finally:
            weights.close()
        if not infos:
            raise ConfigError(f"{source.path} has no weights")
        num_parameters = sum(math.prod(info.shape) for info in infos.values())
        num_bytes = sum(map(tensor_bytes, infos.values()))
        cost = ModelCost.of(source.config, num_parameters, "float32", kv_bytes(source.config))
        return cls(dataclasses.replace(cost, itemsize=num_bytes / num_parameters), peaks)

    def tokens_s(self, cell: Cell) -> float:
        """At most: weights are bytes to multiply with, attention is float32."""
        if cell.num_tokens:
            context_lens = (cell.length + cell.num_tokens // 2,) * cell.batch
            return cell.batch / self._seconds(*self.cost.decode(context_lens), self._matrices.decode(context_lens)[1])
        num_bytes, operations = self.cost.prefill(cell.length)
        matrix_operations = self._matrices.prefill(cell.length)[1]
        seconds = self._seconds(num_bytes, cell.batch * operations, cell.batch * matrix_operations)
        return cell.batch * cell.length / seconds

    @property
    def _matrices(self) -> ModelCost:
        """The cost without that of attention."""
        return dataclasses.replace(self.cost, pair_flop=0)

    def _seconds(self, num_bytes: float, operations: float, matrix_operations: float) -> float:
        on_bytes_s = matrix_operations / max(self.peaks.byte_op_s, self.peaks.float_op_s)
        on_floats_s = (operations - matrix_operations) / self.peaks.float_op_s
        return max(num_bytes / self.peaks.read_bytes_s, on_bytes_s + on_floats_s)


def tensor_bytes(info: TensorInfo) -> int:
    """In the file."""
    num_inputs, num_bytes = FORMATS[info.dtype] if info.dtype in FORMATS else (1, _PLAIN[info.dtype])
    return math.prod(info.shape) // num_inputs * num_bytes


def kv_bytes(config: Any) -> float:
    """Of a token in all layers."""
    num_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // num_heads)
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    return 2.0 * int(config["num_hidden_layers"]) * num_kv_heads * head_dim * _KV_ITEMSIZE
