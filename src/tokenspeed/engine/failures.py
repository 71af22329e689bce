# SPDX-License-Identifier: Apache-2.0
"""What went wrong, in words for the other side of a stream and for a user's eyes. Knows errors only."""

from __future__ import annotations

import logging
import sys
import traceback

from tokenspeed.core.errors import START_ERRORS, CapacityError, StartError
from tokenspeed.core.ipc import StartFailed
from tokenspeed.observability.logging import ROOT, set_up_logging

_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def start_failed(error: Exception) -> StartFailed:
    """The message that tells why an engine cannot start; errors that nobody foresaw become StartError."""
    details = "".join(traceback.format_exception(error))
    if isinstance(error, StartError):
        return StartFailed(type(error).__name__, str(error), details)
    if _is_out_of_memory(error):
        return StartFailed(
            CapacityError.__name__,
            "out of memory while loading the model: use a smaller model, a smaller --kv-tokens or a larger machine",
            details,
        )
    return StartFailed(StartError.__name__, f"the engine failed to start: {one_line(error)}", details)


def start_error(failure: StartFailed) -> StartError:
    """The inverse: the error of its class, with the details as a note."""
    error = START_ERRORS.get(failure.kind, StartError)(failure.message)
    if failure.details:
        error.add_note(failure.details)
    return error


def one_line(error: Exception) -> str:
    """Class and words of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def say(text: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"tokenspeed engine: {text}\n")
    sys.stderr.flush()


def complain(error: Exception, debug: bool) -> None:
    """One line on stderr, or the whole traceback when debugging."""
    if debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
        sys.stderr.flush()
    else:
        say(one_line(error))


def set_up_log(debug: bool) -> None:
    """The log of a process that is ours; tracebacks are shortened to their last line unless debugging."""
    set_up_logging(debug=debug)
    if not debug:
        for handler in logging.getLogger(ROOT).handlers:
            handler.addFilter(_without_traceback)


def _is_out_of_memory(error: Exception) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in words for phrase in _MEMORY_WORDS)


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}: {' '.join(str(record.exc_info[1]).split())}"
        record.args, record.exc_info = None, None
    return True
