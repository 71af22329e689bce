# SPDX-License-Identifier: Apache-2.0
"""The GGUF container: sane files parse, broken ones are refused in one line and at once."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from tokenspeed.checkpoints import gguf as container
from tokenspeed.checkpoints.gguf import check_tensors, read_gguf
from tokenspeed.core.errors import CheckpointError, StartError, UnsupportedModelError


def write_small(path: Path) -> bytes:
    """A file with every kind of value and two tensors."""
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("small.number", 7)
    writer.add_float32("small.real", 0.5)
    writer.add_bool("small.flag", True)
    writer.add_string("small.text", "grün 🚆")
    writer.add_array("small.texts", ["a", "", "ccc"])
    writer.add_array("small.numbers", [1, -2, 3])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.zeros((4, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def head(num_tensors: int = 0, num_pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def name_bytes(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(StartError) as caught:
        check_tensors(read_gguf(path))
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_values_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_small(path)
    gguf = read_gguf(path)
    check_tensors(gguf)
    assert gguf.metadata["small.number"] == 7
    assert gguf.metadata["small.real"] == 0.5
    assert gguf.metadata["small.flag"] is True
    assert gguf.metadata["small.text"] == "grün 🚆"
    assert gguf.metadata["small.texts"] == ("a", "", "ccc")
    assert gguf.metadata["small.numbers"] == (1, -2, 3)
    first, second = gguf.tensors["first"], gguf.tensors["second"]
    assert (first.shape, first.type_name) == ((2, 3), "F32")
    assert (second.shape, second.type_name) == ((4, 32), "Q8_0")
    np.testing.assert_array_equal(gguf.raw(first).view(np.float32), np.arange(6))


def test_arrays_are_read_when_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens a file for its tensors reads no vocabulary, but knows its size."""
    write_small(tmp_path / "small.gguf")
    metadata = read_gguf(tmp_path / "small.gguf").metadata
    assert [metadata.num_items(key) for key in ("small.texts", "small.numbers", "small.text", "none")] == [3, 3, 0, 0]
    assert ("small.texts" in metadata, "none" in metadata) == (True, False)
    assert set(metadata) == set(dict(metadata))
    assert len(metadata) == len(dict(metadata))
    monkeypatch.setattr(container, "_read_strings", lambda *_: ("read", "now"))
    assert metadata["small.texts"] == ("read", "now")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "GGUF"),
        (b"PK\x03\x04 something else", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (head(version=1), "version 1"),
        (head(version=0x03000000), "big-endian"),
        (head(num_tensors=1 << 60), "tensors"),
        (head(num_pairs=1 << 60), "metadata pairs"),
        (head(num_pairs=1) + struct.pack("<Q", 1 << 62), "truncated or corrupt"),
        (head(num_pairs=1) + name_bytes("k") + struct.pack("<I", 99), "value type 99"),
        (head(num_pairs=1) + name_bytes("k") + struct.pack("<IIQ", 9, 4, 1 << 61), "numbers"),
        (head(num_pairs=1) + name_bytes("k") + struct.pack("<IIQ", 9, 8, 1 << 40), "items"),
        (head(num_pairs=1) + name_bytes("k") + struct.pack("<IIQQ", 9, 8, 1, 50), "string 0"),
        (head(num_pairs=1) + name_bytes("k") + struct.pack("<IIQIQIQIQIQ", 9, 9, 1, 9, 1, 9, 1, 9, 1, 9, 1), "nested"),
        (head(num_pairs=2) + 2 * (name_bytes("k") + struct.pack("<IB", 0, 1)), "twice"),
        (head(num_tensors=1) + name_bytes("t") + struct.pack("<I", 9), "9 dimensions"),
        (head(num_tensors=1) + name_bytes("t") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0), "dimensions"),
        (head(num_tensors=1) + name_bytes("t") + struct.pack("<IQIQ", 1, 64, 0, 0), "truncated GGUF: tensor t"),
        (head(num_tensors=1) + name_bytes("t") + struct.pack("<IQIQ", 1, 64, 0, 7), "aligned"),
        (head(num_tensors=1) + name_bytes("t") + struct.pack("<IQIQ", 1, 33, 8, 0), "multiple of the 32"),
        (head(num_pairs=1) + name_bytes("general.alignment") + struct.pack("<II", 4, 0), "alignment"),
    ],
)
def test_broken_heads(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refusal(tmp_path / "broken.gguf", data)


@pytest.mark.parametrize(("type_id", "name"), [(23, "IQ4_XS"), (30, "BF16"), (39, "MXFP4"), (77, "number 77")])
def test_an_unread_type_is_refused_by_name(tmp_path: Path, type_id: int, name: str) -> None:
    data = head(num_tensors=1) + name_bytes("blk.0.attn_q.weight") + struct.pack("<IQIQ", 1, 256, type_id, 0)
    path = tmp_path / "type.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError) as caught:
        check_tensors(read_gguf(path))
    types = "F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K"
    for word in ("blk.0.attn_q.weight", name, f"supported tensor types: {types}"):
        assert word in str(caught.value)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = write_small(tmp_path / "small.gguf")
    path = tmp_path / "cut.gguf"
    # The file ends in padding of the last tensor, which nobody misses.
    tensor_end = read_gguf(tmp_path / "small.gguf").data_start + 32 + 4 * 34
    for length in range(tensor_end):
        refusal(path, whole[:length])


def test_random_damage_never_hangs_or_crashes(tmp_path: Path) -> None:
    whole = write_small(tmp_path / "small.gguf")
    path, rng = tmp_path / "damaged.gguf", random.Random(7)
    begin_s, num_refused = time.monotonic(), 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(data)
        try:
            check_tensors(read_gguf(path))
        except (CheckpointError, UnsupportedModelError):
            num_refused += 1
    assert num_refused > 100
    assert time.monotonic() - begin_s < 20


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "nothing.gguf")
