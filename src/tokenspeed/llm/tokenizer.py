# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, once, in the API process.

Decoding is defined through bytes: a text is the bytes of its tokens, read as UTF-8 with U+FFFD for what is not. Nothing
is cleaned up, so that the one-shot and the incremental decode can never differ. Knows no chat, no model and no request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Tokenizer as Engine

from tokenspeed.chat.control_text import ControlTexts
from tokenspeed.checkpoints import GgufVocabulary, TokenizerFile, TokenizerSource
from tokenspeed.core.request import pack_ids
from tokenspeed.llm.gguf_tokenizer import build_gguf
from tokenspeed.llm.piece_cache import PieceCache, without_surrogates
from tokenspeed.llm.token_ids import TokenIds
from tokenspeed.llm.tokenizer_file import build_file
from tokenspeed.llm.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
PLAIN_BYTES_MAX = 4 * 1024 * 1024
"""For control texts inside data, of which there are few."""


class Tokenizer:
    """Remembers, but answers as if it did not; every method may be called from several threads at once. control_texts:
    what steers the model where a template writes it, and is plain text inside data."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}
        self._added = {True: tuple(vocabulary.literals.values()), False: _ordinary(vocabulary.plain)}
        ordinary = set(self._added[False])
        self.control_texts = tuple(text for text in self._added[True] if text not in ordinary and len(text) > 1)
        self.controls = ControlTexts(self.control_texts)
        self._cache = PieceCache(vocabulary.engine, vocabulary.cuts)
        self._plain_cache = PieceCache(vocabulary.plain, None, PLAIN_BYTES_MAX)
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.strips_space = vocabulary.strips_space

    @classmethod
    def from_source(cls, source: TokenizerSource) -> Tokenizer:
        """A tokenizer from a tokenizer.json or an embedded vocabulary. Raises TokenizerError."""
        match source:
            case TokenizerFile():
                return cls(build_file(source))
            case GgufVocabulary():
                return cls(build_gguf(source))

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: surround it as the vocabulary says (BOS, EOS); a text that already begins with BOS gets no
        second one. A rendered chat template brings its own, so encode that with False.
        parse_special: the text of a control token becomes that token; with False it is ordinary text, for data.
        """
        if parse_special:
            return list(self.encode_prompt(text, add_special_tokens=add_special_tokens))
        text = self._led(without_surrogates(text), False)
        ids: list[int] = self._vocabulary.plain.encode(text, add_special_tokens=False).ids
        return list(self._surrounded(TokenIds.of(ids))) if add_special_tokens else ids

    def encode_prompt(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """As encode. What a text has in common with those encoded lately is not encoded again."""
        ids = TokenIds(b"".join(self._cache.encode(self._led(text, True))))
        return self._surrounded(ids) if add_special_tokens else ids

    def encode_marked(self, text: str, mark: str) -> TokenIds:
        """Token ids of a rendered conversation in which control texts that are data are broken by `mark` after their
        first character: each becomes ordinary tokens, alone, and the rest is encoded as by `encode`. Marks vanish."""
        parts: list[bytes] = []
        for index, piece in enumerate(self._split_at_marks(text, mark)):
            clean = piece.replace(mark, "")
            if index == 0:
                clean = self._led(clean, True)
            parts += self._plain_cache.encode(clean) if index % 2 else self._cache.encode(clean)
        return TokenIds(b"".join(parts))

    def _led(self, text: str, parse_special: bool) -> str:
        """The text with what the vocabulary puts before it."""
        lead = self._vocabulary.lead
        return lead + text if lead and text and not text.startswith(self._added[parse_special]) else text

    def _surrounded(self, ids: TokenIds) -> TokenIds:
        prefix, suffix = self._vocabulary.prefix_ids, self._vocabulary.suffix_ids
        if ids[: len(prefix)] == prefix:
            prefix = ()
        return TokenIds(pack_ids(prefix) + ids.packed + pack_ids(suffix)) if prefix or suffix else ids

    def _split_at_marks(self, text: str, mark: str) -> list[str]:
        """Ordinary text and broken control text in turn; of several control texts at one place, the longest."""
        pieces: list[str] = []
        start, place = 0, text.find(mark)
        while place >= 0:
            begin = place - 1
            control = self.controls.at(text, begin, gap=1) if begin >= start else None
            if control is not None:
                end = begin + len(control) + 1
                pieces += [text[start:begin], text[begin:end]]
                start = end
            place = text.find(mark, place + 1)
        return [*pieces, text[start:]]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True, from_start: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        from_start: these are the tokens of a whole text, so the space that an SPM vocabulary put before it is dropped.
        Text that a model generates continues a prompt: there it is False.
        """
        data = b"".join([self.token_bytes(i) for i in ids if not (skip_special_tokens and self.is_special(i))])
        if from_start and self.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def engine_json(self) -> str:
        """The `tokenizers` engine that encodes text inside a text, for a process that has to cut text alike."""
        return str(self._vocabulary.engine.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, the text of an added one; empty for an id that only pads the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """The bytes of a token as text; U+FFFD where the token alone is not valid UTF-8."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves this token out."""
        return token_id in self._vocabulary.special_ids

    def _spell(self, token_id: int) -> bytes:
        vocabulary = self._vocabulary
        literal = vocabulary.literals.get(token_id)
        if literal is not None:
            return literal.replace("▁", " ").encode() if self._is_spm_text(token_id) else literal.encode()
        token = vocabulary.token(token_id) if 0 <= token_id < vocabulary.size else None
        if token is None:
            return b""
        if vocabulary.spelling == "byte_level":
            return _from_byte_level(token)
        byte = _BYTE_TOKEN.match(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

    def _is_spm_text(self, token_id: int) -> bool:
        return self._vocabulary.spelling == "spm" and not self.is_special(token_id)


def _ordinary(plain: Engine) -> tuple[str, ...]:
    """The added tokens that are looked for in data too."""
    return tuple(token.content for token in plain.get_added_tokens_decoder().values() if not token.special)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it has one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
