# SPDX-License-Identifier: Apache-2.0
"""A command line of which every error is one line: the flag, what was given, what would be right. Knows no command."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NoReturn

from tokenspeed.cli.others import REFUSED

WRONG = 2
_NEAR = 0.75
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgKMG]?)")


def size(text: str) -> int:
    """A count, also as 4k (4000) or 4K (4096). ValueError where it is none, or not whole."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    value = Decimal(match[1]) * _UNITS[match[2]]
    if value != int(value):
        raise ValueError(text)
    return int(value)


_RIGHT = {int: "a whole number", float: "a number", size: "a whole number, also as 4k (4000) or 4K (4096)"}


class Parser(argparse.ArgumentParser):
    """Ends the program with WRONG and a line that begins with `error:`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, exit_on_error=False)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing is left unknown: that is an error of the command to which it was given."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            found, unknown = super().parse_known_args(words, namespace)
        except _WrongValueError as error:
            self._end(f"{_spelling(error, words)} {error.message}")
        except argparse.ArgumentError as error:
            self.error(f"{_spelling(error, words)}: {error.message}")
        if unknown:
            self._end(self._about(next((word for word in unknown if word.startswith("-")), unknown[0])))
        return found, []

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong."""
        self._end(f"{message}; see `{self.prog} --help`")

    def _end(self, message: str) -> NoReturn:
        self.exit(WRONG, f"error: {' '.join(message.split())}\n")

    def _about(self, word: str) -> str:
        """What to do about a word that means nothing here."""
        if not word.startswith("-"):
            return f"{word} is one argument too many; see `{self.prog} --help`"
        flag = word.partition("=")[0]
        if flag in REFUSED:
            return f"{flag} is no flag here: {REFUSED[flag]}"
        near = difflib.get_close_matches(flag, self._option_string_actions, 1, _NEAR)
        return f"{flag} is no flag of `{self.prog}`; " + (f"did you mean {near[0]}?" if near else "--help lists them")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            kind: Any = action.type
            raise _WrongValueError(action, f"{arg_string}: give {_RIGHT[kind]}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            *most, last = map(str, action.choices)
            raise _WrongValueError(action, f"{value}: use {', '.join(most)} or {last}")


class _WrongValueError(argparse.ArgumentError):
    """The value that a flag was given."""


def _spelling(error: argparse.ArgumentError, words: Sequence[str]) -> str:
    """The flag as it was given, among the names that it has."""
    names = (error.argument_name or "").split("/")
    given = [word.partition("=")[0] for word in words]
    return next((word for word in given if word in names), names[0])
