# SPDX-License-Identifier: Apache-2.0
"""One format, said once; a request in one line."""

from __future__ import annotations

import io
import logging
import re

from tokenspeed.observability.logging import RequestSummary, set_up_logging, shown_key


def test_a_line_says_when_how_bad_and_where() -> None:
    stream = io.StringIO()
    set_up_logging(stream=io.StringIO())
    set_up_logging(stream=stream)
    logging.getLogger("tokenspeed.server.app").info("hello")
    logging.getLogger("tokenspeed.server.app").debug("hidden")
    logging.getLogger("uvicorn.error").error("bad")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    server: hello", first)
    assert second.endswith("ERROR   uvicorn: bad")


def test_debug_shows_more() -> None:
    stream = io.StringIO()
    set_up_logging(debug=True, stream=stream)
    logging.getLogger("tokenspeed.llm").debug("detail")
    assert "DEBUG   llm: detail" in stream.getvalue()
    set_up_logging(stream=io.StringIO())


def test_a_request_in_one_line() -> None:
    summary = RequestSummary(
        "r-1", 42, 32, 11, 0.1234, 0.5, 0.7, ("stop",), tokenise_s=0.0034, queue_s=0.02, prefill_s=0.1, session="s-1",
        prefix="prefix-diverged: message 3, edited",
    )  # fmt: skip
    assert summary.tokens_per_s == 20.0
    assert summary.line() == (
        "r-1 prompt 42 cached 32 generated 11 queue 0.020 s ttft 0.123 s decode 0.500 s speed 20.0 tok/s "
        "total 0.700 s finish stop session s-1 prefix-diverged: message 3, edited"
    )


def test_a_request_that_never_spoke() -> None:
    summary = RequestSummary("r-2", 0, 0, 0, None, None, 0.5, ("abort",))
    assert summary.line() == (
        "r-2 prompt 0 cached 0 generated 0 queue - ttft - decode - speed - total 0.500 s finish abort"
    )


def test_a_clients_name_of_a_session_cannot_break_the_line() -> None:
    assert shown_key("plain-key_1") == "plain-key_1"
    assert shown_key("a\nINFO forged\x1b[2Jé") == "a?INFO?forged?[2Jé"
    assert shown_key("0123456789abcdef" * 4, 9) == "0123…cdef"
    assert len(shown_key("x" * 500)) <= 40
