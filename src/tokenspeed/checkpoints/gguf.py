# SPDX-License-Identifier: Apache-2.0
"""Reads the GGUF container: metadata, tensor table, mapped bytes. Knows no architecture and no block maths.

Layout after the public specification: magic, version, tensor count, pair count, the pairs, the tensor table, then
the aligned tensor data; little-endian. Every length is checked against the file before it is believed.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.errors import CheckpointError, UnsupportedModelError

MetaValue = bool | int | float | str | tuple["MetaValue", ...]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PAIRS_MAX = 1 << 16
_TENSORS_MAX = 1 << 18
_DIMS_MAX = 4
_NAME_LEN_MAX = 1 << 16
_NESTING_MAX = 4
_ALIGNMENT_MAX = 1 << 20

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_STRUCTS = {kind: struct.Struct(code) for kind, code in _SCALARS.items()}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

# Elements and bytes of one block of each type that is read.
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "IQ4_NL": (32, 18),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table. shape: rows first; offset: from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int


@dataclass(frozen=True, slots=True)
class _Array:
    """An array that is in the file and read when somebody wants it: vocabularies have hundreds of thousands of items,
    and whoever opens a file for its tensors wants none of them."""

    num_items: int
    read: Callable[[], tuple[MetaValue, ...]]


class GgufMetadata(Mapping[str, MetaValue]):
    """The pairs of a head. An array is read anew each time it is asked for."""

    def __init__(self, values: Mapping[str, MetaValue | _Array]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> MetaValue:
        value = self._values[key]
        return value.read() if isinstance(value, _Array) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def num_items(self, key: str) -> int:
        """Of an array; 0 where there is none."""
        value = self._values.get(key)
        return value.num_items if isinstance(value, _Array) else 0


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file. Tensor data is untouched until `raw`; call `check_tensors` before that. status: of the file when
    it was opened."""

    path: Path
    metadata: GgufMetadata
    tensors: Mapping[str, GgufTensor]
    data_start: int
    data: mmap.mmap
    status: os.stat_result

    def raw(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's bytes, a read-only view of the mapped file."""
        num_bytes = tensor_num_bytes(tensor)
        return np.frombuffer(self.data, np.uint8, num_bytes, self.data_start + tensor.offset)


def read_gguf(path: Path) -> GgufFile:
    """Parse the head of `path`. Raises CheckpointError when the file is not a whole, sane GGUF head."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file: it does not begin with the bytes 'GGUF'")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            status = os.fstat(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(path, data)
    num_tensors, num_pairs = _read_counts(cursor)
    metadata = _read_metadata(cursor, num_pairs)
    tensors = _read_table(cursor, num_tensors)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > _ALIGNMENT_MAX or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: corrupt GGUF: general.alignment is {alignment!r}, not a power of two")
    for tensor in tensors.values():
        if tensor.offset % alignment:
            raise CheckpointError(f"{path}: corrupt GGUF: tensor {tensor.name} is not aligned to {alignment} bytes")
    data_start = -(-cursor.offset // alignment) * alignment
    return GgufFile(path, metadata, tensors, data_start, data, status)


def check_tensors(gguf: GgufFile) -> None:
    """Check every tensor, see check_tensor."""
    for tensor in gguf.tensors.values():
        check_tensor(gguf, tensor)


def check_tensor(gguf: GgufFile, tensor: GgufTensor) -> None:
    """Raises UnsupportedModelError for a tensor of an unread type, CheckpointError for one that does not fit."""
    if tensor.type_name not in BLOCKS:
        raise UnsupportedModelError(
            f"{gguf.path}: tensor {tensor.name} is of type {tensor.type_name}, which is not supported; "
            f"supported tensor types: {', '.join(BLOCKS)}"
        )
    block_len = BLOCKS[tensor.type_name][0]
    if tensor.shape[-1] % block_len:
        raise CheckpointError(
            f"{gguf.path}: corrupt GGUF: rows of {tensor.name} have {tensor.shape[-1]} elements, "
            f"not a multiple of the {block_len} in a {tensor.type_name} block"
        )
    end = gguf.data_start + tensor.offset + tensor_num_bytes(tensor)
    if end > len(gguf.data):
        raise CheckpointError(
            f"{gguf.path}: truncated GGUF: tensor {tensor.name} ends at byte {end}, "
            f"but the file has {len(gguf.data)} bytes; fetch it again"
        )


def tensor_num_bytes(tensor: GgufTensor) -> int:
    """The bytes that the tensor takes in the file."""
    block_len, block_bytes = BLOCKS[tensor.type_name]
    num_elements = 1
    for dim in tensor.shape:
        num_elements *= dim
    return num_elements // block_len * block_bytes


class _Cursor:
    """A reading position that refuses to leave the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.offset = len(_MAGIC)
        self._data = data
        self._size = len(data)

    def fail(self, what: str) -> CheckpointError:
        """The error for a fault at the present position."""
        return CheckpointError(f"{self.path}: corrupt GGUF at byte {self.offset}: {what}")

    def scalar(self, kind: int) -> bool | int | float:
        """One number of a GGUF value type."""
        form = _SCALAR_STRUCTS[kind]
        self.require(form.size, "a number")
        (value,) = form.unpack_from(self._data, self.offset)
        self.offset += form.size
        result: bool | int | float = value
        return result

    def count(self, wide: bool = True) -> int:
        """An unsigned count of 64 or 32 bits."""
        return int(self.scalar(10 if wide else 4))

    def name(self) -> str:
        """A key or a tensor name."""
        length = self._string_len()
        if length > _NAME_LEN_MAX:
            raise self.fail(f"a name of {length} bytes")
        raw = self._data[self.offset : self.offset + length]
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.fail("a name is not UTF-8") from None
        self.offset += length
        return text

    def string(self) -> str:
        """A text value; bytes that are not UTF-8 become replacement characters."""
        length = self._string_len()
        raw = self._data[self.offset : self.offset + length]
        self.offset += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> MetaValue | _Array:
        """One metadata value of the given type. Of an array that it can be read later."""
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.fail(f"unknown value type {kind}")
        if depth >= _NESTING_MAX:
            raise self.fail(f"arrays nested deeper than {_NESTING_MAX}")
        item_kind, length = self.count(wide=False), self.count()
        if item_kind in _SCALARS:
            return self._numbers(item_kind, length)
        # The shortest item is an empty string (8 bytes) or an empty array (12).
        self.require(length * 8, f"an array of {length} items")
        if item_kind == _STRING:
            return self._strings(length)
        items = [self.value(item_kind, depth + 1) for _ in range(length)]
        return _Array(length, lambda: tuple(each.read() if isinstance(each, _Array) else each for each in items))

    def require(self, num_bytes: int, what: str) -> None:
        """Fail unless the file holds num_bytes more."""
        if num_bytes > self._size - self.offset:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt GGUF: {what} at byte {self.offset} needs {num_bytes} bytes, "
                f"but the file ends at {self._size}"
            )

    def _string_len(self) -> int:
        length = self.count()
        self.require(length, "a string")
        return length

    def _numbers(self, kind: int, length: int) -> _Array:
        self.require(length * _SCALAR_STRUCTS[kind].size, f"an array of {length} numbers")
        data, begin = self._data, self.offset
        self.offset += length * _SCALAR_STRUCTS[kind].size
        return _Array(length, lambda: tuple(np.frombuffer(data, np.dtype(_SCALARS[kind]), length, begin).tolist()))

    def _strings(self, length: int) -> _Array:
        # Vocabularies have hundreds of thousands of strings: this loop is the cost of opening a file.
        data, begin, offset, unpack, num_passed = self._data, self.offset, self.offset, _U64.unpack_from, 0
        try:
            for num_passed in range(length):  # noqa: B007 - tells where it ended
                offset += 8 + unpack(data, offset)[0]
        except (struct.error, OverflowError):  # the one before runs past the end
            num_passed = max(0, num_passed - (offset > self._size))
            offset = self._size + 1
        if offset > self._size:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt GGUF: string {num_passed} of the {length} in the array at byte "
                f"{begin} runs past the end of the file ({self._size} bytes)"
            )
        self.offset = offset
        return _Array(length, lambda: _read_strings(data, begin, length))


def _read_strings(data: mmap.mmap, offset: int, length: int) -> tuple[str, ...]:
    """Strings one after another, which are known to be there."""
    unpack, strings = _U64.unpack_from, []
    for _ in range(length):
        begin = offset + 8
        offset = begin + unpack(data, offset)[0]
        strings.append(data[begin:offset].decode("utf-8", "replace"))
    return tuple(strings)


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    version = cursor.count(wide=False)
    if version not in _VERSIONS:
        hint = "it is big-endian" if version and version & 0xFFFF == 0 else "supported versions: 2, 3"
        raise UnsupportedModelError(f"{cursor.path}: GGUF version {version} is not supported; {hint}")
    num_tensors, num_pairs = cursor.count(), cursor.count()
    if num_tensors > _TENSORS_MAX:
        raise cursor.fail(f"the head claims {num_tensors} tensors; at most {_TENSORS_MAX} are believed")
    if num_pairs > _PAIRS_MAX:
        raise cursor.fail(f"the head claims {num_pairs} metadata pairs; at most {_PAIRS_MAX} are believed")
    return num_tensors, num_pairs


def _read_metadata(cursor: _Cursor, num_pairs: int) -> GgufMetadata:
    metadata: dict[str, MetaValue | _Array] = {}
    for _ in range(num_pairs):
        key = cursor.name()
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.count(wide=False))
    return GgufMetadata(metadata)


def _read_table(cursor: _Cursor, num_tensors: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name = cursor.name()
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} occurs twice")
        num_dims = cursor.count(wide=False)
        if not 1 <= num_dims <= _DIMS_MAX:
            raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {_DIMS_MAX} are possible")
        dims = [cursor.count() for _ in range(num_dims)]
        if not all(1 <= dim < 1 << 40 for dim in dims):
            raise cursor.fail(f"tensor {name!r} has dimensions {dims}")
        type_id = cursor.count(wide=False)
        type_name = TYPE_NAMES.get(type_id, f"number {type_id}")
        # The file lists the fastest axis first.
        tensors[name] = GgufTensor(name, tuple(reversed(dims)), type_name, cursor.count())
    return tensors
