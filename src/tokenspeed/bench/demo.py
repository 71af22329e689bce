# SPDX-License-Identifier: Apache-2.0
"""A streamed conversation of three turns over the OpenAI API, with the numbers of each turn.

Starts `tokenspeed serve` on a free port of loopback and ends it again. Knows the wire and the command line only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Name one thing that a visitor should see there, and say why.",
    "Write a short poem about it.",
)
_START_S_MAX = 1800.0
_STOP_S_MAX = 30.0
_TURN_S_MAX = 300.0
_ADDRESS = re.compile(r"address\s+http://127\.0\.0\.1:(\d+)")


class DemoError(Exception):
    """The demonstration failed; the message says where."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. Times in seconds; tokens_per_s counts from the first token."""

    text: str
    ttft_s: float
    tokens_per_s: float
    num_prompt: int
    num_cached: int
    num_generated: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; 0 when all of it worked."""
    parser = argparse.ArgumentParser(prog="python -m tokenspeed.bench.demo", description=__doc__)
    parser.add_argument("--model", default=None, help="model to serve (the server's default)")
    parser.add_argument("--max-tokens", type=int, default=96, help="length of an answer (default: 96)")
    options = parser.parse_args(arguments)
    try:
        with served(options.model) as port:
            converse(port, options.max_tokens)
    except DemoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\nThe server has shut down cleanly.")
    return 0


@contextlib.contextmanager
def served(model: str | None) -> Generator[int, None, None]:
    """The port of a server that is up; it is ended, and its end checked, on leaving."""
    command = [sys.executable, "-m", "tokenspeed.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
    command += [model] if model else []
    print(f"$ tokenspeed {' '.join(command[3:])}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = _Log(process)
    try:
        port = _wait_for_port(process)
        _wait_for_health(port)
        log.is_quiet = True
        yield port
        _end(process)
    except DemoError:
        log.show()
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        log.close()


class _Log:
    """Passes the server's stderr on while it starts; then keeps it, so that its lines do not run into the
    conversation, and shows it when something failed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.is_quiet = False
        self._process = process
        self._kept: list[str] = []
        self._thread = threading.Thread(target=self._relay, args=(process.stderr,), daemon=True)
        self._thread.start()

    def show(self) -> None:
        """Print what was kept."""
        self._thread.join(1.0)
        sys.stderr.writelines(self._kept)

    def close(self) -> None:
        """To be called when the server has ended."""
        self._thread.join(1.0)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _relay(self, lines: Iterable[str]) -> None:
        for line in lines:
            if self.is_quiet:
                self._kept.append(line)
            else:
                sys.stderr.write(line)
                sys.stderr.flush()


def converse(port: int, max_tokens: int) -> list[Turn]:
    """All questions, each with the conversation so far. Raises DemoError."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        print(f"\n\033[1muser\033[0m  {question}" if sys.stdout.isatty() else f"\nuser  {question}")
        turn = ask(port, messages, max_tokens)
        messages.append({"role": "assistant", "content": turn.text})
        turns.append(turn)
        print(
            f"\n      [TTFT {turn.ttft_s * 1000:.0f} ms, {turn.tokens_per_s:.1f} tokens/s, prompt {turn.num_prompt}, "
            f"cached {turn.num_cached}, generated {turn.num_generated}]",
            flush=True,
        )
    if not any(turn.num_cached for turn in turns[1:]):
        raise DemoError("no turn found its conversation in the prefix cache")
    return turns


def ask(port: int, messages: Sequence[dict[str, str]], max_tokens: int) -> Turn:
    """One answer, printed as it comes. Raises DemoError."""
    body = {
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    first = last = 0.0
    text, usage = "", None
    print("model ", end="", flush=True)
    for event in _events(port, body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece:
                last = time.monotonic()
                first = first or last
                text += piece
                print(piece.replace("\n", "\n      "), end="", flush=True)
    if usage is None or not text:
        raise DemoError("the stream ended without text or usage")
    num_generated = usage["completion_tokens"]
    speed = (num_generated - 1) / (last - first) if last > first else 0.0
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Turn(text, first - began, speed, usage["prompt_tokens"], cached, num_generated)


def _events(port: int, body: dict[str, object]) -> Iterator[dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TURN_S_MAX)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"the stream broke off: {event['error']['message']}")
            yield event
    raise DemoError("the stream ended without [DONE]")


def _wait_for_port(process: subprocess.Popen[str]) -> int:
    """Passes the server's banner on and reads the port from it."""
    assert process.stdout is not None
    timer = threading.Timer(_START_S_MAX, process.kill)
    timer.start()
    try:
        port = None
        for line in process.stdout:
            print(line, end="", flush=True)
            match = _ADDRESS.search(line)
            port = int(match[1]) if match else port
            if port is not None and line.startswith("Press"):
                return port
    finally:
        timer.cancel()
    raise DemoError(f"the server did not start (exit code {process.wait()})")


def _wait_for_health(port: int) -> None:
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise DemoError("the server is not healthy after 60 s")


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(_STOP_S_MAX)
    except subprocess.TimeoutExpired:
        raise DemoError(f"the server did not end within {_STOP_S_MAX:.0f} s") from None
    if code != 0:
        raise DemoError(f"the server ended with exit code {code}")


if __name__ == "__main__":
    sys.exit(main())
