# SPDX-License-Identifier: Apache-2.0
"""The pictures of `top` and `sessions`, as a person sees them."""

from __future__ import annotations

import math

from tokenspeed.cli.picture import Scene, session_lines, top_lines
from tokenspeed.cli.status import screen
from tokenspeed.observability.readings import Buckets, Reading
from tokenspeed.server.session_list import SessionCard, SessionList

EARLIER = Reading(
    40.0, "m", {"generation_tokens_total": 100, "prefix_cache_queries_total": 100, "prefix_cache_hits_total": 0}
)
RECENT = Reading(99.0, "m", {"generation_tokens_total": 1000, "prompt_tokens_total": 0})
NOW = Reading(
    100.0,
    "some-model",
    {
        "generation_tokens_total": 1234, "prompt_tokens_total": 5000, "prefix_cache_queries_total": 1100,
        "prefix_cache_hits_total": 870, "num_requests_running": 3, "num_requests_waiting": 12, "num_requests_held": 2,
        "kv_cache_usage_perc": 0.31, "kv_cache_used_blocks": 1240, "kv_cache_cached_blocks": 500,
        "kv_cache_host_total_blocks": 1000, "kv_cache_host_used_blocks": 505, "kv_cache_loaded_tokens_total": 9600,
        "request_success_total{stop}": 345, "request_success_total{abort}": 3, "num_preemptions_total": 2,
    },
    {"time_to_first_token_seconds": Buckets(((0.1, 0.0), (0.2, 30.0), (2.0, 40.0), (math.inf, 40.0)))},
)  # fmt: skip


def card(session: str, **changes: object) -> SessionCard:
    fields: dict[str, object] = {
        "requests": 3, "turns": 2, "running": 1, "prompt_tokens": 20_000, "cached_tokens": 15_000,
        "generated_tokens": 1234, "context_tokens": 10_100, "first_seen": 900.0, "last_seen": 997.0,
        "held_until": None, "output_tokens_per_s": 45.06, "finish_reason": "stop", "prefix": None,
    }  # fmt: skip
    return SessionCard(session=session, **{**fields, **changes})  # type: ignore[arg-type]


TOLD = "prefix-diverged: message 3, tool list changed (1 added)"
SESSIONS = SessionList(
    now=1000.0,
    data=[
        card("s-1", held_until=1287.0, finish_reason="tool_calls"),
        card("0123456789" * 9, prefix=TOLD, last_seen=400.0),
        card("new\nline", prompt_tokens=0, cached_tokens=0, output_tokens_per_s=None, finish_reason=None),
    ],
)


def test_top_says_how_the_server_is_doing() -> None:
    scene = Scene("http://h:1", NOW, RECENT, EARLIER, SessionList(now=0.0, data=[]), "12:34:56")
    assert top_lines(scene) == [
        "TokenSpeed  some-model  http://h:1  12:34:56",
        "",
        "  generated        234.0 tok/s      running      3",
        "  prompts        5,000.0 tok/s      waiting     12",
        "  prefix hits             87 %      held         2",
        "",
        "  KV cache    [######..............]  31 %  1,240 blocks in use, 500 cached",
        "  host tier   [##########..........]  50 %  505 of 1,000 blocks, 9,600 tokens came back",
        "",
        "  last 60 s                     p50        p95      count",
        "  time to first token      166.7 ms     1.64 s         40",
        "  between tokens                  -          -          0",
        "  in the queue                    -          -          0",
        "  prefill                         -          -          0",
        "  whole request                   -          -          0",
        "",
        "  ended: 345 stop, 0 length, 3 abort, 2 preemptions",
        "",
        "No sessions yet.",
    ]


def test_a_quiet_minute_shows_the_whole_time_and_no_tier_no_line() -> None:
    quiet = Reading(100.0, "m", {"prefix_cache_queries_total": 10, "prefix_cache_hits_total": 5}, NOW.histograms)
    lines = top_lines(Scene("u", quiet, quiet, quiet, SESSIONS, "c"))
    assert any(line.startswith("  since the start ") for line in lines)
    assert any("time to first token      166.7 ms" in line for line in lines)
    assert any("prefix hits             50 %" in line for line in lines)
    assert not any("host tier" in line for line in lines)
    empty = Reading(0.0, "", {}, {})
    assert any(
        "prefix hits                -" in line for line in top_lines(Scene("u", empty, empty, empty, SESSIONS, ""))
    )


def test_sessions_are_a_table() -> None:
    assert session_lines(SESSIONS) == [
        "SESSION                    REQ  TURNS  RUN  CONTEXT  PROMPT  CACHED  OUTPUT  TOK/S    SEEN   HELD  LAST",
        "s-1                          3      2    1   10,100  20,000    75 %   1,234   45.1     3 s  5 min  tool_calls",
        "012345678901…890123456789    3      2    1   10,100  20,000    75 %   1,234   45.1  10 min      -  stop",
        f"  {TOLD}",
        "new?line                     3      2    1   10,100       0       -   1,234      -     3 s      -  -",
    ]


def test_a_screen_is_cut_to_the_terminal_and_cleared_beyond() -> None:
    text = screen(["a" * 100, "b", "c", "d"], 10, 4)
    assert text == f"\x1b[H\x1b[1m{'a' * 9}\x1b[0m\x1b[K\nb\x1b[K\nc\x1b[K\x1b[J"
    assert screen(["a"], 1, 1) == "\x1b[H\x1b[1ma\x1b[0m\x1b[K\x1b[J"
