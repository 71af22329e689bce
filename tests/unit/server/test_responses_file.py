# SPDX-License-Identifier: Apache-2.0
"""Stored responses in a file: they are there again within the limits, and no other file is touched."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec
import pytest

from tokenspeed.core.errors import ConfigError
from tokenspeed.server.errors import HttpError
from tokenspeed.server.responses_file import ResponsesFile
from tokenspeed.server.responses_store import ResponsesStore

ASKED = msgspec.json.encode([{"role": "user", "content": "hi"}])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kept.db")


def opened(path: str, now_s: float = 0.0, **limits: float) -> ResponsesStore:
    return ResponsesStore(clock=lambda: now_s, file=ResponsesFile(path), **limits)  # type: ignore[arg-type]


def made(store: ResponsesStore, name: str, history: tuple[bytes, ...] = (ASKED,)) -> tuple[bytes, ...]:
    """A response and the conversation up to its end."""
    store.begin(name, b"{}", history, lambda: b"{}")
    store.finish(name, f'{{"id": "{name}"}}'.encode(), [{"id": f"item-{name}", "type": "message", "text": name}])
    return store.history(name)


def count(path: str, table: str) -> int:
    base = sqlite3.connect(path)
    (number,) = base.execute(f"SELECT count(*) FROM {table}").fetchone()
    base.close()
    return int(number)


def test_responses_outlive_the_store(path: str) -> None:
    store = opened(path)
    history = made(store, "a")
    longer = made(store, "b", (*history, ASKED))
    store.begin("unfinished", b"{}", longer, lambda: b"{}")
    store.close()
    again = opened(path)
    assert again.body("a") == b'{"id": "a"}' and again.history("b") == longer and len(longer) == 4
    assert again.item("item-b") == {"id": "item-b", "type": "message", "text": "b"}
    assert again.input("b") == [*again.input("a"), again.item("item-a"), {"role": "user", "content": "hi"}]
    with pytest.raises(HttpError, match="unfinished"):
        again.body("unfinished")
    again.close()


def test_what_is_shared_is_in_the_file_once_and_goes_with_the_last_that_needs_it(path: str) -> None:
    store = opened(path)
    first = made(store, "a")
    made(store, "b", (*first, b'[{"role": "user"}]'))
    store.close()
    assert (count(path, "response"), count(path, "part"), count(path, "history")) == (2, 4, 6)
    store = opened(path)
    store.delete("a")
    store.close()
    assert (count(path, "response"), count(path, "part"), count(path, "history")) == (1, 4, 4)
    store = opened(path)
    store.delete("b")
    store.close()
    assert (count(path, "response"), count(path, "part"), count(path, "history")) == (0, 0, 0)


def test_the_same_part_twice_in_one_conversation(path: str) -> None:
    store = opened(path)
    made(store, "a", (ASKED, ASKED))
    store.close()
    store = opened(path)
    assert store.input("a") == [{"role": "user", "content": "hi"}] * 2
    store.delete("a")
    store.close()
    assert count(path, "part") == 0


def test_limits_hold_in_the_file_too(path: str) -> None:
    store = opened(path, responses_max=3)
    for name in "abcde":
        made(store, name)
    store.close()
    assert count(path, "response") == 3
    fewer = opened(path, responses_max=2)
    assert [fewer.body(name) for name in "de"] == [b'{"id": "d"}', b'{"id": "e"}']
    fewer.close()
    assert count(path, "response") == 2
    later = opened(path, now_s=1000.0, age_s_max=999.0)
    with pytest.raises(HttpError):
        later.body("e")
    later.close()
    assert count(path, "response") == count(path, "part") == 0


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        ResponsesFile(path)
    assert str(caught.value).startswith(f"--store {path}: ")
    return str(caught.value)


def test_two_servers_cannot_have_one_file(path: str) -> None:
    store = opened(path)
    assert "another program has it open" in refusal(path)
    store.close()
    opened(path).close()


def test_no_other_file_is_touched(path: str, tmp_path: Path) -> None:
    Path(path).write_bytes(b"notes of mine, " * 1000)
    assert "move it away" in refusal(path)
    assert Path(path).read_bytes() == b"notes of mine, " * 1000
    other = str(tmp_path / "other.db")
    base = sqlite3.connect(other)
    base.execute("CREATE TABLE mine (x)")
    base.close()
    before = Path(other).read_bytes()
    assert "another program's database" in refusal(other)
    assert Path(other).read_bytes() == before
    assert "there is no folder" in refusal(str(tmp_path / "none" / "kept.db"))
    assert "unable to open" in refusal(str(tmp_path))
    newer = str(tmp_path / "newer.db")
    ResponsesFile(newer).close()
    base = sqlite3.connect(newer)
    base.execute("PRAGMA user_version = 2")
    base.close()
    assert "version 2" in refusal(newer)


def test_a_damaged_file_is_said_at_once(path: str) -> None:
    store = opened(path)
    for index in range(200):
        made(store, f"r{index}", (ASKED, b"[]" * 500 + str(index).encode()))
    store.close()
    data = bytearray(Path(path).read_bytes())
    for start in range(4096, len(data), 4096):
        data[start : start + 64] = b"\x5a" * 64
    Path(path).write_bytes(data)
    assert "damaged" in refusal(path)


def test_a_write_that_fails_costs_the_file_and_not_the_answer(path: str, caplog: pytest.LogCaptureFixture) -> None:
    file = ResponsesFile(path)
    store = ResponsesStore(file=file)
    file._base.execute("DROP TABLE history")
    made(store, "a")
    assert store.body("a") == b'{"id": "a"}'
    store.close()
    assert "kept in memory only" in caplog.text and count(path, "response") == 0
