# SPDX-License-Identifier: Apache-2.0
"""One log format for the whole program, and the line that sums up a request. Knows no HTTP and no engine."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TextIO

ROOT = "tokenspeed"
_FORMAT = "%(asctime)s %(levelname)-7s %(room)s: %(message)s"
_DATE_FORMAT = "%Y-%m-%d %H:%M:%S"
_HANDLER_NAME = "tokenspeed"


class _Formatter(logging.Formatter):
    """Prints `tokenspeed.server.app` as `server`: a reader wants the room, not the file."""

    def format(self, record: logging.LogRecord) -> str:
        own = record.name.startswith(f"{ROOT}.")
        record.room = record.name.split(".")[1] if own else record.name.split(".")[0]
        return super().format(record)


def set_up_logging(*, debug: bool = False, stream: TextIO | None = None) -> None:
    """Send our log and that of the HTTP server to `stream` (stderr), once, however often this is called."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.name = _HANDLER_NAME
    handler.setFormatter(_Formatter(_FORMAT, _DATE_FORMAT))
    for name, level in ((ROOT, logging.DEBUG if debug else logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [kept for kept in logger.handlers if kept.name != _HANDLER_NAME]
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What one request was and how long it took. Durations in seconds; None where it never came to that.

    finish_reasons: one a completion. num_generated sums over the completions. ttft_s is tokenise_s (from arrival to
    the engine), queue_s (until the first step that it was part of) and prefill_s (until the first token) together.
    prefix: how the prompt departed from those before it in its session. parse_s: what reading the reply took; only
    where spans are wanted.
    """

    request_id: str
    num_prompt: int
    num_cached: int
    num_generated: int
    ttft_s: float | None
    decode_s: float | None
    total_s: float
    finish_reasons: tuple[str, ...]
    tokenise_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    session: str | None = None
    prefix: str | None = None
    parse_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Generation speed after the first token; None for fewer than two tokens."""
        if self.decode_s is None or self.decode_s <= 0.0 or self.num_generated < 2:
            return None
        return (self.num_generated - 1) / self.decode_s

    def line(self) -> str:
        """The summary as one log line."""
        speed = "-" if self.tokens_per_s is None else f"{self.tokens_per_s:.1f} tok/s"
        finish = ",".join(self.finish_reasons) or "-"
        line = (
            f"{self.request_id} prompt {self.num_prompt} cached {self.num_cached} generated {self.num_generated} "
            f"queue {_seconds(self.queue_s)} ttft {_seconds(self.ttft_s)} decode {_seconds(self.decode_s)} "
            f"speed {speed} total {self.total_s:.3f} s finish {finish}"
        )
        if self.session is not None:
            line += f" session {shown_key(self.session)}"
        return line if self.prefix is None else f"{line} {self.prefix}"


def shown_key(key: str, chars_max: int = 40) -> str:
    """A client's name of something, fit for a line: printable, and its middle left out where it is long."""
    text = "".join(character if character.isprintable() and character != " " else "?" for character in key)
    ends = (chars_max - 1) // 2
    return text if len(text) <= chars_max else f"{text[:ends]}…{text[-ends:]}"


def _seconds(duration_s: float | None) -> str:
    return "-" if duration_s is None else f"{duration_s:.3f} s"
