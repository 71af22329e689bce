# SPDX-License-Identifier: Apache-2.0
"""Token ids of the pieces of texts that were encoded lately, so that a conversation that grew is not encoded again.

A text is cut into blocks, and a block that is not remembered into pieces; what is not remembered either is encoded.
Where the cuts fall follows from the text alone, and the ids of a piece from the piece alone: sessions share what they
have in common without being known, and nothing remembered can be wrong for another text. Memory is bounded; what was
used longest ago goes first. Knows no chat and no session.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from tokenizers import Tokenizer

from tokenspeed.core.request import pack_ids
from tokenspeed.llm.cuts import Cuts

BLOCK_CHARS = 8192
PIECE_CHARS = 512
BYTES_MAX = 128 * 1024 * 1024
_ENTRY_BYTES = 256  # what Python needs for the objects of an entry, about
_SURROGATE = re.compile("[\ud800-\udfff]")


class PieceCache:
    """Encodes with `engine`, without the tokens that surround a text. May be called from several threads at once.

    cuts: where texts may be cut; without it every text is one piece.
    """

    def __init__(self, engine: Tokenizer, cuts: Cuts | None, bytes_max: int = BYTES_MAX) -> None:
        self._engine = engine
        self._cuts = cuts
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._entries: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory that is in use, about."""
        return self._num_bytes

    def encode(self, text: str) -> list[bytes]:
        """The packed ids of the parts of `text`, in order."""
        blocks = list(self._parts(text, BLOCK_CHARS, len(text)))
        with self._lock:
            known = self._recall(blocks)
            pieces = {
                block: list(self._parts(block, PIECE_CHARS, BLOCK_CHARS)) for block in blocks if block not in known
            }
            known |= self._recall(part for parts in pieces.values() for part in parts)
        fresh = self._encode_all({part for parts in pieces.values() for part in parts if part not in known})
        known |= fresh
        for block, parts in pieces.items():
            if len(parts) > 1:
                known[block] = b"".join([known[part] for part in parts])
                if block is not blocks[-1]:  # the end of a text is soon the beginning of a longer block
                    fresh[block] = known[block]
        with self._lock:
            self._remember(fresh)
        return [known[block] for block in blocks]

    def _parts(self, text: str, num_chars: int, end: int) -> Iterator[str]:
        """Parts of at least `num_chars` characters each, the last excepted; no cut at `end` or after it."""
        start = 0
        while self._cuts is not None and (cut := self._cuts.search(text, start + num_chars, end)):
            yield text[start : cut.start()]
            start = cut.start()
        if start < len(text):
            yield text[start:]

    def _encode_all(self, parts: Iterable[str]) -> dict[str, bytes]:
        parts = list(parts)
        texts = [without_surrogates(part) for part in parts]
        encodings = self._engine.encode_batch_fast(texts, add_special_tokens=False)
        return {part: pack_ids(encoding.ids) for part, encoding in zip(parts, encodings, strict=True)}

    def _recall(self, parts: Iterable[str]) -> dict[str, bytes]:
        """What is remembered of these parts."""
        entries = self._entries
        known: dict[str, bytes] = {}
        for part in parts:
            ids = entries.get(part)
            if ids is not None:
                entries.move_to_end(part)
                known[part] = ids
        return known

    def _remember(self, fresh: Mapping[str, bytes]) -> None:
        for part, ids in fresh.items():
            if part not in self._entries:
                self._entries[part] = ids
                self._num_bytes += _num_bytes(part, ids)
        while self._num_bytes > self._bytes_max:
            self._num_bytes -= _num_bytes(*self._entries.popitem(last=False))


def without_surrogates(text: str) -> str:
    """Text that can be written as UTF-8: a lone surrogate, which JSON can smuggle in, becomes U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _num_bytes(part: str, ids: bytes) -> int:
    return _ENTRY_BYTES + sys.getsizeof(part) + sys.getsizeof(ids)
