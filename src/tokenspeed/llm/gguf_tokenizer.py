# SPDX-License-Identifier: Apache-2.0
"""Vocabularies embedded in GGUF files: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Knows what GGUF leaves unsaid: pre-tokenizers are only named, and SPM merges follow from the scores of the pieces.
Reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from tokenspeed.checkpoints import GgufVocabulary
from tokenspeed.core.errors import TokenizerError
from tokenspeed.llm.cuts import cuts_at_markup, cuts_of_pieces, cuts_of_words
from tokenspeed.llm.pretokenizers import PRE_TOKENIZERS
from tokenspeed.llm.vocabulary import Spelling, Vocabulary, assemble, assemble_plain

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_HASH_BASE, _HASH_MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
"""Odd, and bits of no pattern."""


def build_gguf(source: GgufVocabulary) -> Vocabulary:
    """The vocabulary as an engine. Raises TokenizerError when its kind or its pre-tokenizer is unknown."""
    if not source.tokens:
        raise TokenizerError("the GGUF file has no tokens (tokenizer.ggml.tokens is empty); use a complete file")
    if source.model == "gpt2":
        return _byte_level(source)
    if source.model == "llama":
        return _spm(source)
    raise TokenizerError(
        f"tokenizer.ggml.model {source.model!r} is not supported; supported are gpt2 (byte-level BPE) and llama (SPM)"
    )


def _byte_level(source: GgufVocabulary) -> Vocabulary:
    known = PRE_TOKENIZERS.get(source.pre or "default")
    if known is None:
        names = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(f"tokenizer.ggml.pre {source.pre!r} is not a known pre-tokenizer; known are {names}")
    pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in known.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    merges = [_split_merge(merge) for merge in source.merges]
    vocab = {token: index for index, token in enumerate(source.tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=known.whole_words)
    except Exception as error:
        raise TokenizerError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    return _finish(source, model, None, pre_tokenizer, "byte_level")


def _split_merge(merge: str) -> tuple[str, str]:
    """A merge is two pieces with a space between them; a piece may itself begin with a space."""
    cut = merge.find(" ", 1)
    if cut < 0:
        raise TokenizerError(f"tokenizer.ggml.merges has {merge!r}, which is not two pieces with a space between them")
    return merge[:cut], merge[cut + 1 :]


def _spm(source: GgufVocabulary) -> Vocabulary:
    if len(source.scores) != len(source.tokens) or len(source.token_types) != len(source.tokens):
        raise TokenizerError(
            f"the GGUF vocabulary has {len(source.tokens)} tokens, {len(source.scores)} scores and "
            f"{len(source.token_types)} types; an SPM vocabulary needs one of each"
        )
    vocab = {token: index for index, token in enumerate(source.tokens)}
    unknown = source.tokens[source.unk_id] if source.unk_id is not None else None
    model = models.BPE(vocab, _spm_merges(source), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return _finish(source, model, normalizers.Replace(" ", _SPACE), None, "spm")


def _spm_merges(source: GgufVocabulary) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best score first.

    SentencePiece merges the adjacent pair whose union has the best score, the leftmost of equals. Control, byte and
    user-defined pieces never come from a merge. Of equal scores the longer piece comes first, of equal pieces the
    longer left part: that is what leftmost-first amounts to in runs of one character.
    """
    scores = {
        token: score
        for token, score, kind in zip(source.tokens, source.scores, source.token_types, strict=True)
        if kind in (NORMAL, UNUSED)
    }
    pieces = list(scores)
    lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
    order = np.lexsort((-lengths, -np.fromiter(scores.values(), np.float64, len(pieces))))
    found = _halves(pieces, lengths, order)
    if found is None:
        wholes = (pieces[place] for place in order.tolist())
        halves = ((whole[:cut], whole[cut:]) for whole in wholes for cut in range(len(whole) - 1, 0, -1))
        return [(left, right) for left, right in halves if left in scores and right in scores]
    every = zip(*(map(pieces.__getitem__, places.tolist()) for places in found), strict=True)
    return [(left, right) for whole, left, right in every if left + right == whole]


Places = NDArray[np.int64]


def _halves(pieces: Sequence[str], lengths: Places, order: Places) -> tuple[Places, Places, Places] | None:
    """The places of all pieces that are two pieces, and of these two, in this order and the longest left part first.
    None where that cannot be told.

    A part is known by its hash, the sum of its characters times powers of an odd number modulo 2 ** 64: for any part
    of a text that is the difference of two of its running sums. So two may be there that are not the halves. But none
    is missing, where no two pieces have the same hash.
    """
    characters = np.frombuffer("".join(pieces).encode("utf-32-le", "surrogatepass"), np.uint32)
    powers = np.full(len(characters) + 1, _HASH_BASE, np.uint64)
    powers[0] = 1
    powers = np.multiply.accumulate(powers)
    sums = np.zeros_like(powers)
    np.cumsum(characters * powers[:-1], out=sums[1:])

    def hashes(begins: Places, ends: Places) -> NDArray[np.uint64]:
        return (sums[ends] - sums[begins]) * powers[len(characters) - begins]

    ends = np.cumsum(lengths)
    known = _Known(hashes(ends - lengths, ends))
    if not known.are_distinct:
        return None
    num_cuts = np.maximum(lengths[order] - 1, 0)
    wholes = np.repeat(order, num_cuts)
    cuts = (ends - lengths)[wholes] + np.repeat(np.cumsum(num_cuts), num_cuts) - np.arange(len(wholes))
    lefts, is_known = known.find(hashes((ends - lengths)[wholes], cuts))
    wholes, cuts = wholes[is_known], cuts[is_known]
    rights, is_right_known = known.find(hashes(cuts, ends[wholes]))
    return wholes[is_right_known], lefts[is_right_known], rights


class _Known:
    """Where each of many hashes is."""

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._order = np.argsort(hashes)
        self._sorted = hashes[self._order]
        self.are_distinct = bool((self._sorted[1:] != self._sorted[:-1]).all())
        self._shift = np.uint64(64 - (16 * len(hashes)).bit_length())
        self._may_be = np.zeros(1 << (16 * len(hashes)).bit_length(), np.bool_)
        self._may_be[self._short(hashes)] = True

    def find(self, hashes: NDArray[np.uint64]) -> tuple[Places, NDArray[np.bool_]]:
        """The places of those that are known, and which these are."""
        is_known = self._may_be[self._short(hashes)]  # most are not, and a look at one bit says so
        wanted = hashes[is_known]
        found = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        is_there = self._sorted[found] == wanted
        is_known[is_known] = is_there
        return self._order[found[is_there]], is_known

    def _short(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return (hashes * np.uint64(_HASH_MIX)) >> self._shift


def _finish(
    source: GgufVocabulary,
    model: models.Model,
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    spelling: Spelling,
) -> Vocabulary:
    kinds = source.token_types or (NORMAL,) * len(source.tokens)
    added_kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    added_ids = [index for index, kind in enumerate(kinds) if kind in added_kinds and source.tokens[index]]
    added = [AddedToken(source.tokens[i], normalized=False, special=kinds[i] != USER_DEFINED) for i in added_ids]
    has_lead = spelling == "spm" and source.add_space_prefix
    for index in (source.bos_id, source.eos_id, source.unk_id, source.pad_id):
        if index is not None and not 0 <= index < len(source.tokens):
            raise TokenizerError(f"the GGUF vocabulary names token {index}, but it has {len(source.tokens)} tokens")
    engine = assemble(model, normalizer, pre_tokenizer, added)
    cuts = cuts_of_words(added, engine) if spelling == "byte_level" else cuts_of_pieces(added, engine, source.tokens)
    return Vocabulary(
        engine=engine,
        plain=assemble_plain(model, normalizer, pre_tokenizer, added, spelling),
        spelling=spelling,
        size=len(source.tokens),
        token=source.tokens.__getitem__,
        literals={index: source.tokens[index] for index in added_ids},
        special_ids=frozenset(index for index in added_ids if kinds[index] != USER_DEFINED),
        bos_id=source.bos_id,
        eos_id=source.eos_id,
        prefix_ids=(source.bos_id,) if source.add_bos and source.bos_id is not None else (),
        suffix_ids=(source.eos_id,) if source.add_eos and source.eos_id is not None else (),
        strips_space=has_lead,
        lead=" " if has_lead else "",
        cuts=cuts or cuts_at_markup(added, engine),
    )
