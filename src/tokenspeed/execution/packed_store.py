# SPDX-License-Identifier: Apache-2.0
"""A folder of weights as a kernel has packed them, so that a file that was packed once is only mapped from then on.

An entry is one file: the arrays of each matrix in the order in which they were given, found by the content of the file
that they were made from and by two texts that say what was packed and how. It gets its name when all of it is written,
carries checksums that are compared before it is used, and is never changed, only removed. So neither a process that
ended half way nor a machine that did makes an entry that is taken for a whole one. Knows no packing and no model.

Hashing a large file takes as long as half of packing it. So the hash is remembered for as long as the file keeps its
path, inode, size and both times: whoever writes to it changes the last of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import re
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.checkpoints import SourceFile
from tokenspeed.kernels.platform import num_cpus

_log = logging.getLogger(__name__)

_MAGIC = b"TSPACK\x01\n"
_TRAILER = struct.Struct("<8sQ32s")  # magic, length of the index before it, its SHA-256
_ALIGNMENT = 64
_CHUNK_LEN = 4 << 20  # has a checksum; whole large pages, so that the system keeps the file in such, and maps it so
_ENTRY, _NOTE, _TEMPORARY = ".packed", ".hash", ".tmp"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOCK_POLL_S = 0.2

Bytes = NDArray[np.uint8]
Matrices = Sequence[Sequence[Bytes]]
"""The arrays of each matrix, contiguous."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """contents: what is packed; layout: by whom and how. Of two layouts of the same contents the newer one is kept."""

    contents: str
    layout: str


class _Index(msgspec.Struct, frozen=True):
    """places: where each array of each matrix begins, and how many bytes it has. checksums: of each chunk of what comes
    before the index."""

    contents: str
    layout: str
    places: list[list[tuple[int, int]]]
    checksums: list[int]


class PackedStore:
    """bytes_max: what all entries may take. Several processes may use one folder at the same time."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder = folder
        self._bytes_max = bytes_max

    def find(self, file: SourceFile, recipe: Recipe) -> Matrices | None:
        """What was kept, as views of a mapped file; None when there is nothing, or nothing that is whole."""
        try:
            path = self._entry(_digest_in(self._note(file)), recipe)
            data = _map(path)
        except (OSError, ValueError):
            return None
        matrices = _matrices(data, recipe)
        if matrices is None:
            _log.warning("packed weights in %s are damaged; they are made again", path)
            return None
        with suppress(OSError):
            os.utime(path)  # what was used longest ago goes first
        return matrices

    def keep(
        self, file: SourceFile, recipe: Recipe, matrices: Matrices, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Write an entry, unless it is there; gives up when it is not wanted any more. What goes wrong is one line of
        the log. matrices: made from the file as it was opened."""
        num_bytes = _num_bytes(matrices)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self._folder / "lock", is_wanted):
                self._remove_leftovers()
                self._write(file, recipe, matrices, is_wanted)
        except _NotWantedError:
            pass
        except OSError as error:
            reason = error.strerror or error
            _log.warning("packed weights (%d MiB) are not kept in %s: %s", num_bytes >> 20, self._folder, reason)

    def _write(self, file: SourceFile, recipe: Recipe, matrices: Matrices, is_wanted: Callable[[], bool]) -> None:
        digest = _digest(file, is_wanted)
        if not file.is_unchanged():
            return
        path = self._entry(digest, recipe)
        if not _is_whole(path, recipe):
            self._make_room(_num_bytes(matrices), path)
            with self._new(path) as entry:
                _write_entry(entry, recipe, matrices, is_wanted)
        note = self._note(file)
        for other in self._folder.glob(f"{note.name.partition('-')[0]}-*{_NOTE}"):
            other.unlink()  # of the path as it was
        with self._new(note) as written:
            written.write(digest.encode())

    @contextmanager
    def _new(self, path: Path) -> Iterator[BinaryIO]:
        """A file that gets its name once all of it is written."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}{_TEMPORARY}")
        try:
            with temporary.open("wb", buffering=0) as file:
                yield file
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, path: Path) -> None:
        """Remove what this entry takes the place of, and then what was used longest ago. OSError when there is no room
        all the same."""
        for other in self._folder.glob(f"{path.name.rpartition('-')[0]}-*{_ENTRY}"):
            other.unlink()  # the same, packed by another version, or damaged
        if num_bytes > self._bytes_max:
            raise OSError(f"at most {self._bytes_max >> 20} MiB are to be kept there")
        entries = sorted(self._folder.glob(f"*{_ENTRY}"), key=lambda each: each.stat().st_mtime_ns)
        taken = sum(each.stat().st_size for each in entries)
        while entries and taken + num_bytes > self._bytes_max:
            oldest = entries.pop(0)
            taken -= oldest.stat().st_size
            oldest.unlink()
        kept = {each.name.partition("-")[0] for each in entries}
        for note in self._folder.glob(f"*{_NOTE}"):
            if note.read_bytes().decode(errors="replace") not in kept:
                note.unlink()
        free = shutil.disk_usage(self._folder).free
        if free < 2 * num_bytes:
            raise OSError(f"only {free >> 20} MiB are free there, and twice their size is asked for")

    def _remove_leftovers(self) -> None:
        """Of writers that were killed: nobody else writes now."""
        for each in self._folder.glob(f"*{_TEMPORARY}"):
            each.unlink()

    def _note(self, file: SourceFile) -> Path:
        """Holds the hash of the file's content."""
        return self._folder / f"{_name_of(str(file.path))}-{_name_of(repr(file))}{_NOTE}"

    def _entry(self, digest: str, recipe: Recipe) -> Path:
        return self._folder / f"{digest}-{_name_of(recipe.contents)}-{_name_of(recipe.layout)}{_ENTRY}"


class _NotWantedError(Exception):
    """Nobody waits for this any more."""


def _require(is_wanted: Callable[[], bool]) -> None:
    if not is_wanted():
        raise _NotWantedError


@contextmanager
def _locked(path: Path, is_wanted: Callable[[], bool]) -> Iterator[None]:
    """No other process is in here. The system lets go of the lock when its holder ends, however it does."""
    with path.open("wb") as file:
        while True:
            _require(is_wanted)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
        yield


def _name_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _digest_in(note: Path) -> str:
    """OSError or ValueError where there is none."""
    text = note.read_text()
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"{note} holds no hash")
    return text


def _digest(file: SourceFile, is_wanted: Callable[[], bool]) -> str:
    """SHA-256, for which machines have an instruction, of all that the file holds."""
    digest, chunk = hashlib.sha256(), bytearray(_CHUNK_LEN)
    with file.path.open("rb", buffering=0) as content:
        while length := content.readinto(chunk):
            _require(is_wanted)
            digest.update(memoryview(chunk)[:length])
    return digest.hexdigest()


def _num_bytes(matrices: Matrices) -> int:
    return sum(each.nbytes for arrays in matrices for each in arrays)


def _write_entry(entry: BinaryIO, recipe: Recipe, matrices: Matrices, is_wanted: Callable[[], bool]) -> None:
    out = _Chunks(entry, is_wanted)
    places = [[(out.add_aligned(each.reshape(-1)), each.nbytes) for each in arrays] for arrays in matrices]
    out.flush()
    index = msgspec.json.encode(_Index(recipe.contents, recipe.layout, places, out.checksums))
    _write_all(entry, memoryview(index + _TRAILER.pack(_MAGIC, len(index), hashlib.sha256(index).digest())))


class _Chunks:
    """Writes a stream in chunks of one length, the last excepted."""

    def __init__(self, file: BinaryIO, is_wanted: Callable[[], bool]) -> None:
        self._file = file
        self._is_wanted = is_wanted
        self._chunk: Bytes = np.empty(_CHUNK_LEN, np.uint8)
        self._used = 0
        self.num_bytes = 0
        self.checksums: list[int] = []

    def add_aligned(self, data: Bytes) -> int:
        """(N,), contiguous. Returns where it begins."""
        self._add(np.zeros(-self.num_bytes % _ALIGNMENT, np.uint8))
        begin = self.num_bytes
        self._add(data)
        return begin

    def _add(self, data: Bytes) -> None:
        self.num_bytes += len(data)
        while len(data):
            length = min(len(data), len(self._chunk) - self._used)
            self._chunk[self._used : self._used + length] = data[:length]
            self._used += length
            data = data[length:]
            if self._used == len(self._chunk):
                self.flush()

    def flush(self) -> None:
        """Write what is there."""
        _require(self._is_wanted)
        if self._used:
            chunk = self._chunk[: self._used].data
            self.checksums.append(zlib.crc32(chunk))
            _write_all(self._file, chunk)
        self._used = 0


def _write_all(file: BinaryIO, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data) :]


def _map(path: Path) -> mmap.mmap:
    """Read-only and our own. OSError, or ValueError of an empty file."""
    with path.open("rb") as entry:
        data = mmap.mmap(entry.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    with suppress(OSError, AttributeError):  # only a wish, and only Linux knows it
        data.madvise(mmap.MADV_HUGEPAGE)
    return data


def _is_whole(path: Path, recipe: Recipe) -> bool:
    try:
        return _matrices(_map(path), recipe) is not None
    except (OSError, ValueError):
        return False


def _matrices(data: mmap.mmap, recipe: Recipe) -> Matrices | None:
    """None unless all of it is as it was written for this recipe."""
    index = _index(data)
    if index is None or (index.contents, index.layout) != (recipe.contents, recipe.layout):
        return None
    end = max((begin + size for places in index.places for begin, size in places), default=0)
    if len(index.checksums) != -(-end // _CHUNK_LEN) or not _agree(memoryview(data)[:end], index.checksums):
        return None
    return [[np.frombuffer(data, np.uint8, size, begin) for begin, size in places] for places in index.places]


def _index(data: mmap.mmap) -> _Index | None:
    """The index at the end, where there is one that its hash agrees with."""
    end = len(data) - _TRAILER.size
    if end < 0:
        return None
    magic, length, digest = _TRAILER.unpack_from(data, end)
    text = data[end - length : end] if magic == _MAGIC and length <= end else b""
    return msgspec.json.decode(text, type=_Index) if hashlib.sha256(text).digest() == digest else None


def _agree(content: memoryview, checksums: Sequence[int]) -> bool:
    """Reads all of it, and so also maps it, on all processors."""
    chunks = (content[start : start + _CHUNK_LEN] for start in range(0, len(content), _CHUNK_LEN))
    with ThreadPoolExecutor(num_cpus(), "packed-cache") as pool:
        return list(pool.map(zlib.crc32, chunks)) == list(checksums)
