# SPDX-License-Identifier: Apache-2.0
"""Makes generated text match a grammar: which tokens may come next, as a bit mask. One file a backend.

Knows grammars and the bytes of tokens; it does not know logits, requests or the wire. Torch-free: the API process
checks what the engine compiles.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenspeed.core.errors import ConfigError
from tokenspeed.core.ipc import Vocabulary
from tokenspeed.core.request import Grammar
from tokenspeed.grammar._schemas import Fitted, SchemaError, as_text, fit

__all__ = [
    "Compiler",
    "Fitted",
    "Grammar",
    "GrammarError",
    "Matcher",
    "SchemaError",
    "Tag",
    "Tags",
    "Vocabulary",
    "as_text",
    "check",
    "fit_schema",
    "names",
    "resolve",
]

DEFAULT = "llguidance"
Mask = NDArray[np.int32]
"""(ceil(V / 32),) bits: bit i % 32 of word i // 32 says whether token i may come."""


class GrammarError(Exception):
    """The grammar is wrong, or more than the backend can enforce. The message says what."""


class Tag(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of text with a form: `begin`, then a value of the JSON Schema `schema` or, where given, a text that the
    Lark grammar `lark` describes, then `end`. number_end: if not empty, digits and then this stand before the value.
    In free text it starts where `trigger`, with which begin begins, is met."""

    trigger: str
    begin: str
    end: str
    schema: str = "{}"
    lark: str | None = None
    number_end: str = ""


class Tags(msgspec.Struct, frozen=True, omit_defaults=True):
    """The source of a grammar of the kind tags: `tags` in free text, any number of them. not has_text: nothing but
    tags, at least one and at most num_max (None: any number), after `opening`, with `parting` from one to the next, and
    before `closing`; or, where `instead` is given, a value of that JSON Schema."""

    tags: tuple[Tag, ...]
    has_text: bool = True
    num_max: int | None = None
    opening: str = ""
    parting: str = ""
    closing: str = ""
    instead: str | None = None


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
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")))


def resolve(name: str, vocabulary: Vocabulary) -> Compiler:
    """The compiler of this backend. Takes a second or more; ConfigError names the others."""
    compiler: Compiler = _leaf(name).build(vocabulary)
    return compiler


def check(grammar: Grammar, name: str = DEFAULT, *, strict: bool = True) -> tuple[str, ...]:
    """Raises GrammarError when the backend cannot enforce the grammar. strict: a keyword of a JSON Schema that it does
    not know is such a fault; otherwise the keyword is among those returned, and what it asks for is not enforced."""
    fault, warnings = _verdict(grammar, name, strict)
    if fault is not None:
        raise GrammarError(fault)
    return warnings


def fit_schema(schema: Mapping[str, object], name: str = DEFAULT, *, strict: bool) -> Fitted:
    """How much of a JSON Schema the backend can enforce; see Fitted. strict: all of it, or SchemaError. Raises
    SchemaError, with the place, for what is no schema."""

    def fault(part: Mapping[str, object], is_strict: bool) -> str | None:
        return _verdict(Grammar("json_schema", as_text(part)), name, is_strict)[0]

    try:
        return fit(schema, fault, strict=strict)
    except RecursionError:
        raise SchemaError("", "the schema is nested too deeply") from None


@lru_cache(maxsize=4096)
def _verdict(grammar: Grammar, name: str, strict: bool) -> tuple[str | None, tuple[str, ...]]:
    """The fault, and the warnings. Agents send the same tools each turn."""
    try:
        warnings: Sequence[str] = _leaf(name).check(grammar, strict)
    except GrammarError as error:
        return str(error), ()
    return None, tuple(warnings)


def _leaf(name: str) -> ModuleType:
    if name not in names():
        raise ConfigError(f"no grammar backend is called {name!r}; there are {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")
