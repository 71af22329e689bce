# SPDX-License-Identifier: Apache-2.0
"""Responses that were made, for those who ask for them again or go on from them: bounded in number, bytes and age. In
memory, and those that are finished in a file too where there is one. Knows no field of a response and no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.server.errors import HttpError
from tokenspeed.server.responses_file import ResponsesFile, Row

RESPONSES_MAX = 4096
BYTES_MAX = 256 << 20
AGE_S_MAX = 24 * 3600.0

Item = dict[str, Any]
"""An item of a conversation, as the wire has it."""


@dataclass(slots=True)
class Stored:
    """A response. body: as it is answered. history: the conversation before its output, then its output; each a JSON
    list of items, shared with the responses that it goes on from. made_s: Unix time. stop: ends what still runs and
    gives the body."""

    body: bytes
    history: tuple[bytes, ...]
    made_s: float
    stop: Callable[[], bytes] | None = None
    item_ids: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """In bytes, what is shared counted each time."""
        return len(self.body) + sum(map(len, self.history))


def open_store(path: str | None) -> ResponsesStore:
    """The store: in memory, and in the file too where a path is given. ConfigError when it is no such file."""
    return ResponsesStore(file=None if path is None else ResponsesFile(path))


class ResponsesStore:
    """Responses by id, the oldest dropped first. Used by one event loop."""

    def __init__(
        self,
        *,
        responses_max: int = RESPONSES_MAX,
        bytes_max: int = BYTES_MAX,
        age_s_max: float = AGE_S_MAX,
        clock: Callable[[], float] = time.time,
        file: ResponsesFile | None = None,
    ) -> None:
        """file: what it holds is taken over, and closed with the store."""
        self._responses_max, self._bytes_max, self._age_s_max = responses_max, bytes_max, age_s_max
        self._clock = clock
        self._entries: dict[str, Stored] = {}
        self._owners: dict[str, str] = {}
        self._num_bytes = 0
        self._file = file
        for row in list(file.rows()) if file is not None else ():
            self._put(row.response_id, Stored(row.body, row.history, row.made_s, None, row.item_ids))

    def begin(self, response_id: str, body: bytes, history: tuple[bytes, ...], stop: Callable[[], bytes]) -> None:
        """A response that is being made."""
        self._put(response_id, Stored(body, history, self._clock(), stop))

    def finish(self, response_id: str, body: bytes, output: list[Item]) -> None:
        """It is made. One that was deleted or dropped meanwhile stays so."""
        begun = self._entries.get(response_id)
        if begun is None:
            return
        self._drop(response_id)
        ids = tuple(item["id"] for item in output)
        history = (*begun.history, msgspec.json.encode(output))
        self._put(response_id, Stored(body, history, begun.made_s, None, ids))
        if self._file is not None and response_id in self._entries:
            self._file.put(Row(response_id, begun.made_s, body, history, ids))

    def body(self, response_id: str) -> bytes:
        """As it is answered. HttpError when there is none."""
        return self._get(response_id).body

    def delete(self, response_id: str) -> None:
        """Forget it, and end it if it still runs. HttpError when there is none."""
        stored = self._get(response_id)
        self._drop(response_id)
        if stored.stop is not None:
            stored.stop()

    def cancel(self, response_id: str) -> bytes:
        """End it if it still runs; its body. HttpError when there is none."""
        stored = self._get(response_id)
        return stored.body if stored.stop is None else stored.stop()

    def history(self, response_id: str) -> tuple[bytes, ...]:
        """The conversation up to and with its output. InvalidRequestError when there is none, or not yet."""
        self._expire()
        stored = self._entries.get(response_id)
        if stored is None:
            message = f"previous response {response_id!r} is not stored here; send the whole conversation"
            raise HttpError(400, message, code="previous_response_not_found", param="previous_response_id")
        if stored.stop is not None:
            raise InvalidRequestError(f"previous response {response_id!r} is not finished", "previous_response_id")
        return stored.history

    def input(self, response_id: str) -> list[Item]:
        """The conversation that it answers, as it was sent. HttpError when there is none."""
        stored = self._get(response_id)
        return items_of(stored.history if stored.stop is not None else stored.history[:-1])

    def close(self) -> None:
        """Nothing more is stored; what is stored is safe."""
        if self._file is not None:
            self._file.close()

    def item(self, item_id: str) -> Item | None:
        """An output item of a stored response."""
        self._expire()
        owner = self._entries.get(self._owners.get(item_id, ""))
        if owner is None:
            return None
        return next((item for item in items_of(owner.history[-1:]) if item.get("id") == item_id), None)

    def _get(self, response_id: str) -> Stored:
        self._expire()
        if response_id not in self._entries:
            raise HttpError(404, f"response {response_id!r} is not stored here", code="response_not_found")
        return self._entries[response_id]

    def _put(self, response_id: str, stored: Stored) -> None:
        self._entries[response_id] = stored
        self._num_bytes += stored.size
        self._owners |= dict.fromkeys(stored.item_ids, response_id)
        self._expire()

    def _expire(self) -> None:
        while self._entries:
            oldest = next(iter(self._entries))
            is_old = self._clock() - self._entries[oldest].made_s > self._age_s_max
            if not (is_old or len(self._entries) > self._responses_max or self._num_bytes > self._bytes_max):
                return
            self._drop(oldest)

    def _drop(self, response_id: str) -> None:
        stored = self._entries.pop(response_id)
        self._num_bytes -= stored.size
        for item_id in stored.item_ids:
            self._owners.pop(item_id, None)
        if self._file is not None and stored.stop is None:
            self._file.drop(response_id)


def items_of(history: Iterable[bytes]) -> list[Item]:
    """The items of a stored conversation."""
    return [item for part in history for item in msgspec.json.decode(part, type=list[Item])]
