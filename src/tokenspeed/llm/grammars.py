# SPDX-License-Identifier: Apache-2.0
"""What grammars need of a tokenizer, and grammars as a caller gives them, checked before they cross to the engine.

Knows no wire dialect and no mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.core.errors import InvalidRequestError
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.request import Grammar
from tokenspeed.grammar import GrammarError, check
from tokenspeed.llm.tokenizer import Tokenizer

SOURCE_CHARS_MAX = 4_000_000


def vocabulary_of(tokenizer: Tokenizer, end_ids: Sequence[int]) -> Vocabulary:
    """Takes a second or more for a large vocabulary. end_ids: the model's own."""
    ids = range(tokenizer.vocab_size)
    return Vocabulary(
        tokens=tuple(tokenizer.token_bytes(token_id) for token_id in ids),
        special_ids=tuple(token_id for token_id in ids if tokenizer.is_special(token_id)),
        end_ids=tuple(end_ids),
        tokenizer=tokenizer.engine_json(),
    )


def checked_grammar(grammar: Grammar) -> Grammar:
    """The grammar; InvalidRequestError when it cannot be enforced. A keyword of a JSON Schema that is not known to the
    backend is for the caller to settle before."""
    if len(grammar.source) > SOURCE_CHARS_MAX:
        raise InvalidRequestError(
            f"the grammar has {len(grammar.source)} characters; at most {SOURCE_CHARS_MAX} are taken", "grammar"
        )
    try:
        check(grammar, strict=False)
    except GrammarError as error:
        raise InvalidRequestError(f"grammar: {error}", "grammar") from None
    return grammar
