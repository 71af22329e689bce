# SPDX-License-Identifier: Apache-2.0
"""The tools of the OpenAI Responses dialect: as the model is offered them, and what each is called on the wire.

The model knows functions only. One in a namespace has a callable name of both; a custom tool, which takes free text,
is a function of one string. Tools that a server would run itself are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from tokenspeed.core.errors import InvalidRequestError

FUNCTION, CUSTOM, SEARCH = "function", "custom", "tool_search"
CUSTOM_FIELD = "input"
_SEPARATOR = "__"
_NAMESPACE = "namespace"
_NO_PARAMETERS: Mapping[str, object] = {"type": "object", "properties": {}}
_CUSTOM_PARAMETERS: Mapping[str, object] = {
    "type": "object",
    "properties": {CUSTOM_FIELD: {"type": "string"}},
    "required": [CUSTOM_FIELD],
}


@dataclass(frozen=True, slots=True)
class Origin:
    """What a function of the model is on the wire. kind: FUNCTION, CUSTOM or SEARCH."""

    kind: str
    name: str
    namespace: str | None = None


class Toolbox:
    """The tools of one request."""

    def __init__(self) -> None:
        self._tools: dict[str, Mapping[str, object]] = {}
        self._origins: dict[str, Origin] = {}
        self._told_later: set[str] = set()

    @property
    def tools(self) -> tuple[Mapping[str, object], ...]:
        """In the shape that templates read, in the order that they came in."""
        return tuple(self._tools.values())

    @property
    def told_later(self) -> frozenset[str]:
        """Names of those that the head of the prompt does not tell of."""
        return frozenset(self._told_later)

    def add(self, tools: Iterable[object], where: str) -> None:
        """Tools of the body. InvalidRequestError for a function without a name."""
        for index, tool in enumerate(tools):
            self._add(tool, None, f"{where}[{index}]")

    def tell_later(self, tools: Iterable[object], where: str) -> str:
        """Tools that came up in the conversation; the text that tells of them there."""
        names = [name for index, tool in enumerate(tools) for name in self._add(tool, None, f"{where}[{index}]", True)]
        return "\n".join(msgspec.json.encode(self._tools[name]).decode() for name in names)

    def origin(self, callable_name: str) -> Origin:
        """What a called function is on the wire. Where the model leaves out a namespace that only one can be in, that
        one is meant; an unknown name is a function's, which the client can refuse."""
        if callable_name in self._origins:
            return self._origins[callable_name]
        meant = [origin for origin in self._origins.values() if origin.name == callable_name]
        return meant[0] if len(meant) == 1 else Origin(FUNCTION, callable_name)

    def callable(self, name: str) -> str:
        """By what name the model knows a tool that the wire calls `name`, with its namespace or without."""
        meant = [called for called, origin in self._origins.items() if origin.name == name]
        return meant[0] if len(meant) == 1 and name not in self._tools else name

    def _add(self, tool: object, namespace: str | None, where: str, is_later: bool = False) -> list[str]:
        """The callable names that `tool` adds or that it had before."""
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"{where} is no object", where)
        kind = tool.get("type")
        if kind == _NAMESPACE and namespace is None:
            inner, space = tool.get("tools"), str(tool.get("name") or "")
            each = enumerate(inner if isinstance(inner, list) else [])
            added = (self._add(one, space, f"{where}.tools[{index}]", is_later) for index, one in each)
            return [name for names in added for name in names]
        if kind not in (FUNCTION, CUSTOM, SEARCH) or (kind == SEARCH and tool.get("execution") != "client"):
            return []
        fields = tool["function"] if isinstance(tool.get("function"), Mapping) else tool
        name = SEARCH if kind == SEARCH else fields.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(f"{where}.name is missing", f"{where}.name")
        called = callable_name(name, namespace)
        if called not in self._tools:
            if is_later:
                self._told_later.add(called)
            self._tools[called] = _custom(called, fields) if kind == CUSTOM else _function(called, fields)
            self._origins[called] = Origin(str(kind), name, namespace)
        return [called]


def callable_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool; the same in offers and in the history."""
    return name if not namespace else f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


def _function(name: str, fields: Mapping[str, object]) -> Mapping[str, object]:
    """Keys in the order that they were sent in; strict only where it asks for something."""
    function: dict[str, object] = {"name": name}
    for key, value in fields.items():
        if key in ("description", "parameters") and value is not None:
            function[key] = value
        elif key == "name":
            function[key] = function.pop(key)
        elif key == "strict" and value is True:
            function[key] = value
    function.setdefault("parameters", _NO_PARAMETERS)
    return {"type": "function", "function": function}


def _custom(name: str, fields: Mapping[str, object]) -> Mapping[str, object]:
    description = str(fields.get("description") or "")
    form = fields.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        rule = f"The input follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
        description = f"{description}\n\n{rule}".lstrip()
    function = {"name": name, "description": description, "parameters": _CUSTOM_PARAMETERS}
    return {"type": "function", "function": function}
