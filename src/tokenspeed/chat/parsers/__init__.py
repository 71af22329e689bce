# SPDX-License-Identifier: Apache-2.0
"""Reads back what a model writes: reasoning, content and tool calls, while it is written. One file a dialect.

A parser sees text only, with the marks of the dialect in it (special tokens kept) and without the token that ends the
turn. It knows no token, no wire format and no engine. For every text and every split of it into chunks, the joined
deltas are the same, and nothing that was sent is taken back.

Files that begin with an underscore are what dialects are made of; they are no dialects.
"""

from __future__ import annotations

import importlib
import pkgutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import Protocol

import msgspec

from tokenspeed.chat import Tool
from tokenspeed.core.errors import ConfigError

Schema = Mapping[str, object]
"""A JSON schema."""


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins; its arguments follow, then its end. index counts the calls of the message from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the arguments of a call, as JSON text."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The call is over. complete: its arguments are one whole JSON object; otherwise the text ended or broke in them,
    which happens only where Context.sound_calls let them leave early."""

    index: int
    complete: bool = True


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


def new_id() -> str:
    """An id for a call whose dialect writes none."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Context:
    """What a parser is told of its request.

    tools: the schema of the parameters of each tool, by name; when empty, tool markup is content.
    starts_in_reasoning: the prompt has already opened the reasoning block, see `opens_reasoning`.
    parallel_tool_calls: if False, the parser is done after the first complete call and reads no further.
    sound_calls: something, such as a grammar, makes every call well formed, so arguments leave while they are written.
        If False, a call is withheld until it is complete, since text that turns out to be no call is content.
    make_id: gives ids to calls.
    """

    tools: Mapping[str, Schema] = field(default_factory=dict)
    starts_in_reasoning: bool = False
    parallel_tool_calls: bool = True
    sound_calls: bool = False
    make_id: Callable[[], str] = new_id


class Parser(Protocol):
    """Reads one message. Used by one thread at a time."""

    @property
    def done(self) -> bool:
        """No further text can matter: generation may stop."""
        ...

    @property
    def withholds(self) -> bool:
        """Text was taken that has not left yet: a stream that is silent now is silent for a reason."""
        ...

    def at_once(self, text: str) -> Delta | None:
        """All that `feed` would return of this chunk, where that is one delta and the parser would not change by it,
        so that it need not be fed; None where it must be."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """What can be said after this chunk. Time is linear in the text, over all chunks."""
        ...

    def finish(self) -> list[Delta]:
        """What is left when the text has ended; called once, and nothing is fed afterwards.

        A call that was withheld and is not complete is content. One that has left in part is ended as incomplete.
        """
        ...


Build = Callable[[Context], Parser]


@dataclass(frozen=True, slots=True)
class TaggedParameters:
    """How a dialect tags parameters: open KEY, then before_text or before_json, VALUE close, for each; after the last
    one, or where there are none, end. A line break in these is layout and may be missing."""

    open: str
    before_text: str
    before_json: str
    close: str
    end: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a dialect writes a call whose arguments are JSON: begin, the arguments, end.

    trigger: what begin begins with; where it stands in a reply, a call follows. before_name, after_name: what stands
    around the name of the tool, up to the arguments. number_end: if not empty, the number of the call, in digits, and
    then this stand between begin and the arguments. opening, parting, closing: what stands before the first call of a
    reply, between two and after the last. ambiguous: the trigger stands in answers too, so only a reply that has to be
    a call can be held to this form. name: the tool; a dialect leaves it empty. tagged: the arguments are no JSON but
    parameters in tags, up to the tags' end, and then comes end.
    """

    trigger: str
    before_name: str
    after_name: str
    end: str
    number_end: str = ""
    opening: str = ""
    parting: str = ""
    closing: str = ""
    ambiguous: bool = False
    name: str = ""
    tagged: TaggedParameters | None = None

    @property
    def begin(self) -> str:
        """The text up to the arguments, or up to the number."""
        return f"{self.before_name}{self.name}{self.after_name}"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How a dialect opens and closes reasoning, and what then stands before an answer."""

    open: str = "<think>"
    close: str = "</think>"
    answer: str = ""


@cache
def names() -> tuple[str, ...]:
    """The dialects that there are."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")))


def resolve(name: str) -> Build:
    """What builds the parser of this dialect for a request. ConfigError names the others."""
    build: Build = _leaf(name).build
    return build


def call_format(dialect: str, tools: Iterable[str]) -> list[CallFormat] | None:
    """How calls of the tools of these names are written, for a grammar; each tool may have several forms. None if the
    arguments of the dialect are no JSON, or no fixed text leads to them. ConfigError names the dialects."""
    formats: Sequence[CallFormat] = _leaf(dialect).FORMATS
    return [replace(form, name=tool) for tool in tools for form in formats] if formats else None


def tagged_format(dialect: str, tools: Iterable[str]) -> list[CallFormat] | None:
    """The same for a dialect that tags its parameters; None for every other."""
    form: CallFormat | None = vars(_leaf(dialect)).get("TAGGED")
    return None if form is None else [replace(form, name=tool) for tool in tools]


def reasoning_marks(dialect: str) -> ReasoningMarks:
    """The marks of reasoning: a leaf's REASONING, where it has others than most. ConfigError names the dialects."""
    marks: ReasoningMarks = vars(_leaf(dialect)).get("REASONING", ReasoningMarks())
    return marks


def choose(template: str) -> str:
    """The dialect that a chat template speaks: the one most of whose signs stand in it, or none.

    A leaf's SIGNS are alternatives; an alternative counts when all of its literals are in the template.
    """
    scores = {name: _score(_leaf(name).SIGNS, template) for name in names()}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] else "none"


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a reasoning block, for Context.starts_in_reasoning."""
    return prompt.rstrip().endswith(_reasoning_openers())


def tool_schemas(tools: Iterable[Tool] | None) -> dict[str, Schema]:
    """The schema of the parameters of each function, by name, for Context.tools; other tools are left out."""
    schemas: dict[str, Schema] = {}
    for tool in tools or ():
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The same deltas with neighbours of one kind made one: what does not depend on how the text was split."""
    result: list[Delta] = []
    for _, group in groupby(deltas, key=type):
        run = list(group)
        first = run[0]
        if isinstance(first, ToolCallStart | ToolCallEnd):
            result += run
        else:
            text = "".join(delta.text for delta in run if not isinstance(delta, ToolCallStart | ToolCallEnd))
            result.append(msgspec.structs.replace(first, text=text))
    return result


@cache
def _reasoning_openers() -> tuple[str, ...]:
    return tuple({reasoning_marks(name).open for name in names()})


def _leaf(name: str) -> ModuleType:
    if name not in names():
        raise ConfigError(f"--tool-call-parser {name}: there is no such parser; use auto, {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{name}")


def _score(signs: Sequence[Sequence[str]], template: str) -> int:
    return max((len(every) for every in signs if all(sign in template for sign in every)), default=0)
