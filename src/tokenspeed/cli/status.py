# SPDX-License-Identifier: Apache-2.0
"""A running server in the terminal: `tokenspeed top` and `tokenspeed sessions`. Asks it over HTTP; starts nothing."""

from __future__ import annotations

import argparse
import http.client
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Sequence

import msgspec

from tokenspeed.cli.picture import Scene, session_lines, top_lines
from tokenspeed.core.errors import ConfigError
from tokenspeed.observability.readings import Reading, read_metrics
from tokenspeed.server.session_list import SessionList

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
_WINDOW_S = 60.0
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _HIDE, _SHOW = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[?25l", "\x1b[?25h"
_CLEAR, _BOLD, _PLAIN = "\x1b[2J", "\x1b[1m", "\x1b[0m"


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add what says which server is asked."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"address of the server (default: {DEFAULT_URL})")
    parser.add_argument("--api-key", help="the key that the server asks for")


def add_top(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `top`."""
    add_server(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between pictures (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end")


def run_sessions(options: argparse.Namespace) -> int:
    """Print the table of sessions. Raises ConfigError."""
    print("\n".join(session_lines(_Server(options.url, options.api_key).sessions())))
    return 0


def run_top(options: argparse.Namespace) -> int:
    """Show how the server is doing until Ctrl-C, or once. Raises ConfigError."""
    if not options.interval >= 0.1:
        raise ConfigError(f"--interval {options.interval:g}: give at least 0.1 seconds")
    server = _Server(options.url, options.api_key)
    readings = deque([server.reading()])
    is_live = sys.stdout.isatty() and not options.once
    if is_live:
        sys.stdout.write(_HIDE + _CLEAR)
    try:
        while True:
            time.sleep(options.interval)
            readings.append(server.reading())
            while len(readings) > 2 and readings[-1].at_s - readings[0].at_s > _WINDOW_S:
                readings.popleft()
            clock = time.strftime("%H:%M:%S")
            scene = Scene(server.url, readings[-1], readings[-2], readings[0], server.sessions(), clock)
            if not is_live:
                print("\n".join(top_lines(scene)))
                return 0
            sys.stdout.write(screen(top_lines(scene), *shutil.get_terminal_size()))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 0
    finally:
        if is_live:
            sys.stdout.write(f"{_SHOW}\n")
            sys.stdout.flush()


def screen(lines: Sequence[str], width: int, height: int) -> str:
    """What to write so that a terminal shows these lines from its top, cut to its size, and nothing else."""
    shown = [line[: max(width - 1, 1)] for line in lines[: max(height - 1, 1)]]
    shown[0] = f"{_BOLD}{shown[0]}{_PLAIN}"
    return _HOME + f"{_CLEAR_LINE}\n".join(shown) + _CLEAR_LINE + _CLEAR_BELOW


class _Server:
    """One server, asked without a proxy. Raises ConfigError with what to do."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url {url}: no address of a server; write it as {DEFAULT_URL}")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def reading(self) -> Reading:
        """Its metrics now."""
        text = self._get("/metrics").decode("utf-8", "replace")
        try:
            return read_metrics(text, time.monotonic())
        except (ValueError, KeyError):
            raise self._no_such_server() from None

    def sessions(self) -> SessionList:
        """Its sessions now."""
        try:
            return msgspec.json.decode(self._get("/sessions"), type=SessionList)
        except msgspec.DecodeError:
            raise self._no_such_server() from None

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(path, error.code) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"no server answers at {self.url} ({reason}); start one with `tokenspeed serve`, or name it with --url"
            ) from None
        except ValueError as error:  # urllib's word for an address that cannot be
            raise ConfigError(f"--url {self.url}: {error}") from None

    def _refusal(self, path: str, status: int) -> ConfigError:
        if status == 401:
            return ConfigError(f"{self.url} asks for an API key, and this one is missing or wrong; pass --api-key KEY")
        if status == 404:
            return self._no_such_server()
        return ConfigError(f"{self.url}{path} answered with status {status}; look at the server's log")

    def _no_such_server(self) -> ConfigError:
        return ConfigError(f"{self.url} is not a TokenSpeed server of this version; name one with --url")
