# SPDX-License-Identifier: Apache-2.0
"""Stored responses in a SQLite file, so that they outlive the server. Written behind the answers, by one thread.

What several responses share, the beginning of a conversation, is in the file once. Knows ids and bytes; knows no field
of a response and no limit: what is kept, and for how long, is the store's business.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenspeed.core.errors import ConfigError

_APPLICATION, _VERSION = 0x74736472, 1  # what the file says of itself
_SCHEMA = """
CREATE TABLE response (id TEXT PRIMARY KEY, made_s REAL NOT NULL, body BLOB NOT NULL, item_ids BLOB NOT NULL);
CREATE TABLE part (digest BLOB PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE history (id TEXT NOT NULL, place INTEGER NOT NULL, digest BLOB NOT NULL, PRIMARY KEY (id, place));
CREATE INDEX history_of_part ON history (digest);
"""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """A response that is made. made_s: Unix time. history: see responses_store.Stored."""

    response_id: str
    made_s: float
    body: bytes
    history: tuple[bytes, ...]
    item_ids: tuple[str, ...]


class ResponsesFile:
    """An open file, which no other program may open meanwhile. A write that fails is logged; the response is then kept
    in memory only."""

    def __init__(self, path: str) -> None:
        """Opens the file, or makes it. ConfigError when it is something else, damaged, or in use."""
        self._path = path
        self._base = _opened(path)
        self._writer = ThreadPoolExecutor(1, "tokenspeed-store")

    def rows(self) -> Iterator[Row]:
        """All responses, the oldest first. Before the first write."""
        parts: dict[bytes, bytes] = {}  # shared in memory as in the file
        for response_id, made_s, body, item_ids in self._base.execute(
            "SELECT id, made_s, body, item_ids FROM response ORDER BY made_s, rowid"
        ):
            history = self._base.execute(
                "SELECT digest, data FROM history JOIN part USING (digest) WHERE id = ? ORDER BY place", (response_id,)
            )
            shared = tuple(parts.setdefault(digest, data) for digest, data in history)
            yield Row(response_id, made_s, body, shared, msgspec.json.decode(item_ids, type=tuple[str, ...]))

    def put(self, row: Row) -> None:
        """Keep a response. Never waits."""
        self._later(lambda: self._put(row))

    def drop(self, response_id: str) -> None:
        """Forget one; ids that are not there are ignored. Never waits."""
        self._later(lambda: self._drop(response_id))

    def close(self) -> None:
        """Write what is still to be written, and close the file."""
        self._writer.shutdown()
        self._base.close()

    def _later(self, write: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                with self._base:  # one transaction
                    write()
            except sqlite3.Error as error:
                _log.error("--store %s: %s; the response is kept in memory only", self._path, error)

        self._writer.submit(guarded)

    def _put(self, row: Row) -> None:
        digests = [hashlib.sha256(part).digest() for part in row.history]
        self._base.execute(
            "INSERT OR REPLACE INTO response VALUES (?, ?, ?, ?)",
            (row.response_id, row.made_s, row.body, msgspec.json.encode(row.item_ids)),
        )
        self._base.executemany("INSERT OR IGNORE INTO part VALUES (?, ?)", zip(digests, row.history, strict=True))
        places = ((row.response_id, place, digest) for place, digest in enumerate(digests))
        self._base.executemany("INSERT OR REPLACE INTO history VALUES (?, ?, ?)", places)

    def _drop(self, response_id: str) -> None:
        found = self._base.execute("SELECT DISTINCT digest FROM history WHERE id = ?", (response_id,)).fetchall()
        self._base.execute("DELETE FROM response WHERE id = ?", (response_id,))
        self._base.execute("DELETE FROM history WHERE id = ?", (response_id,))
        self._base.executemany(
            "DELETE FROM part WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM history WHERE digest = ?1)", found
        )


def _opened(path: str) -> sqlite3.Connection:
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"--store {path}: there is no folder {Path(path).absolute().parent}; make it first")
    with contextlib.ExitStack() as stack:
        try:
            base = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            stack.callback(base.close)
            _take(base, path)
        except sqlite3.OperationalError as error:
            in_use = "locked" in str(error)
            raise ConfigError(
                f"--store {path}: {'another program has it open; give each server its own file' if in_use else error}"
            ) from None
        except sqlite3.DatabaseError as error:
            raise _damaged(path, str(error)) from None
        stack.pop_all()
        return base


def _take(base: sqlite3.Connection, path: str) -> None:
    """Make the file ours alone, and sure that it is what it should be. Another program's is not written to."""
    base.execute("PRAGMA locking_mode = EXCLUSIVE")
    num_tables = _number(base, "SELECT count(*) FROM sqlite_schema")
    if num_tables and _number(base, "PRAGMA application_id") != _APPLICATION:
        raise ConfigError(f"--store {path}: this is another program's database; give another path")
    version = _number(base, "PRAGMA user_version")
    if num_tables and version != _VERSION:
        raise ConfigError(
            f"--store {path}: this store is of version {version}, and only {_VERSION} can be read; give another path"
        )
    base.execute("PRAGMA journal_mode = WAL")
    base.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may cost the last answers, never the file
    base.execute("BEGIN EXCLUSIVE")
    base.commit()
    if not num_tables:
        base.executescript(f"{_SCHEMA} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {_VERSION};")
    (verdict,) = base.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, str(verdict))


def _number(base: sqlite3.Connection, question: str) -> int:
    (number,) = base.execute(question).fetchone()
    return int(number)


def _damaged(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"--store {path}: no store of responses, or a damaged one ({why}); move it away, or give another path"
    )
