# SPDX-License-Identifier: Apache-2.0
"""Makes generated text match a grammar: which tokens may come next, as a bit mask. One file a backend.

Knows grammars and the bytes of tokens; it does not know logits, requests or the wire. Torch-free: the API process
checks what the engine compiles.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.errors import ConfigError
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.request import Grammar

__all__ = ["Compiler", "Grammar", "GrammarError", "Matcher", "Tag", "Tags", "Vocabulary", "names", "resolve"]

DEFAULT = "llguidance"
Mask = NDArray[np.int32]
"""(ceil(V / 32),) bits: bit i % 32 of word i // 32 says whether token i may come."""


class GrammarError(Exception):
    """The grammar is wrong, or more than the backend can enforce. The message says what."""


class Tag(msgspec.Struct, frozen=True):
    """A stretch of text with a form: `begin`, then a value of the JSON Schema `schema`, or a text that the Lark grammar
    `lark` describes, then `end`. In free text it starts where `trigger`, with which begin begins, is met."""

    trigger: str
    begin: str
    end: str
    schema: str | None = None
    lark: str | None = None


class Tags(msgspec.Struct, frozen=True):
    """The source of a grammar of the kind tags. Some of `tags`, at least num_min and at most num_max (None: any
    number), with free text before and after each where has_text, and otherwise with just `between` from one to the
    next, after `first` and before `last`."""

    tags: tuple[Tag, ...]
    has_text: bool = True
    num_min: int = 0
    num_max: int | None = None
    first: str = ""
    between: str = ""
    last: str = ""


class Matcher(Protocol):
    """Follows one text. Used by one thread at a time."""

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next; never none. Raises GrammarError when following has become too hard."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take the next token; False, and nothing can follow, when it may not come here."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens accepted tokens."""
        ...

    def copy(self) -> Matcher:
        """Another one in the same state."""
        ...


class Compiler(Protocol):
    """Grammars to matchers, for one vocabulary. Any thread."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of the text. Raises GrammarError."""
        ...


def names() -> tuple[str, ...]:
    """The backends that there are."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def resolve(name: str, vocabulary: Vocabulary) -> Compiler:
    """The compiler of this backend. Takes a second or more; ConfigError names the others."""
    compiler: Compiler = _leaf(name).build(vocabulary)
    return compiler


def check(grammar: Grammar, name: str = DEFAULT, *, strict: bool = True) -> tuple[str, ...]:
    """Raises GrammarError when the backend cannot enforce the grammar. strict: a keyword of a JSON Schema that it does
    not know is such a fault; otherwise the keyword is among those returned, and what it asks for is not enforced."""
    warnings: Sequence[str] = _leaf(name).check(grammar, strict)
    return tuple(warnings)


def _leaf(name: str) -> ModuleType:
    if name not in names():
        raise ConfigError(f"no grammar backend is called {name!r}; there are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")
