# SPDX-License-Identifier: Apache-2.0
"""Reads safetensors checkpoints: one file, or shards with an index. Knows the format; knows no model.

A file is a little-endian uint64 header length, a JSON header (name → dtype, shape, data_offsets) and the data. All
headers are read and checked when weights are opened, so a fault is found before serving.
"""

from __future__ import annotations

import json
import logging
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from tokenspeed.checkpoints import TensorInfo
from tokenspeed.core.errors import CheckpointError, UnsupportedModelError

INDEX_NAME = "model.safetensors.index.json"

_log = logging.getLogger("tokenspeed")

_HEADER_LEN = struct.Struct("<Q")
_HEADER_LEN_MAX = 100_000_000
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
# bfloat16 is unknown to numpy: its bit patterns are handed on.
_READABLE: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_NUMBERED_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where one tensor lies. begin: in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    data: mmap.mmap
    path: Path


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, sorted; empty when it has none."""
    return sorted(folder.glob("*.safetensors"))


def open_safetensors(folder: Path) -> SafetensorsWeights:
    """The weights of a folder. The index rules when there is one. Raises CheckpointError."""
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return SafetensorsWeights(folder, _read_indexed(folder, _read_index(index_path)))
    return SafetensorsWeights(folder, _read_unindexed(folder))


class SafetensorsWeights:
    """The tensors of one checkpoint, views of the mapped files."""

    def __init__(self, folder: Path, entries: dict[str, _Entry]) -> None:
        self._folder = folder
        self._entries = entries

    def infos(self) -> Mapping[str, TensorInfo]:
        """All tensors by name."""
        return {name: TensorInfo(entry.shape, entry.dtype.lower()) for name, entry in self._entries.items()}

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        """The tensor as f32, f16, or uint16 patterns of bf16; a read-only view."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing")
        if entry.shape != shape:
            raise CheckpointError(f"{entry.path}: tensor {name} has shape {entry.shape}; the model needs {shape}")
        if entry.dtype not in _READABLE:
            raise UnsupportedModelError(
                f"{entry.path}: tensor {name} is of type {entry.dtype}, which is not supported; "
                f"supported safetensors types: {', '.join(_READABLE)}"
            )
        size = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(entry.data, _READABLE[entry.dtype], size, entry.begin).reshape(shape)

    def read_bytes(self, name: str) -> NDArray[np.uint8]:
        """A tensor of bytes as it lies; a read-only view."""
        entry = self._entries[name]
        assert entry.dtype == "U8", f"tensor {name} is of type {entry.dtype}, not bytes"
        size = int(np.prod(entry.shape, dtype=np.int64))
        return np.frombuffer(entry.data, np.uint8, size, entry.begin).reshape(entry.shape)

    def close(self) -> None:
        """Forget the tensors; a map ends with the last view of it."""
        self._entries = {}


def _read_index(path: Path) -> dict[str, str]:
    """tensor name → shard file name."""
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: has no weight_map; it must map tensor names to shard files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: tensor {name} is in {shard!r}, which is not the name of a file beside it")
    return weight_map


def _read_indexed(folder: Path, weight_map: Mapping[str, str]) -> dict[str, _Entry]:
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (folder / shard).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder / INDEX_NAME}: {_listing(absent)} named by the index "
            f"{'is' if len(absent) == 1 else 'are'} not in the folder; fetch the missing shards"
        )
    strays = [path.name for path in weight_files(folder) if path.name not in shards]
    if strays:
        _log.warning("%s: ignoring %s, which the index does not name", folder, _listing(strays))
    headers = {shard: _read_header(folder / shard) for shard in shards}
    entries: dict[str, _Entry] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise CheckpointError(
                f"{folder / INDEX_NAME}: stale index: tensor {name} is not in {shard}, where the index says it is"
            )
        entries[name] = headers[shard][name]
    for shard, header in headers.items():
        surplus = [name for name in header if name not in entries]
        if surplus:
            _log.warning("%s: %s holds %s, which the index does not name", folder, shard, _listing(surplus))
        entries |= {name: header[name] for name in surplus}
    return entries


def _read_unindexed(folder: Path) -> dict[str, _Entry]:
    paths = weight_files(folder)
    if not paths:
        raise CheckpointError(f"{folder}: has no *.safetensors files")
    single = folder / "model.safetensors"
    if single in paths:
        strays = [path.name for path in paths if path != single]
        if strays:
            _log.warning("%s: ignoring %s beside model.safetensors", folder, _listing(strays))
        paths = [single]
    if len(paths) > 1:
        _require_whole_series(folder, paths)
    entries: dict[str, _Entry] = {}
    for path in paths:
        for name, entry in _read_header(path).items():
            if name in entries:
                raise CheckpointError(
                    f"{folder}: tensor {name} is in both {entries[name].path.name} and {path.name}, "
                    f"and there is no {INDEX_NAME} to say which counts"
                )
            entries[name] = entry
    return entries


def _require_whole_series(folder: Path, paths: list[Path]) -> None:
    """Several files without an index are believed only when their names number them completely."""
    matches = [_NUMBERED_SHARD.fullmatch(path.name) for path in paths]
    numbered = [match for match in matches if match]
    series = {(match[1], match[3]) for match in numbered}
    if len(numbered) < len(paths) or len(series) != 1:
        raise CheckpointError(
            f"{folder}: has {len(paths)} safetensors files but neither {INDEX_NAME} nor a model.safetensors; "
            "add the index"
        )
    stem, total = series.pop()
    have = {int(match[2]) for match in numbered}
    absent = [f"{stem}-{i:05d}-of-{total}.safetensors" for i in range(1, int(total) + 1) if i not in have]
    if absent:
        raise CheckpointError(f"{folder}: {_listing(absent)} missing; fetch the missing shards")


def _read_header(path: Path) -> dict[str, _Entry]:
    try:
        with path.open("rb") as file:
            prefix = file.read(_HEADER_LEN.size)
            if len(prefix) < _HEADER_LEN.size:
                raise CheckpointError(f"{path}: truncated safetensors: {len(prefix)} bytes hold no header")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    (header_len,) = _HEADER_LEN.unpack(prefix)
    data_start = _HEADER_LEN.size + header_len
    if header_len > _HEADER_LEN_MAX:
        raise CheckpointError(f"{path}: not a safetensors file: a header of {header_len} bytes")
    if data_start > len(data):
        raise CheckpointError(
            f"{path}: truncated safetensors: the header ends at byte {data_start}, the file at {len(data)}; "
            "fetch it again"
        )
    try:
        header = json.loads(data[_HEADER_LEN.size : data_start], object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: corrupt safetensors header: not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, data, data_start, (name, value)) for name, value in header.items()}
    _require_no_overlap(path, entries)
    return entries


def _entry(path: Path, data: mmap.mmap, data_start: int, item: tuple[str, object]) -> _Entry:
    name, value = item
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{path}: corrupt safetensors header: entry {name!r} lacks a dtype, shape or data_offsets"
        )
    if dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(f"{path}: tensor {name} is of unknown type {dtype}")
    begin, end = offsets
    num_bytes = _ITEM_BYTES[dtype]
    for dim in shape:
        num_bytes *= dim
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{path}: corrupt safetensors header: {name} ({dtype} {list(shape)}) needs {num_bytes} bytes, "
            f"its offsets span {end - begin}"
        )
    if data_start + end > len(data):
        raise CheckpointError(
            f"{path}: truncated safetensors: tensor {name} ends at byte {data_start + end}, "
            f"the file at {len(data)}; fetch it again"
        )
    return _Entry(dtype, tuple(shape), data_start + begin, data, path)


def _require_no_overlap(path: Path, entries: Mapping[str, _Entry]) -> None:
    last_end, last_name = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].begin):
        num_bytes = _ITEM_BYTES[entry.dtype]
        for dim in entry.shape:
            num_bytes *= dim
        if num_bytes and entry.begin < last_end:
            raise CheckpointError(f"{path}: corrupt safetensors header: tensors {last_name} and {name} overlap")
        last_end, last_name = max(last_end, entry.begin + num_bytes), name


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _listing(names: list[str]) -> str:
    """At most three names, then a count."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
