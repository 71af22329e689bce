# SPDX-License-Identifier: Apache-2.0
"""The parts of a tokenizer, whatever file they came from.

Knows how a `tokenizers` engine is put together so that the text of a control token can also be encoded as ordinary
text. Knows no file format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Model
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from tokenspeed.llm.cuts import Cuts

Spelling = Literal["byte_level", "spm"]
"""How tokens spell bytes: byte_level, one printable character a byte; spm, UTF-8 with ▁ for a space and <0xNN>."""

_MARKUP_IN_SPM = re.compile(r"\||tool|think|start_of|end_of")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What Tokenizer needs. engine matches all added tokens; plain takes the text of markup as ordinary text.

    prefix_ids and suffix_ids surround a text that is encoded with special tokens. literals: the exact text of each
    added token. strips_space: encoding puts a space before a text, so decoding a whole text drops it. lead: what goes
    before a text that does not begin with an added token, where the engine does not see to it. cuts: where a text may
    be cut so that the pieces have the ids of the whole, in `engine`; None where no rule is known.
    """

    engine: Tokenizer
    plain: Tokenizer
    spelling: Spelling
    size: int
    token: Callable[[int], str | None]
    literals: dict[int, str]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_id: int | None
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    strips_space: bool
    lead: str
    cuts: Cuts | None


def assemble(
    model: Model, normalizer: Normalizer | None, pre_tokenizer: PreTokenizer | None, added: Sequence[AddedToken]
) -> Tokenizer:
    """An engine with these added tokens, which must come in the order of their ids."""
    engine = Tokenizer(model)
    if normalizer is not None:
        engine.normalizer = normalizer
    if pre_tokenizer is not None:
        engine.pre_tokenizer = pre_tokenizer
    for special, group in groupby(added, key=lambda token: token.special):
        if special:
            engine.add_special_tokens(list(group))
        else:
            engine.add_tokens(list(group))
    return engine


def assemble_plain(
    model: Model,
    normalizer: Normalizer | None,
    pre_tokenizer: PreTokenizer | None,
    added: Sequence[AddedToken],
    spelling: Spelling,
) -> Tokenizer:
    """The twin for data: markup is declared special, and special tokens are then not looked for."""
    declared = [_declare(token, special=is_markup(token, spelling)) for token in added]
    plain = assemble(model, normalizer, pre_tokenizer, declared)
    plain.encode_special_tokens = True
    return plain


def is_markup(token: AddedToken, spelling: Spelling) -> bool:
    """Whether an added token steers the model, so that the same text inside data must not become it.

    Special tokens are. Of the others, a byte-level vocabulary adds little but markup (<tool_call>, <think>) and runs
    of whitespace; SPM vocabularies also add pieces of ordinary text (HTML tags, runs of newlines), which stay tokens.
    """
    if token.special:
        return True
    if not token.content.strip(" \t\r\n▁"):
        return False
    return spelling == "byte_level" or _MARKUP_IN_SPM.search(token.content) is not None


def _declare(token: AddedToken, special: bool) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )
