# SPDX-License-Identifier: Apache-2.0
"""The command line: serve, generate, chat, models, doctor, bench, top, sessions. Flags become configuration; every user
error is one line.

Knows flags and terminals; all work is done by the rooms below.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tokenspeed import __version__
from tokenspeed.cli.bench import add_bench
from tokenspeed.cli.doctor import run_doctor, run_models
from tokenspeed.cli.flags import (
    PLAN_FLAGS,
    SAMPLING_FLAGS,
    SERVED_NAME,
    SERVER_FLAGS,
    add_flags,
    add_model,
    engine_config,
    given,
)
from tokenspeed.cli.parser import Parser
from tokenspeed.cli.status import add_server, add_top, run_sessions, run_top
from tokenspeed.cli.terminal import run_chat, run_generate
from tokenspeed.core.config import LaunchedRank, ServerConfig, launched_rank
from tokenspeed.core.errors import TokenSpeedError
from tokenspeed.observability.logging import set_up_logging
from tokenspeed.observability.progress import shown_progress

INTERRUPTED = 130
BROKEN_PIPE = 141
_ENDING = (signal.SIGINT, signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    options = _parser().parse_args(arguments)
    set_up_logging(debug=options.debug)
    try:
        launched = launched_rank() if options.builds_model else None
        if launched is not None and launched.rank > 0:
            return _follow(options, launched)
        return int(options.run(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - a user gets one line, a developer passes --debug
        return _say_error(error, options.debug)


def _say_error(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, TokenSpeedError):
        text = str(error)
    elif isinstance(error, MemoryError):
        text = "out of memory; use a smaller model, or lower --memory-fraction or --kv-tokens"
    else:
        text = f"internal error: {type(error).__name__}: {error}" + ("" if debug else "; --debug shows where")
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tokenspeed", description="An LLM inference engine for coding agents.")
    parser.add_argument("--version", action="version", version=f"tokenspeed {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _command(commands, "serve", _serve, "serve a model over HTTP")
    add_model(serve)
    add_flags(serve, (SERVED_NAME, *SERVER_FLAGS))
    serve.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="allow this web origin")

    generate = _command(commands, "generate", run_generate, "continue prompts given as arguments or on stdin")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue; none reads stdin")
    add_model(generate, positional=False)
    add_flags(generate, SAMPLING_FLAGS)
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")

    chat = _command(commands, "chat", run_chat, "talk with a model in the terminal")
    add_model(chat)
    add_flags(chat, SAMPLING_FLAGS)
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument("--prompt", metavar="TEXT", help="answer this one message and end")

    add_top(_command(commands, "top", run_top, "show how a running server is doing, until Ctrl-C"))
    add_server(_command(commands, "sessions", run_sessions, "list the sessions of a running server"))
    _command(commands, "models", run_models, "list the models known by a short name")
    doctor = _command(commands, "doctor", run_doctor, "say what this machine offers and which kernels it would use")
    doctor.add_argument("model", nargs="?", help="also say what this model is")
    text = "say instead what each rank of this model would hold and exchange, by its configuration alone"
    doctor.add_argument("--plan", nargs="?", const=True, metavar="MODEL", help=text)
    add_flags(doctor, PLAN_FLAGS)
    text = "measure an engine or single kernels, beside the least time that this machine allows"
    add_bench(commands.add_parser("bench", help=text, description=f"{text[0].upper()}{text[1:]}."), _complete)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    _complete(parser, run)
    return parser


def _complete(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    """What every command has."""
    parser.add_argument("--debug", action="store_true", help="verbose log, and a traceback for every error")
    parser.set_defaults(run=run, builds_model=False)


def _follow(options: argparse.Namespace, launched: LaunchedRank) -> int:
    """Every rank that a launcher starts has the same command line; the first runs it, the others follow that one."""
    from tokenspeed.engine.follower import follow_launched

    return follow_launched(launched, engine_config(options).device)


def _serve(options: argparse.Namespace) -> int:
    from tokenspeed.engine.process import EngineAhead

    engine = engine_config(options)
    server = ServerConfig(**given(options, SERVER_FLAGS), cors_origins=tuple(options.cors_origin))
    with shown_progress() as progress, _held_signals() as release, contextlib.closing(EngineAhead(engine)) as ahead:
        from tokenspeed.server.serve import Serving, serve  # as long as the engine's process takes to load, nearly

        release()

        def announce(text: str) -> None:
            progress.close()
            print(text, flush=True)

        return serve(Serving(engine, server, progress, announce, launch=ahead.connect))


@contextlib.contextmanager
def _held_signals() -> Generator[Callable[[], None]]:
    """SIGINT and SIGTERM come when what this gives is called. In the start of a process or in an import their exception
    may be lost: whoever catches it there goes on, and nobody ends the child."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda own, _: came.append(own)) for number in _ENDING}

    def release() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        handlers.clear()
        while came:
            signal.raise_signal(came.pop())

    try:
        yield release
    finally:
        release()
