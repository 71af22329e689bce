# SPDX-License-Identifier: Apache-2.0
"""What `tokenspeed top` and `tokenspeed sessions` show, as lines of text. Knows figures; no HTTP, no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.observability.logging import shown_key
from tokenspeed.observability.readings import Buckets, Reading
from tokenspeed.server.session_list import SessionCard, SessionList

_BAR_WIDTH = 20
_KEY_CHARS_MAX = 25
_LATENCIES = (
    ("time to first token", "time_to_first_token_seconds"),
    ("between tokens", "inter_token_latency_seconds"),
    ("in the queue", "request_queue_time_seconds"),
    ("prefill", "request_prefill_time_seconds"),
    ("whole request", "e2e_request_latency_seconds"),
)
_COLUMNS = (
    "SESSION", "REQ", "TURNS", "RUN", "CONTEXT", "PROMPT", "CACHED", "OUTPUT", "TOK/S", "SEEN", "HELD", "LAST",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """What is shown. recent: a reading a little before `now`, for rates; earlier: one at the beginning of window_s, for
    latencies."""

    url: str
    now: Reading
    recent: Reading
    earlier: Reading
    sessions: SessionList
    clock: str

    @property
    def window_s(self) -> float:
        """Seconds that latencies are of."""
        return self.now.at_s - self.earlier.at_s


def top_lines(scene: Scene) -> list[str]:
    """The whole picture."""
    now, recent = scene.now, scene.recent
    facts = (
        ("generated", f"{now.rate('generation_tokens_total', recent):,.1f} tok/s"),
        ("prompts", f"{now.rate('prompt_tokens_total', recent):,.1f} tok/s"),
        ("prefix hits", _share(_hit_rate(now, scene.earlier))),
    )
    queue = (
        ("running", f"{now.value('num_requests_running'):,.0f}"),
        ("waiting", f"{now.value('num_requests_waiting'):,.0f}"),
        ("held", f"{now.value('num_requests_held'):,.0f}"),
    )
    left = [f"  {name:<12}{value:>16}      {label:<8}{count:>6}" for (name, value), (label, count) in zip(
        facts, queue, strict=True
    )]  # fmt: skip
    return [
        f"TokenSpeed  {now.model}  {scene.url}  {scene.clock}",
        "",
        *left,
        "",
        *_memory(now),
        "",
        *_latencies(scene),
        "",
        f"  {_totals(now)}",
        "",
        *session_lines(scene.sessions),
    ]


def session_lines(sessions: SessionList) -> list[str]:
    """A table, the session seen last first; beneath a session, how its prompt last departed."""
    if not sessions.data:
        return ["No sessions yet."]
    rows = [_row(card, sessions.now) for card in sessions.data]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = [_aligned(_COLUMNS, widths)]
    for card, row in zip(sessions.data, rows, strict=True):
        lines.append(_aligned(row, widths))
        if card.prefix is not None:
            lines.append(f"  {card.prefix}")
    return lines


def _memory(now: Reading) -> list[str]:
    used, cached = now.value("kv_cache_used_blocks"), now.value("kv_cache_cached_blocks")
    lines = [
        f"  {'KV cache':<12}{_bar(now.value('kv_cache_usage_perc'))}  {used:,.0f} blocks in use, {cached:,.0f} cached"
    ]
    total = now.value("kv_cache_host_total_blocks")
    if total > 0:
        held = now.value("kv_cache_host_used_blocks")
        lines.append(
            f"  {'host tier':<12}{_bar(held / total)}  {held:,.0f} of {total:,.0f} blocks, "
            f"{now.value('kv_cache_loaded_tokens_total'):,.0f} tokens came back"
        )
    return lines


def _latencies(scene: Scene) -> list[str]:
    """Of the window where something ended in it, else since the server began."""
    recent = {name: scene.now.buckets(name).since(scene.earlier.buckets(name)) for _, name in _LATENCIES}
    is_recent = any(buckets.count for buckets in recent.values())
    shown = recent if is_recent else {name: scene.now.buckets(name) for _, name in _LATENCIES}
    title = f"last {scene.window_s:.0f} s" if is_recent else "since the start"
    rows = [f"  {title:<22}{'p50':>11}{'p95':>11}{'count':>11}"]
    return rows + [_latency(label, shown[name]) for label, name in _LATENCIES]


def _latency(label: str, buckets: Buckets) -> str:
    shown = [_duration(buckets.quantile(share)) for share in (0.5, 0.95)]
    return f"  {label:<22}{shown[0]:>11}{shown[1]:>11}{buckets.count:>11,.0f}"


def _totals(now: Reading) -> str:
    parts = [
        f"{now.value(f'request_success_total{{{reason}}}'):,.0f} {reason}" for reason in ("stop", "length", "abort")
    ]
    parts += [f"{now.value(name):,.0f} {text}" for name, text in _COUNTS if now.value(name)]
    return f"ended: {', '.join(parts)}"


_COUNTS = (
    ("request_success_total{error}", "error"),
    ("num_preemptions_total", "preemptions"),
    ("prefix_diverged_total", "departed prompts"),
    ("engine_restarts_total", "engine restarts"),
)


def _hit_rate(now: Reading, earlier: Reading) -> float | None:
    """Of the window, else since the server began."""
    for before in (earlier.values, {}):
        queries = now.value("prefix_cache_queries_total") - before.get("prefix_cache_queries_total", 0.0)
        if queries > 0:
            return (now.value("prefix_cache_hits_total") - before.get("prefix_cache_hits_total", 0.0)) / queries
    return None


def _row(card: SessionCard, now: float) -> tuple[str, ...]:
    speed, held = card.output_tokens_per_s, card.held_until
    return (
        shown_key(card.session, _KEY_CHARS_MAX),
        f"{card.requests:,}",
        f"{card.turns:,}",
        f"{card.running:,}",
        f"{card.context_tokens:,}",
        f"{card.prompt_tokens:,}",
        _share(card.cached_tokens / card.prompt_tokens if card.prompt_tokens else None),
        f"{card.generated_tokens:,}",
        "-" if speed is None else f"{speed:,.1f}",
        _age(now - card.last_seen),
        "-" if held is None else _age(held - now),
        card.finish_reason or "-",
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Names to the left, figures to the right."""
    last = len(cells) - 1
    parts = [
        cell.ljust(width) if index in (0, last) else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}] {share * 100:3.0f} %"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f} %"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1.0 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
