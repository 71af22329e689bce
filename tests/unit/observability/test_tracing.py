# SPDX-License-Identifier: Apache-2.0
"""A request becomes spans whose times are those of its summary; without a collector nothing is loaded."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tokenspeed.core.config import TraceSettings, trace_settings
from tokenspeed.observability import tracing
from tokenspeed.observability.logging import RequestSummary
from tokenspeed.observability.tracing import Tracer, open_tracer, trace_headers

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SUMMARY = RequestSummary(
    "r-1", 42, 32, 11, 0.25, 0.5, 1.0, ("stop",), tokenise_s=0.05, queue_s=0.1, prefill_s=0.1, session="s",
    prefix="prefix-diverged: message 1, edited", parse_s=0.002,
)  # fmt: skip


class Collector:
    """A tracer, and the spans that it made by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider, "m")

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_phases_follow_each_other_inside_the_request() -> None:
    collector = Collector()
    collector.tracer.record(SUMMARY, {})
    spans = collector.spans
    root = spans.pop("chat m")
    durations = {name: pytest.approx(seconds(span), abs=1e-6) for name, span in spans.items()}
    assert durations == {"tokenise": 0.05, "queue": 0.1, "prefill": 0.1, "decode": 0.5, "parse": 0.75}
    order = [spans[name] for name in ("tokenise", "queue", "prefill", "decode")]
    assert order[0].start_time == root.start_time
    for earlier, later in itertools.pairwise(order):
        assert abs(later.start_time - earlier.end_time) < 1000  # type: ignore[operator]
    assert seconds(root) == pytest.approx(1.0, abs=1e-6)
    assert all(span.parent is not None and span.parent.span_id == root.context.span_id for span in spans.values())
    assert root.kind is SpanKind.SERVER and root.parent is None
    assert spans["parse"].attributes == {"tokenspeed.parse.busy_s": 0.002}


def test_attributes_say_what_was_asked_and_answered() -> None:
    collector = Collector()
    collector.tracer.record(SUMMARY, {})
    assert dict(collector.spans["chat m"].attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "r-1",
        "gen_ai.usage.input_tokens": 42,
        "gen_ai.usage.output_tokens": 11,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.conversation.id": "s",
        "tokenspeed.cached_tokens": 32,
        "tokenspeed.ttft_s": 0.25,
        "tokenspeed.prefix": "prefix-diverged: message 1, edited",
    }


def test_the_callers_trace_goes_on() -> None:
    collector = Collector()
    collector.tracer.record(SUMMARY, {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"})
    for span in collector.spans.values():
        assert f"{span.context.trace_id:032x}" == TRACE
    root = collector.spans["chat m"]
    assert root.parent is not None and f"{root.parent.span_id:016x}" == PARENT
    assert root.context.trace_state.get("vendor") == "1"


def test_a_caller_that_wants_no_spans_gets_none() -> None:
    collector = Collector()
    collector.tracer.record(SUMMARY, {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert not collector.spans


@pytest.mark.parametrize("bad", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}"])
def test_a_bad_header_begins_a_trace_of_its_own(bad: str) -> None:
    collector = Collector()
    collector.tracer.record(SUMMARY, {"traceparent": bad})
    assert collector.spans["chat m"].parent is None


def test_what_never_happened_is_no_span() -> None:
    collector = Collector()
    collector.tracer.record(RequestSummary("r", 0, 0, 0, None, None, 0.5, ("abort",)), {})
    assert set(collector.spans) == {"text_completion m"}
    assert collector.spans["text_completion m"].status.status_code is StatusCode.UNSET


def test_a_failure_is_an_error() -> None:
    for summary, error in (
        (RequestSummary("r", 0, 0, 0, None, None, 0.5, ("abort",)), "too long"),
        (RequestSummary("r", 1, 0, 1, 0.1, 0.0, 0.5, ("error",)), None),
    ):
        collector = Collector()
        collector.tracer.record(summary, {}, error)
        status = collector.spans["text_completion m"].status
        assert (status.status_code, status.description) == (StatusCode.ERROR, error)


def test_only_the_headers_of_a_trace_are_kept() -> None:
    headers = {"authorization": "Bearer secret", "traceparent": "p", "tracestate": "s"}
    assert trace_headers(headers) == {"traceparent": "p", "tracestate": "s"}
    assert trace_headers({"authorization": "Bearer secret"}) == {}


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    assert trace_settings() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")
    assert trace_settings() == TraceSettings("http://c:4318", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert trace_settings() == TraceSettings("http://c:4318", "grpc")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert trace_settings() is None


def test_without_the_packages_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_PACKAGES", ("no.such.package", "opentelemetry.no_such_module"))
    with caplog.at_level("WARNING", "tokenspeed"):
        assert open_tracer(TraceSettings("http://127.0.0.1:1", "http/protobuf"), "m") is None
    (record,) = caplog.records
    assert "pip install 'tokenspeed[otel]'" in record.getMessage()


def test_a_tracer_opens_and_closes_with_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    tracer = open_tracer(trace_settings(), "m")
    assert tracer is not None
    provider: Any = tracer._provider
    assert provider.resource.attributes["service.name"] == "tokenspeed"
    tracer.close()


def test_a_collector_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_LAST_S", 0.05)
    given_up = threading.Event()

    class Stuck(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            given_up.wait(60.0)
            return SpanExportResult.FAILURE

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Stuck()))
    tracer = Tracer(provider, "m", given_up.set)
    tracer.record(SUMMARY, {})
    tracer.close()
    assert given_up.is_set()


def test_without_a_collector_nothing_is_loaded() -> None:
    code = (
        "import sys; from tokenspeed.observability.tracing import open_tracer; import tokenspeed.server.app\n"
        "assert open_tracer(None, 'm') is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
