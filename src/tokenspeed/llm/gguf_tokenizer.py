# SPDX-License-Identifier: Apache-2.0
"""Vocabularies embedded in GGUF files: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

Knows what GGUF leaves unsaid: pre-tokenizers are only named, and SPM merges follow from the scores of the pieces.
Reads no file.
"""

from __future__ import annotations

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from tokenspeed.checkpoints import GgufVocabulary
from tokenspeed.core.errors import TokenizerError
from tokenspeed.llm.cuts import cuts_at_markup, cuts_of_pieces, cuts_of_words
from tokenspeed.llm.pretokenizers import PRE_TOKENIZERS
from tokenspeed.llm.vocabulary import Spelling, Vocabulary, assemble, assemble_plain

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"


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
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=lambda piece: (-scores[piece], -len(piece)))
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in scores and token[cut:] in scores
    ]


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
