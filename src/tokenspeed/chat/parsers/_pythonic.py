# SPDX-License-Identifier: Apache-2.0
"""Calls as Python writes them, [f(a=1), g(b="x")], with literals as values. Knows no mark that begins a call."""

from __future__ import annotations

import re

from tokenspeed.chat.parsers import _json as json_reading
from tokenspeed.chat.parsers import _python as python_reading
from tokenspeed.chat.parsers._calls import objects, whole_calls
from tokenspeed.chat.parsers._machine import Output
from tokenspeed.chat.parsers._scanner import Reading, Scanner

_NAME = re.compile(r"[\w.\-]+")


def python_calls(scanner: Scanner, out: Output, *, known_only: bool = False) -> Reading[bool]:
    """Read a list of calls, or of objects with names in them. known_only: where answers stand too, only names of given
    tools make calls, and objects do so only as the whole answer."""
    yield from scanner.space()
    separator = yield from scanner.accept("[")
    if not separator:
        return False
    yield from scanner.space()
    if (yield from scanner.peek()) == "{":
        read = whole_calls(scanner, out, in_list=True) if known_only else objects(in_list=True)(scanner, out)
        return (yield from read)
    while separator in ("[", ","):
        yield from scanner.space()
        if not (yield from _call(scanner, out, known_only)):
            return False
        yield from scanner.space()
        separator = yield from scanner.accept(",", "]")
    return True


def _call(scanner: Scanner, out: Output, known_only: bool) -> Reading[bool]:
    name = yield from scanner.word(_NAME)
    if not name or (known_only and name not in out.context.tools) or not (yield from scanner.accept("(")):
        return False
    out.start(name)
    keys: set[str] = set()
    yield from scanner.space()
    while not (yield from scanner.accept(")")):
        key = yield from scanner.word(_NAME)
        yield from scanner.space()
        if not key or key in keys or not (yield from scanner.accept("=")):
            return False
        out.arguments(f'{", " if keys else "{"}"{json_reading.quoted(key)}": ')
        keys.add(key)
        if not (yield from python_reading.value(scanner, out.arguments)):
            return False
        yield from scanner.space()
        if (yield from scanner.accept(",")):
            yield from scanner.space()
        elif (yield from scanner.peek()) != ")":
            return False
    out.arguments("}" if keys else "{}")
    out.end()
    return True
