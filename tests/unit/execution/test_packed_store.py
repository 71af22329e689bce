# SPDX-License-Identifier: Apache-2.0
"""Entries on disk: what is found is what was kept, of the same file; whatever becomes of a writer, of the disk, of an
entry or of the file costs no more than making it again."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tokenspeed import checkpoints
from tokenspeed.checkpoints import SourceFile
from tokenspeed.execution import packed_store
from tokenspeed.execution.packed_store import Bytes, PackedStore, Recipe

CHUNK_LEN = 4096
RECIPE = Recipe("two matrices", "tiles")
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry has several. And files of tests are new."""
    monkeypatch.setattr(packed_store, "_CHUNK_LEN", CHUNK_LEN)
    monkeypatch.setattr(checkpoints, "_SETTLING_NS", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed"


@pytest.fixture
def store(folder: Path) -> PackedStore:
    return PackedStore(folder, 1 << 20)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, packed_store.__name__):
        yield lambda: [record.getMessage() for record in caplog.records]


def model(path: Path, content: bytes = b"model") -> SourceFile:
    path.write_bytes(content)
    return opened(path)


def opened(path: Path) -> SourceFile:
    return SourceFile.of(path, path.stat())


def matrices(seed: int = 0, num_bytes: int = 9001) -> list[list[Bytes]]:
    rng = np.random.default_rng(seed)
    sizes = ((num_bytes, 1), (64, 0, 5000))
    return [[rng.integers(0, 256, size, np.uint8) for size in each] for each in sizes]


def same(found: packed_store.Matrices | None, expected: list[list[Bytes]]) -> bool:
    assert found is not None
    assert [len(each) for each in found] == [len(each) for each in expected]
    pairs = [pair for each in zip(found, expected, strict=True) for pair in zip(*each, strict=True)]
    return all(np.array_equal(one, other) for one, other in pairs)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def test_what_is_kept_is_found_read_only_at_whole_vectors(store: PackedStore, tmp_path: Path) -> None:
    file = model(tmp_path / "a.gguf")
    assert store.find(file, RECIPE) is None
    store.keep(file, RECIPE, matrices())
    found = store.find(opened(file.path), RECIPE)
    assert found is not None
    assert same(found, matrices())
    for each in found:
        for array in each:
            assert not array.flags.writeable
            assert array.ctypes.data % 64 == 0


def test_an_entry_is_of_its_contents_and_layout(store: PackedStore, tmp_path: Path) -> None:
    file = model(tmp_path / "a.gguf")
    store.keep(file, RECIPE, matrices())
    assert store.find(file, Recipe("two other matrices", "tiles")) is None
    assert store.find(file, Recipe("two matrices", "wider tiles")) is None
    assert store.find(file, RECIPE) is not None


def test_nothing_of_a_changed_file_is_found(store: PackedStore, tmp_path: Path) -> None:
    """Of as many bytes, in the same inode, and with its old time put back."""
    file = model(tmp_path / "a.gguf", b"first")
    store.keep(file, RECIPE, matrices(1))
    status = file.path.stat()
    time.sleep(0.02)  # some systems count time in steps
    with file.path.open("r+b") as writable:
        writable.write(b"other")
    os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = opened(file.path)
    assert (changed.inode, changed.num_bytes, changed.modified_ns) == (file.inode, file.num_bytes, file.modified_ns)
    assert store.find(changed, RECIPE) is None
    store.keep(changed, RECIPE, matrices(2))
    assert same(store.find(opened(file.path), RECIPE), matrices(2))


def test_what_was_packed_while_its_file_changed_is_not_kept(store: PackedStore, folder: Path, tmp_path: Path) -> None:
    file = model(tmp_path / "a.gguf", b"first")
    time.sleep(0.02)
    file.path.write_bytes(b"other")
    store.keep(file, RECIPE, matrices())
    assert entries(folder) == []
    assert store.find(opened(file.path), RECIPE) is None


def test_a_file_that_was_written_just_now_is_not_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times may not show the next change."""
    monkeypatch.undo()
    assert not model(tmp_path / "a.gguf").is_settled
    monkeypatch.setattr(time, "time_ns", lambda now=time.time_ns: now() + 3 * 10**9)
    assert opened(tmp_path / "a.gguf").is_settled


def test_the_same_content_elsewhere_takes_up_the_same_entry(store: PackedStore, folder: Path, tmp_path: Path) -> None:
    first, second = model(tmp_path / "a.gguf"), model(tmp_path / "b.gguf")
    store.keep(first, RECIPE, matrices())
    (before,) = (each.stat().st_ino for each in entries(folder))
    assert store.find(second, RECIPE) is None  # its hash is not known yet
    store.keep(second, RECIPE, matrices())
    assert [each.stat().st_ino for each in entries(folder)] == [before]
    assert same(store.find(second, RECIPE), matrices())


def test_notes_of_a_path_as_it_was_go(store: PackedStore, folder: Path, tmp_path: Path) -> None:
    for seconds in range(5):
        file = model(tmp_path / "a.gguf")
        os.utime(file.path, (seconds, seconds))
        store.keep(opened(file.path), RECIPE, matrices())
    assert len(list(folder.glob("*.hash"))) == 1


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def blank(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[CHUNK_LEN : 2 * CHUNK_LEN] = bytes(CHUNK_LEN)
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit at the begin": lambda path: flip(path, 0),
    "a bit in the last chunk": lambda path: flip(path, 9001 + 64 * 3 + 4000),
    "a bit of the index": lambda path: flip(path, -80),
    "a bit of the trailer": lambda path: flip(path, -1),
    "a length beyond the file": lambda path: flip(path, -36),
    "the end is missing": lambda path: cut(path, -1),
    "half is missing": lambda path: cut(path, 7000),
    "nearly all is missing": lambda path: cut(path, 5),
    "a page of zeros": blank,
    "another file": lambda path: path.write_bytes(b"x" * 20_000),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_told_and_made_again(
    store: PackedStore,
    tmp_path: Path,
    folder: Path,
    damage: Callable[[Path], None],
    warnings_of: Callable[[], list[str]],
) -> None:
    file = model(tmp_path / "a.gguf")
    store.keep(file, RECIPE, matrices())
    (entry,) = entries(folder)
    damage(entry)
    assert store.find(file, RECIPE) is None
    assert warnings_of() == [f"packed weights in {entry} are damaged; they are made again"]
    store.keep(file, RECIPE, matrices())
    assert same(store.find(file, RECIPE), matrices())


@pytest.mark.parametrize("text", ["", "no hash", "0" * 64, "\xff"])
def test_a_damaged_note_finds_nothing_and_is_written_again(
    store: PackedStore, tmp_path: Path, folder: Path, text: str
) -> None:
    file = model(tmp_path / "a.gguf")
    store.keep(file, RECIPE, matrices())
    (note,) = folder.glob("*.hash")
    note.write_bytes(text.encode("latin-1"))
    assert store.find(file, RECIPE) is None
    store.keep(file, RECIPE, matrices())
    assert same(store.find(file, RECIPE), matrices())


def test_an_empty_entry_finds_nothing(store: PackedStore, tmp_path: Path, folder: Path) -> None:
    file = model(tmp_path / "a.gguf")
    store.keep(file, RECIPE, matrices())
    entries(folder)[0].write_bytes(b"")
    assert store.find(file, RECIPE) is None
    store.keep(file, RECIPE, matrices())
    assert same(store.find(file, RECIPE), matrices())


def test_a_full_disk_is_one_line(
    store: PackedStore, folder: Path, tmp_path: Path, warnings_of: Callable[[], list[str]]
) -> None:
    """As the system says it, in the middle of an entry."""
    file = model(tmp_path / "a.gguf")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limits[1]))
    try:
        store.keep(file, RECIPE, matrices())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert warnings_of() == [f"packed weights (0 MiB) are not kept in {folder}: File too large"]
    assert [each.name for each in folder.iterdir()] == ["lock"]
    store.keep(file, RECIPE, matrices())
    assert same(store.find(file, RECIPE), matrices())


def test_a_disk_that_is_nearly_full_is_left_alone(
    store: PackedStore,
    folder: Path,
    tmp_path: Path,
    warnings_of: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = namedtuple("usage", ("free",))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(20_000))
    store.keep(model(tmp_path / "a.gguf"), RECIPE, matrices())
    assert [line.partition(": ")[2] for line in warnings_of()] == [
        "only 0 MiB are free there, and twice their size is asked for"
    ]
    assert entries(folder) == []


def no_folder(tmp_path: Path) -> Path:
    (tmp_path / "taken").write_text("a file")
    return tmp_path / "taken" / "packed"


def read_only(tmp_path: Path) -> Path:
    if os.geteuid() == 0:  # whom no bits hold back
        return Path("/proc/packed")
    (tmp_path / "fixed").mkdir(mode=0o500)
    return tmp_path / "fixed" / "packed"


@pytest.mark.parametrize("place", [no_folder, read_only])
def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, place: Callable[[Path], Path], warnings_of: Callable[[], list[str]]
) -> None:
    store, file = PackedStore(place(tmp_path), 1 << 20), model(tmp_path / "a.gguf")
    assert store.find(file, RECIPE) is None
    store.keep(file, RECIPE, matrices())
    assert len(warnings_of()) == 1
    assert store.find(file, RECIPE) is None


def test_the_same_packed_otherwise_takes_the_place(store: PackedStore, folder: Path, tmp_path: Path) -> None:
    """What other contents were packed from the same file stays: another rank's."""
    file, other = model(tmp_path / "a.gguf"), Recipe("the other rank's", "tiles")
    store.keep(file, RECIPE, matrices(1))
    store.keep(file, other, matrices(2))
    store.keep(file, Recipe(RECIPE.contents, "wider tiles"), matrices(3))
    assert len(entries(folder)) == 2
    assert store.find(file, RECIPE) is None
    assert same(store.find(file, other), matrices(2))
    assert same(store.find(file, Recipe(RECIPE.contents, "wider tiles")), matrices(3))


def test_what_was_used_longest_ago_goes_beyond_the_limit(folder: Path, tmp_path: Path) -> None:
    store = PackedStore(folder, 40_000)
    files = [model(tmp_path / f"{name}.gguf", name.encode()) for name in "abc"]
    for age, file in zip((300, 200), files[:2], strict=True):
        store.keep(file, RECIPE, matrices())
        newest = max(entries(folder), key=lambda each: each.stat().st_mtime_ns)
        os.utime(newest, (time.time() - age, time.time() - age))
    assert store.find(files[0], RECIPE) is not None  # and so it is not the oldest any more
    store.keep(files[2], RECIPE, matrices())
    assert [store.find(file, RECIPE) is not None for file in files] == [True, False, True]
    assert len(list(folder.glob("*.hash"))) == 2
    assert sum(each.stat().st_size for each in folder.iterdir()) < 40_000


def test_more_than_the_limit_is_not_kept(folder: Path, tmp_path: Path, warnings_of: Callable[[], list[str]]) -> None:
    PackedStore(folder, 1000).keep(model(tmp_path / "a.gguf"), RECIPE, matrices())
    assert [line.partition(": ")[2] for line in warnings_of()] == ["at most 0 MiB are to be kept there"]
    assert entries(folder) == []


@pytest.mark.parametrize("num_asked", [0, 1, 2, 3, 4])
def test_a_writer_gives_up_when_nobody_wants_it(
    store: PackedStore, folder: Path, tmp_path: Path, num_asked: int, warnings_of: Callable[[], list[str]]
) -> None:
    answers = iter([True] * num_asked)
    store.keep(model(tmp_path / "a.gguf"), RECIPE, matrices(), lambda: next(answers, False))
    assert [each.name for each in folder.iterdir()] == ["lock"]
    assert warnings_of() == []


def test_a_writer_that_is_killed_half_way_leaves_nothing_that_is_found(
    store: PackedStore, folder: Path, tmp_path: Path
) -> None:
    """kill -9 in the middle of an entry: the part of it goes with the next writer."""
    file = model(tmp_path / "a.gguf")
    half_way = FORK.Event()

    def is_wanted() -> bool:
        if any(each.stat().st_size >= 2 * CHUNK_LEN for each in folder.glob("*.tmp")):
            half_way.set()
            time.sleep(60)
        return True

    writer = FORK.Process(target=store.keep, args=(file, RECIPE, matrices(), is_wanted))
    writer.start()
    assert half_way.wait(60)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    (part,) = folder.glob("*.tmp")
    assert part.stat().st_size >= 2 * CHUNK_LEN
    assert store.find(file, RECIPE) is None
    store.keep(file, RECIPE, matrices())
    assert same(store.find(file, RECIPE), matrices())
    assert sorted(each.suffix for each in folder.iterdir()) == ["", ".hash", ".packed"]


def test_two_processes_keep_the_same_at_once(store: PackedStore, folder: Path, tmp_path: Path) -> None:
    """One writes it, the other waits and sees that it is there; whoever looks meanwhile finds all of it or nothing."""
    file = model(tmp_path / "a.gguf")
    begin = FORK.Barrier(3)

    def keep() -> None:
        begin.wait(60)
        for _ in range(20):
            store.keep(file, RECIPE, matrices())
            assert same(store.find(file, RECIPE), matrices())

    writers = [FORK.Process(target=keep) for _ in range(2)]
    for writer in writers:
        writer.start()
    begin.wait(60)
    while any(writer.is_alive() for writer in writers):
        found = store.find(file, RECIPE)
        assert found is None or same(found, matrices())
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert sorted(each.suffix for each in folder.iterdir()) == ["", ".hash", ".packed"]


def test_an_entry_that_is_removed_stays_mapped(store: PackedStore, folder: Path, tmp_path: Path) -> None:
    file = model(tmp_path / "a.gguf")
    store.keep(file, RECIPE, matrices())
    found = store.find(file, RECIPE)
    for each in folder.iterdir():
        each.unlink()
    assert same(found, matrices())
