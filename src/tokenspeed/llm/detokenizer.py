# SPDX-License-Identifier: Apache-2.0
"""Token ids to text as they come, at a cost linear in their number.

Law: for every way to cut a list of ids into pushes, the joined results equal `Tokenizer.decode` of the list with the
same settings. Knows no stop strings and no request.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tokenspeed.llm.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text that is final: an unfinished UTF-8 sequence is held back until it is complete or broken.

    from_start is as in Tokenizer.decode. The default False is for generated text, which continues a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, from_start: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._drops_space = from_start and tokenizer.strips_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds_back = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens made final, maybe none."""
        tokenizer = self._tokenizer
        if self._skips_special:
            ids = [token_id for token_id in ids if not tokenizer.is_special(token_id)]
        data = b"".join(map(tokenizer.token_bytes, ids))
        if self._drops_space and data:
            self._drops_space = False
            data = data.removeprefix(b" ")
        if not self._holds_back and data.isascii():
            return data.decode()
        text = self._decoder.decode(data)
        self._holds_back = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What was held back; U+FFFD stands for a sequence that never became whole."""
        return self._decoder.decode(b"", final=True)
