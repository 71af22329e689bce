# SPDX-License-Identifier: Apache-2.0
"""Spans of requests that came over HTTP, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tokenspeed.observability.tracing import Tracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PHASES = {"tokenise", "queue", "prefill", "decode"}
CHATS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(start_module: Any, exporter: InMemorySpanExporter) -> Iterator[Any]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield start_module(tracer=Tracer(provider, "m"))
    provider.shutdown()


def ask(server: Any, exporter: InMemorySpanExporter, path: str, body: dict[str, object]) -> list[ReadableSpan]:
    """The spans of one request."""
    exporter.clear()
    server.client.post(path, json=body, headers=HEADERS)
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_all_spans_in_its_callers_trace(
    server: Any, exporter: InMemorySpanExporter, path: str, stream: bool
) -> None:
    spans = {span.name: span for span in ask(server, exporter, path, {**CHATS[path], "stream": stream})}
    assert set(spans) == {"chat m", *PHASES, "parse"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    root = spans["chat m"]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT
    for span in spans.values():
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time, span.name  # type: ignore[operator]
    busy = spans["parse"].attributes
    assert busy is not None and 0.0 < busy["tokenspeed.parse.busy_s"] < 1.0  # type: ignore[operator]


def test_a_completion_is_not_parsed(server: Any, exporter: InMemorySpanExporter) -> None:
    spans = ask(server, exporter, "/v1/completions", {"prompt": "hi", "max_tokens": 8})
    assert {span.name for span in spans} == {"text_completion m", *PHASES}


def test_a_refused_request_is_one_failed_span(server: Any, exporter: InMemorySpanExporter) -> None:
    (span,) = ask(server, exporter, "/v1/completions", {"prompt": "x" * 5000, "max_tokens": 8})
    assert "maximum" in str(span.status.description) or "context" in str(span.status.description)
