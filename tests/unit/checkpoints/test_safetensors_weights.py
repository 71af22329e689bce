# SPDX-License-Identifier: Apache-2.0
"""Safetensors: single files and shards load; missing, stray, stale, truncated and corrupt ones are told apart."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tokenspeed.checkpoints.safetensors import INDEX_NAME, open_safetensors
from tokenspeed.core.errors import CheckpointError, StartError, UnsupportedModelError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
A, B = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.ones(4, dtype=torch.float16)


def write_raw(path: Path, header: object, num_data_bytes: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_data_bytes))


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> None:
    save_file({"a": A}, folder / FIRST)
    save_file({"b": B}, folder / SECOND)
    index = {"metadata": {"total_size": 32}, "weight_map": weight_map or {"a": FIRST, "b": SECOND}}
    (folder / INDEX_NAME).write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    with pytest.raises(StartError) as caught:
        open_safetensors(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_every_readable_type(tmp_path: Path) -> None:
    half = torch.tensor([[1.0, -2.5], [3.25, 0.0]])
    tensors = {
        "f32": half,
        "f16": half.half(),
        "bf16": half.bfloat16(),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(7.0),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = open_safetensors(tmp_path)
    infos = weights.infos()
    assert {name: (info.shape, info.dtype) for name, info in infos.items()} == {
        "f32": ((2, 2), "f32"),
        "f16": ((2, 2), "f16"),
        "bf16": ((2, 2), "bf16"),
        "none": ((0, 4), "f32"),
        "one": ((), "f32"),
    }
    np.testing.assert_array_equal(weights.read("f32", (2, 2)), half.numpy())
    np.testing.assert_array_equal(weights.read("f16", (2, 2)), half.half().numpy())
    bits = weights.read("bf16", (2, 2))
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy(), half.numpy())
    assert weights.read("none", (0, 4)).shape == (0, 4)
    assert weights.read("one", ()) == np.float32(7)


def test_read_checks_name_shape_and_type(tmp_path: Path) -> None:
    save_file({"a": A, "ids": torch.arange(3)}, tmp_path / "model.safetensors")
    weights = open_safetensors(tmp_path)
    assert weights.infos()["ids"].dtype == "i64"
    with pytest.raises(CheckpointError, match="tensor c is missing"):
        weights.read("c", (1,))
    with pytest.raises(CheckpointError, match=r"has shape \(2, 3\); the model needs \(3, 2\)"):
        weights.read("a", (3, 2))
    with pytest.raises(UnsupportedModelError, match=r"ids is of type I64.*F32, F16, BF16"):
        weights.read("ids", (3,))


def test_single_and_sharded_are_equal(tmp_path: Path) -> None:
    """LD-2 (a) and (b)."""
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file({"a": A, "b": B}, single / "model.safetensors")
    write_shards(sharded)
    one, two = open_safetensors(single), open_safetensors(sharded)
    assert one.infos() == two.infos()
    for name, info in one.infos().items():
        np.testing.assert_array_equal(one.read(name, info.shape), two.read(name, info.shape))


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    """LD-2 (c)."""
    write_shards(tmp_path)
    (tmp_path / SECOND).unlink()
    message = refusal(tmp_path)
    assert SECOND in message
    assert "not in the folder" in message


def test_a_stray_shard_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LD-2 (d)."""
    write_shards(tmp_path)
    save_file({"a": A + 100, "c": B}, tmp_path / "model-00003-of-00003.safetensors")
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        weights = open_safetensors(tmp_path)
    assert "ignoring model-00003-of-00003.safetensors" in caplog.text
    assert set(weights.infos()) == {"a", "b"}
    np.testing.assert_array_equal(weights.read("a", (2, 3)), A.numpy())


def test_a_stray_beside_a_single_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"z": B}, tmp_path / "adapter.safetensors")
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        assert set(open_safetensors(tmp_path).infos()) == {"a"}
    assert "adapter.safetensors" in caplog.text


def test_a_stale_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shards(tmp_path, {"a": FIRST, "b": FIRST})
    assert f"stale index: tensor b is not in {FIRST}" in refusal(tmp_path)
    # A tensor that the index forgot is still a tensor of the checkpoint.
    save_file({"a": A, "extra": B}, tmp_path / FIRST)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        assert set(open_safetensors(tmp_path).infos()) == {"a", "b", "extra"}
    assert "extra" in caplog.text


def test_a_missing_index(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    assert set(open_safetensors(tmp_path).infos()) == {"a", "b"}
    save_file({"a": B}, tmp_path / SECOND)
    assert "tensor a is in both" in refusal(tmp_path)
    (tmp_path / SECOND).unlink()
    save_file({"b": B}, tmp_path / "model-00003-of-00003.safetensors")
    assert "add the index" in refusal(tmp_path)
    (tmp_path / FIRST).unlink()
    save_file({"b": B}, tmp_path / "model-00002-of-00003.safetensors")
    assert "model-00001-of-00003.safetensors missing" in refusal(tmp_path)


@pytest.mark.parametrize(
    "index", [b"{", b"[]", b"{}", b'{"weight_map": {"a": "../a.safetensors"}}', b'{"weight_map": {"a": 1}}']
)
def test_a_broken_index(tmp_path: Path, index: bytes) -> None:
    write_shards(tmp_path)
    (tmp_path / INDEX_NAME).write_bytes(index)
    assert INDEX_NAME in refusal(tmp_path)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "truncated" in refusal(tmp_path)


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"not json", "corrupt safetensors header"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "corrupt safetensors header"),
        (b'{"a": {}, "a": {}}', "twice"),
        ({"a": {}}, "lacks a dtype"),
        ({"a": entry([2], 0, 8) | {"data_offsets": [0]}}, "lacks a dtype"),
        ({"a": entry([-2], 0, 8)}, "lacks a dtype"),
        ({"a": entry([2], 0, 8, "F3")}, "unknown type F3"),
        ({"a": entry([3], 0, 8)}, "needs 12 bytes, its offsets span 8"),
        ({"a": entry([2], 8, 0)}, "span -8"),
        ({"a": entry([16], 0, 64)}, "truncated safetensors: tensor a"),
        ({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, "tensors a and b overlap"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: object, words: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, 32)
    assert words in refusal(tmp_path)


def test_an_absurd_header_length(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "not a safetensors file" in refusal(tmp_path)
