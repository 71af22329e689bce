# SPDX-License-Identifier: Apache-2.0
"""A model in the terminal: `tokenspeed generate` and `tokenspeed chat`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from tokenspeed.cli.flags import SAMPLING_FLAGS, engine_config, given
from tokenspeed.core.errors import ConfigError, RequestError
from tokenspeed.core.request import SamplingParams
from tokenspeed.observability.progress import shown_progress


def run_generate(options: argparse.Namespace) -> int:
    """Continue each prompt on stdout. Raises ConfigError, StartError and RequestError."""
    from tokenspeed.llm.input_processor import TextPrompt
    from tokenspeed.server.terminal import StreamingLLM

    prompts = options.prompts or [sys.stdin.read()]
    if not all(prompts):
        raise ConfigError("the prompt is empty: give it as an argument or on stdin")
    with shown_progress() as progress, StreamingLLM(engine_config(options), progress) as model:
        progress.close()
        params = _sampling(options, model.llm.default_params, stop=tuple(options.stop))
        for prompt in prompts:
            for _ in _print_stream(model.stream(TextPrompt(prompt), params)):
                pass
    return 0


def run_chat(options: argparse.Namespace) -> int:
    """Talk until the input ends. Raises StartError."""
    from tokenspeed.server.terminal import StreamingLLM

    with shown_progress() as progress, StreamingLLM(engine_config(options), progress) as model:
        progress.close()
        talk = _Talk(model.stream, _sampling(options, model.llm.default_params), options.system)
        if options.prompt is not None:
            talk.answer(options.prompt)
            return 0
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # line editing and history for input()
        print("Ctrl-C stops an answer, /clear forgets the conversation, /exit or Ctrl-D ends.")
        while talk.turn():
            pass
    return 0


def _sampling(options: argparse.Namespace, defaults: SamplingParams, **more: Any) -> SamplingParams:
    return msgspec.structs.replace(defaults, **given(options, SAMPLING_FLAGS), **more)


def _print_stream(outputs: Generator[Any, None, None]) -> Generator[str, None, None]:
    """Print text as it comes, and pass it on."""
    try:
        for output in outputs:
            for completion in output.outputs:
                print(completion.text, end="", flush=True)
                yield completion.text
    finally:
        outputs.close()
        print(flush=True)


class _Talk:
    """A conversation in the terminal."""

    def __init__(self, stream: Callable[..., Generator[Any, None, None]], params: SamplingParams, system: str | None):
        self._stream, self._params = stream, params
        self._opening: list[Mapping[str, object]] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def turn(self) -> bool:
        """One line of the user and its answer; False ends the conversation."""
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return False
        except KeyboardInterrupt:
            print()
            return True
        if line in ("/exit", "/quit"):
            return False
        if line == "/clear":
            self.messages = list(self._opening)
        elif line.startswith("/"):
            print("Commands: /clear /exit")
        elif line:
            self._answer_gently(line)
        return True

    def answer(self, text: str) -> None:
        """Answer one message, and remember both, however far the answer came."""
        from tokenspeed.llm.input_processor import ChatPrompt

        messages = [*self.messages, {"role": "user", "content": text}]
        reply = ""
        try:
            for piece in _print_stream(self._stream(ChatPrompt(messages), self._params)):
                reply += piece
        finally:
            if reply:
                self.messages = [*messages, {"role": "assistant", "content": reply}]

    def _answer_gently(self, line: str) -> None:
        """An interrupt or a refused message ends this answer, not the conversation."""
        try:
            self.answer(line)
        except KeyboardInterrupt:
            print("[stopped]")
        except RequestError as error:
            print(f"error: {error}")
