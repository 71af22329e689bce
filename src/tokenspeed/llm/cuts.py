# SPDX-License-Identifier: Apache-2.0
"""Where a text may be cut so that its pieces, encoded alone and put together, give the token ids of the whole text.

Three rules, each with the reason why it holds; the pattern of a rule matches only where it does. Knows pre-tokenizers,
added tokens and pieces of vocabularies; encodes nothing and remembers nothing.

A cut must fall where no added token is found across it, where the pre-tokenizer ends a word whatever comes before and
after, and where no merge joins the two sides.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from tokenspeed.llm.pretokenizers import PRE_TOKENIZERS

Cuts = re.Pattern[str]
"""Matches the empty string at each place where a text may be cut."""

_AFTER_LETTER = ' !"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'
"""No apostrophe: don't is cut in ways of its own."""
_AFTER_NEWLINE = string.digits + string.ascii_letters + "!\"#$%&'()*+,-.:;<=>?@[\\]^_`{|}~"
"""No slash: some pre-tokenizers keep it with the line end before it."""
_IDEOGRAPHS = "\u4e00-\u9fa5"
_AFTER_IDEOGRAPH = "\u3001\u3002\uff0c\uff1a\uff1b"
_NUM_LITERALS_MAX = 64
_KNOWN_PATTERNS = frozenset(pattern for known in PRE_TOKENIZERS.values() for pattern in known.patterns)


def cuts_of_words(added: Sequence[AddedToken], engine: Tokenizer) -> Cuts | None:
    """For byte-level vocabularies whose pre-tokenizer is a chain of the patterns of PRE_TOKENIZERS, with no normalizer
    or with NFC.

    None of these patterns has a part that takes a letter and then other ASCII than a letter, a digit or an apostrophe;
    nor one that takes a line end and then something printable, but for a slash; nor an ideograph and then the marks
    above. So a word ends there in every text, a match begins there in every text, and patterns look at nothing before
    the place where they begin. What looks ahead (whitespace does, by one character) sees no difference between the end
    of the text and what stands after the cut: of whitespace only a single line end comes before a cut. NFC composes
    nothing across these places, since what stands after them never composes with what is before.
    """
    if engine.normalizer is not None and any(token.normalized for token in added):
        return None
    return _between(added, _spellings(added, engine))


def cuts_of_pieces(added: Sequence[AddedToken], engine: Tokenizer, pieces: Iterable[str]) -> Cuts | None:
    """For SentencePiece vocabularies with merges and without a pre-tokenizer, whose normalizer only writes ▁ for a
    space.

    Merges make pieces of the vocabulary only. Where no piece has these two characters side by side no merge ever
    crosses, so the merges of both sides know nothing of each other. What is no piece must be spelled in bytes:
    neighbours that are unknown would become one token.
    """
    if any(engine.token_to_id(f"<0x{byte:02X}>") is None for byte in range(256)):
        return None
    return _between(added, [*_spellings(added, engine), *pieces])


def cuts_at_markup(added: Sequence[AddedToken], engine: Tokenizer) -> Cuts | None:
    """For every other vocabulary: before an added token, since what stands between added tokens is encoded alone.

    Only before those whose first character no added token has further inside, so that wherever such a token is written
    it is found; and only those that take no whitespace before them, and are looked for in the text as it is written.
    """
    if any(token.single_word for token in added):
        return None
    inside = {character for token in added for character in token.content[1:]}
    literals = [
        token.content
        for token in added
        if token.special
        and not token.lstrip
        and not (token.normalized and engine.normalizer is not None)
        and token.content[:1].strip()
        and token.content[0] not in inside
    ]
    if not literals:
        return None
    return re.compile(f"(?={'|'.join(map(re.escape, literals[:_NUM_LITERALS_MAX]))})")


def cuts_of_file(parsed: Mapping[str, object], added: Sequence[AddedToken], engine: Tokenizer) -> Cuts | None:
    """The rule for a tokenizer.json: the pieces of an SPM vocabulary, the words of known pre-tokenizers, or markup."""
    model = parsed.get("model")
    cuts = None
    if isinstance(model, dict) and _is_plain_bpe(model):
        normalizers = _chain(parsed.get("normalizer"), "normalizers")
        parts = _chain(parsed.get("pre_tokenizer"), "pretokenizers")
        if _are_known_words(parts) and all(each.get("type") == "NFC" for each in normalizers):
            cuts = cuts_of_words(added, engine)
        elif [_replaces_spaces(each) for each in normalizers] == [True] and all(map(_cuts_at_spaces, parts)):
            falls_back = model.get("byte_fallback") is True and model.get("ignore_merges") is not True
            cuts = cuts_of_pieces(added, engine, model["vocab"]) if falls_back else None
    return cuts or cuts_at_markup(added, engine)


def _between(added: Sequence[AddedToken], spelled: Sequence[str]) -> Cuts | None:
    """The places between two characters that stand side by side nowhere in `spelled`."""
    if any(token.single_word or token.lstrip for token in added):
        return None  # these look at what stands before them
    if any(token.rstrip and token.content[-1:].isalpha() for token in added):
        return None  # takes the whitespace after a letter
    joined = "\0".join(spelled).replace("▁", " ")
    characters = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    rules = []
    for before, codes, after in (
        ("[A-Za-z]", list(map(ord, string.ascii_letters)), _AFTER_LETTER),
        ("\n", [ord("\n")], _AFTER_NEWLINE),
        (f"[{_IDEOGRAPHS}]", range(ord(_IDEOGRAPHS[0]), ord(_IDEOGRAPHS[-1]) + 1), _AFTER_IDEOGRAPH),
    ):
        taken = _followers(characters, codes)
        free = "".join(re.escape(character) for character in after if character not in taken)
        if free:
            rules.append(f"(?<={'[!-~]' if before == chr(10) else ''}{before})(?=[{free}])")
    return re.compile("|".join(rules)) if rules else None


def _followers(characters: NDArray[np.uint32], codes: Sequence[int]) -> set[str]:
    """What stands behind one of these characters anywhere in a text."""
    is_one, follows = np.zeros((2, sys.maxunicode + 1), np.bool_)
    is_one[list(codes)] = True
    follows[characters[1:][is_one[characters[:-1]]]] = True
    return set(map(chr, np.flatnonzero(follows)))


def _spellings(added: Sequence[AddedToken], engine: Tokenizer) -> list[str]:
    """How added tokens may be written in a text, before and after it is normalized."""
    contents = [token.content for token in added]
    normalizer = engine.normalizer
    return contents if normalizer is None else [*contents, *map(normalizer.normalize_str, contents)]


def _is_plain_bpe(model: Mapping[str, object]) -> bool:
    wanted: dict[str, tuple[object, ...]] = {
        "type": ("BPE",),
        "dropout": (None, 0.0),
        "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""),
    }
    return all(model.get(key) in values for key, values in wanted.items()) and isinstance(model.get("vocab"), dict)


def _chain(part: object, key: str) -> list[Mapping[str, object]]:
    """The parts of a sequence, or the one part that there is."""
    if not isinstance(part, dict):
        return []
    inner = part.get(key)
    return [each for one in inner for each in _chain(one, key)] if isinstance(inner, list) else [part]


def _are_known_words(parts: Sequence[Mapping[str, object]]) -> bool:
    """Whether the parts cut by known patterns, at least once, and then spell bytes."""
    patterns = 0
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"} if not part.get(
                "invert"
            ):
                if pattern not in _KNOWN_PATTERNS:
                    return False
                patterns += 1
            case {"type": "ByteLevel", "add_prefix_space": False}:
                patterns += part.get("use_regex", True) is True
            case {"type": "Digits"}:
                continue
            case _:
                return False
    return patterns > 0


def _replaces_spaces(normalizer: Mapping[str, object]) -> bool:
    return normalizer.get("type") == "Replace" and (normalizer.get("pattern"), normalizer.get("content")) == (
        {"String": " "},
        "▁",
    )


def _cuts_at_spaces(part: Mapping[str, object]) -> bool:
    """Whether a pre-tokenizer cuts at spaces only, of which a normalizer leaves none."""
    return part.get("type") == "Split" and part.get("pattern") == {"String": " "}
