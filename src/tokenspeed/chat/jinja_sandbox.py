# SPDX-License-Identifier: Apache-2.0
"""The jinja environment that chat templates are written for, closed to everything but text.

Templates come with model files, so they are not trusted: no attribute of Python's inside, nothing that changes its
arguments, no loops, powers or repetitions without bounds. Knows nothing of conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

OUTPUT_CHARS_MAX = 64 * 1024 * 1024
RENDER_S_MAX = 30.0
_POWER_MAX = 1024
_DICT_NAMES = frozenset(dir(dict))
_NUM_JUDGED_MAX = 4096


class TemplateLimitError(jinja2.TemplateError):
    """The template went over a limit."""


def sandbox() -> ImmutableSandboxedEnvironment:
    """A fresh environment."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: object, attribute: str) -> object:
        """Most look-ups of templates are fields of messages: found at once, and not first as an attribute."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Follows from the type and the name alone, so that each is judged once."""
        key = (type(obj), attr)
        is_safe = self._safe.get(key)
        if is_safe is None:
            is_safe = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < _NUM_JUDGED_MAX:
                self._safe[key] = is_safe
        return is_safe

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator == "**" and (not isinstance(right, int | float) or abs(right) > _POWER_MAX):
            raise TemplateLimitError(f"it raises a number to a power beyond {_POWER_MAX}")
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        return super().call_binop(context, operator, left, right)


def _check_repetition(sequence: object, times: object) -> None:
    if isinstance(sequence, str | list | tuple) and isinstance(times, int) and len(sequence) * times > OUTPUT_CHARS_MAX:
        raise TemplateLimitError(f"it repeats a value to more than {OUTPUT_CHARS_MAX} characters")


class _Namespace(Namespace):
    """A namespace without attributes that begin with an underscore: those lead out of the sandbox."""

    def __init__(*args: object, **kwargs: object) -> None:
        self, *rest = args
        assert isinstance(self, _Namespace)
        attributes: dict[str, object] = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute may not begin with an underscore: {name!r}")


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja's own filter escapes for HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
