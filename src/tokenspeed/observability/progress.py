# SPDX-License-Identifier: Apache-2.0
"""Progress of slow work (download, load, warm-up) on a terminal as bars, elsewhere as a few plain lines.

Knows nothing of what is being done.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator
from typing import TextIO

from tqdm import tqdm

_TITLES = {"download": "Downloading", "load": "Loading weights", "warmup": "Warming up"}
_LINE_EVERY_S = 5.0


class ProgressReporter:
    """Called with (stage, done, total, unit) as often as one likes. A new stage closes the one before.

    total 0 means unknown. unit `B` counts bytes and is printed with binary prefixes.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_tty = self._stream.isatty()
        self._stage: str | None = None
        self._bar: tqdm[None] | None = None
        self._next_line_s = 0.0
        self._said_end = False

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        """Show that `done` of `total` units of `stage` are done."""
        if stage != self._stage:
            self.close()
            self._stage, self._next_line_s, self._said_end = stage, 0.0, False
        if self._is_tty:
            self._draw(stage, done, total, unit)
        else:
            self._say(stage, done, total, unit)

    def close(self) -> None:
        """End the current bar, so that what is printed next starts on its own line."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._stage = None, None

    def _draw(self, stage: str, done: int, total: int, unit: str) -> None:
        if self._bar is None:
            is_bytes = unit in ("B", "bytes")
            self._bar = tqdm(
                desc=_TITLES.get(stage, stage.capitalize()),
                total=total or None,
                unit="B" if is_bytes else f" {unit}",
                unit_scale=is_bytes,
                unit_divisor=1024,
                file=self._stream,
                dynamic_ncols=True,
                leave=True,
            )
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)
        if total and done >= total:
            self._bar.refresh()

    def _say(self, stage: str, done: int, total: int, unit: str) -> None:
        now = time.monotonic()
        ended = total > 0 and done >= total
        if self._said_end or (not ended and now < self._next_line_s):
            return
        self._next_line_s = now + _LINE_EVERY_S
        self._said_end = ended
        amount = f"{_amount(done, unit)} of {_amount(total, unit)}" if total else _amount(done, unit)
        self._stream.write(f"{_TITLES.get(stage, stage.capitalize())}: {amount}\n")
        self._stream.flush()


def _amount(count: int, unit: str) -> str:
    if unit in ("B", "bytes"):
        return f"{count / 2**20:.1f} MiB"
    return f"{count} {unit}".rstrip()


@contextlib.contextmanager
def shown_progress() -> Generator[ProgressReporter, None, None]:
    """A reporter on stderr, closed at the end."""
    reporter = ProgressReporter()
    try:
        yield reporter
    finally:
        reporter.close()
