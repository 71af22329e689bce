# SPDX-License-Identifier: Apache-2.0
"""Vocabularies of a few hundred tokens, one of each kind, and SentencePiece's rule written down plainly."""

from __future__ import annotations

from itertools import pairwise

from tokenspeed.checkpoints import GgufVocabulary

BYTE_LETTERS = [
    chr(byte) if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE else None for byte in range(256)
]


def byte_letters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE."""
    spare = iter(range(0x100, 0x200))
    return [letter or chr(next(spare)) for letter in BYTE_LETTERS]


def byte_level(pre: str = "qwen2", *, add_bos: bool = False) -> GgufVocabulary:
    """256 bytes, a few merges, two control tokens (256, 257) and two user-defined ones (258, 259)."""
    letters = byte_letters()
    space = letters[0x20]
    merges = ["h e", "l l", "he ll", "hell o", f"{space} w", f"{space} {space}", "1 2", "12 3", f"{space} 1"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*letters, "<|bos|>", "<|end|>", "<think>", "  \n", *merged]
    types = [1] * 256 + [3, 3, 4, 4] + [1] * len(merged)
    return GgufVocabulary(
        model="gpt2",
        pre=pre,
        tokens=tuple(tokens),
        scores=(),
        token_types=tuple(types),
        merges=tuple(merges),
        bos_id=256,
        eos_id=257,
        unk_id=None,
        pad_id=None,
        add_bos=add_bos,
        add_eos=False,
        add_space_prefix=False,
    )


def spm(*, add_space_prefix: bool = True, add_bos: bool = True) -> GgufVocabulary:
    """<unk> <s> </s>, 256 bytes, user-defined newlines and tags, a control token that looks like a word,
    and pieces over `abn▁=é` with scores by rank."""
    fixed = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\n\n",
        "\n\n\n",
        "<b>",
        "<|sep|>",
        "nab",
    ]
    types = [2, 3, 3] + [6] * 256 + [4] * 4 + [3]
    pieces = ["▁a", "an", "▁▁", "==", "▁an", "ana", "▁▁▁▁", "====", "ba", "nan", "▁ba", "na", "▁ban", "▁banana", "éa"]
    letters = ["▁", "a", "b", "n", "=", "é"]
    tokens = [*fixed, *pieces, *letters]
    scores = [0.0] * len(fixed) + [float(-rank) for rank in range(1, len(pieces) + len(letters) + 1)]
    return GgufVocabulary(
        model="llama",
        pre="default",
        tokens=tuple(tokens),
        scores=tuple(scores),
        token_types=tuple(types + [1] * (len(pieces) + len(letters))),
        merges=(),
        bos_id=1,
        eos_id=2,
        unk_id=0,
        pad_id=None,
        add_bos=add_bos,
        add_eos=False,
        add_space_prefix=add_space_prefix,
    )


class SpmByRule:
    """SentencePiece BPE on text without added tokens: join the best-scoring adjacent pair, the leftmost of equals,
    until no pair makes a piece; what is not a piece falls back to its bytes. Quadratic, for tests."""

    def __init__(self, vocabulary: GgufVocabulary) -> None:
        self._has_prefix = vocabulary.add_space_prefix
        self._scores = vocabulary.scores
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens)}
        self._pieces = {token: i for token, i in self._ids.items() if vocabulary.token_types[i] == 1}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without BOS."""
        if not text:
            return []
        symbols = list((" " + text if self._has_prefix else text).replace(" ", "▁"))
        while candidates := [
            (-self._scores[self._pieces[left + right]], place)
            for place, (left, right) in enumerate(pairwise(symbols))
            if left + right in self._pieces
        ]:
            place = min(candidates)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return [token_id for symbol in symbols for token_id in self._symbol_ids(symbol)]

    def _symbol_ids(self, symbol: str) -> list[int]:
        if symbol in self._pieces:
            return [self._pieces[symbol]]
        return [self._ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
