# SPDX-License-Identifier: Apache-2.0
"""What is wrong in a command line is one line: the flag, the value, what would be right."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import pytest

from tokenspeed import cli
from tokenspeed.cli.parser import size


def leaves(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Each command with its words."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield path, parser
    for group in groups:
        for name, child in group.choices.items():
            yield from leaves(child, (*path, name))


def spellings() -> Iterator[tuple[tuple[str, ...], str]]:
    """Each spelling of each flag whose value can be wrong by itself, with its command."""
    for path, parser in leaves(cli._parser()):
        for action in parser._actions:  # type: ignore[attr-defined]
            if action.type not in (None, str) or action.choices is not None:
                yield from ((path, name) for name in action.option_strings)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize("joined", [False, True])
def test_a_value_of_the_wrong_kind_is_one_line_that_names_flag_and_value(
    joined: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = list(spellings())
    assert len(known) > 60
    monkeypatch.setattr(cli, "_parser", functools.cache(cli._parser))  # which takes a tenth of a second
    for path, name in known:
        said = refusal([*path, f"{name}=zero"] if joined else [*path, name, "zero"], capsys)
        assert said.startswith((f"error: {name} zero: give a", f"error: {name} zero: use ")), said


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("-16", -16), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2m", 2_000_000), ("1G", 2**30)],
)
def test_a_size_may_be_written_short(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "k", "4kk", "4 k", "4kb", "1.5", "0.0001k", "1e3", "0x10", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        size(text)


@pytest.mark.parametrize(
    "flag",
    [
        "--max-model-len",
        "--kv-tokens",
        "--host-kv-tokens",
        "--max-num-batched-tokens",
        "--max-num-mixed-prefill-tokens",
    ],
)
def test_sizes_in_tokens_are_read_so(flag: str) -> None:
    options = vars(cli._parser().parse_args(["serve", flag, "8K"]))
    assert 8192 in options.values()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--prot", "1"], "error: --prot is no flag of `tokenspeed serve`; did you mean --port?\n"),
        (["top", "--onec"], "error: --onec is no flag of `tokenspeed top`; did you mean --once?\n"),
        (["bench", "latency", "--shirnk=2"], "; did you mean --shrink?\n"),
        (["serve", "--qqq"], "error: --qqq is no flag of `tokenspeed serve`; --help lists them\n"),
        (["serve", "--tokenizer=x"], "error: --tokenizer is no flag here: the model's own is used; leave it out\n"),
        (["--qqq", "serve"], "error: --qqq is no flag of `tokenspeed`"),
        (["serve", "a", "b"], "b is one argument too many; see `tokenspeed serve --help`"),
        (["srve"], "error: COMMAND srve: use serve, "),
        (["serve", "--port"], "error: --port: expected one argument; see `tokenspeed serve --help`"),
        ([], "COMMAND; see `tokenspeed --help`"),
    ],
)
def test_what_is_not_known_is_said_with_what_may_be_meant(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(arguments, capsys)
