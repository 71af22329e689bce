# SPDX-License-Identifier: Apache-2.0
"""Floors of packed weights: bytes of the file, operations on bytes for matrices and on float32 for attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.bench.packed_floor import Floors, Peaks, kv_bytes, tensor_bytes
from tokenspeed.bench.pairs import Cell
from tokenspeed.checkpoints import TensorInfo
from tokenspeed.core.errors import ConfigError

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
INFOS = {
    "head": TensorInfo((256, 64), "q8_0"),
    "matrix": TensorInfo((64, 1024), "q4_1"),
    "norm": TensorInfo((64,), "f32"),
}


@dataclass
class Opened:
    """A source whose file holds INFOS."""

    found: Mapping[str, TensorInfo] | None
    config: Mapping[str, Any]
    path: Path = Path("some.gguf")
    closed: int = 0

    def weights(self) -> Opened:
        return self

    def infos(self) -> Mapping[str, TensorInfo] | None:
        return self.found

    def close(self) -> None:
        self.closed += 1


def peaks(read: float = 1e9, float_op: float = 1e9, byte_op: float = 2e9) -> Peaks:
    return Peaks(read, float_op, byte_op, "avx2", 2)


NUM_BYTES = 256 * 64 // 32 * 34 + 64 * 1024 // 32 * 20 + 64 * 4


def test_bytes_are_those_of_the_file() -> None:
    assert [tensor_bytes(info) for info in INFOS.values()] == [256 * 2 * 34, 64 * 32 * 20, 256]


def test_the_mapped_file_is_let_go() -> None:
    source = Opened(INFOS, CONFIG)
    Floors.of(source, peaks())  # type: ignore[arg-type]
    assert source.closed == 1


def test_a_file_without_weights_has_no_floor() -> None:
    with pytest.raises(ConfigError, match=r"some\.gguf"):
        Floors.of(Opened(None, CONFIG), peaks())  # type: ignore[arg-type]


def test_decode_reads_the_file_and_the_cache_of_each_row() -> None:
    floors = Floors.of(Opened(INFOS, CONFIG), peaks(byte_op=1e15, float_op=1e15))  # type: ignore[arg-type]
    kv = kv_bytes(CONFIG)
    assert kv == 2 * 2 * 2 * 16 * 2
    assert floors.tokens_s(Cell(100, 8, 1)) == pytest.approx(1e9 / (NUM_BYTES + 104 * kv))
    assert floors.tokens_s(Cell(100, 8, 4)) == pytest.approx(4e9 / (NUM_BYTES + 4 * 104 * kv))


def test_a_prompt_multiplies_bytes_and_attends_in_float32() -> None:
    floors = Floors.of(Opened(INFOS, CONFIG), peaks(read=1e15))  # type: ignore[arg-type]
    num_dense = 64 * 1024 + 64
    attention = 2 * 4 * 4 * 16 * (10 * 11 // 2)
    seconds = (2 * num_dense * 10 + 2 * 256 * 64) / 2e9 + attention / 1e9
    assert floors.tokens_s(Cell(10, 0, 1)) == pytest.approx(10 / seconds)
    assert floors.tokens_s(Cell(10, 0, 3)) == pytest.approx(10 / seconds)


def test_without_the_program_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make bench-cpu"):
        Peaks.measure(tmp_path / "peaks", 2)


def test_peaks_are_read_from_what_the_program_prints(tmp_path: Path) -> None:
    program = tmp_path / "peaks"
    program.write_text(
        '#!/bin/sh\necho "{\\"read_bytes_s\\": 1e9, \\"float_op_s\\": 2e9, \\"byte_op_s\\": 3e9, '
        '\\"byte_kind\\": \\"avx2\\", \\"num_threads\\": $1}"\n'
    )
    program.chmod(0o755)
    assert Peaks.measure(program, 4) == Peaks(1e9, 2e9, 3e9, "avx2", 4)
