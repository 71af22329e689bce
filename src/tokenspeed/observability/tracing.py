# SPDX-License-Identifier: Apache-2.0
"""Requests as OpenTelemetry spans, made when a request has ended from the times that were noted anyway.

Knows summaries and trace headers. The packages of OpenTelemetry are an extra and are loaded only when spans are wanted.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenspeed import __version__
from tokenspeed.core.config import TraceSettings
from tokenspeed.observability.logging import RequestSummary

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_HEADERS = ("traceparent", "tracestate")
_PROTOCOL = "http/protobuf"
_SERVICE = "tokenspeed"
_NS = 1_000_000_000
_LAST_S = 2.0
_log = logging.getLogger(__name__)


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that say which trace it is part of."""
    return {name: headers[name] for name in _HEADERS if name in headers}


def open_tracer(settings: TraceSettings | None, model_name: str) -> Tracer | None:
    """What sends spans to the collector that the environment names. None where it names none or the packages are
    missing, which is said in one line."""
    if settings is None:
        return None
    if not all(_is_installed(name) for name in _PACKAGES):
        _log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed, so no spans are sent; "
            "pip install 'tokenspeed[otel]', or unset it"
        )
        return None
    if settings.protocol != _PROTOCOL:
        _log.warning("spans go to %s as %s; OTLP over %s is not spoken", settings.url, _PROTOCOL, settings.protocol)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    exporter = OTLPSpanExporter()  # it reads endpoint and headers itself
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _log.info("spans of requests go to %s", settings.url)
    return Tracer(provider, model_name, exporter.shutdown)


@dataclass(frozen=True, slots=True)
class _Phase:
    """A part of a request. Seconds from its arrival."""

    name: str
    begin_s: float
    end_s: float


class Tracer:
    """Makes the spans of requests. `record` only queues; a thread of the provider sends. give_up: lets what is being
    sent fail at once."""

    def __init__(self, provider: TracerProvider, model_name: str, give_up: Callable[[], object] = lambda: None) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._model_name, self._give_up = provider, model_name, give_up
        self._tracer = provider.get_tracer(_SERVICE, __version__)
        self._read_headers = TraceContextTextMapPropagator().extract

    def record(self, summary: RequestSummary, headers: Mapping[str, str], error: str | None = None) -> None:
        """The spans of a request that ends now. headers: see trace_headers. error: why it failed."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        arrived_ns = time.time_ns() - int(summary.total_s * _NS)
        span = self._tracer.start_span(
            f"chat {self._model_name}" if summary.session is not None else f"text_completion {self._model_name}",
            context=self._context(headers),
            kind=SpanKind.SERVER,
            start_time=arrived_ns,
        )
        if span.is_recording():
            self._describe(span, summary, error)
            parent = set_span_in_context(span)
            for phase in _phases(summary):
                part = self._tracer.start_span(phase.name, parent, start_time=arrived_ns + int(phase.begin_s * _NS))
                if phase.name == "parse" and summary.parse_s is not None:
                    part.set_attribute("tokenspeed.parse.busy_s", summary.parse_s)
                part.end(arrived_ns + int(phase.end_s * _NS))
        span.end(arrived_ns + int(summary.total_s * _NS))

    def close(self) -> None:
        """Send what is queued; a collector that does not take it is not waited for."""
        sending = threading.Thread(target=self._provider.force_flush, name="tokenspeed-last-spans", daemon=True)
        sending.start()
        sending.join(_LAST_S)
        self._give_up()
        self._provider.shutdown()

    def _context(self, headers: Mapping[str, str]) -> Context:
        """The trace that the headers name; a new one where they name none, or badly."""
        from opentelemetry.context import Context

        return self._read_headers(dict(headers), Context())

    def _describe(self, span: Span, summary: RequestSummary, error: str | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        known: dict[str, str | int | float | None] = {
            "gen_ai.operation.name": "chat" if summary.session is not None else "text_completion",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": summary.request_id,
            "gen_ai.usage.input_tokens": summary.num_prompt,
            "gen_ai.usage.output_tokens": summary.num_generated,
            "gen_ai.conversation.id": summary.session,
            "tokenspeed.cached_tokens": summary.num_cached,
            "tokenspeed.ttft_s": summary.ttft_s,
            "tokenspeed.prefix": summary.prefix,
        }
        span.set_attributes({name: value for name, value in known.items() if value is not None})
        span.set_attribute("gen_ai.response.finish_reasons", summary.finish_reasons)
        if error is not None or "error" in summary.finish_reasons:
            span.set_status(Status(StatusCode.ERROR, error))


def _phases(summary: RequestSummary) -> Iterator[_Phase]:
    """The parts of a request that are known, in their order. The reply is parsed while it is decoded."""
    begin_s = 0.0
    parts = (("tokenise", summary.tokenise_s), ("queue", summary.queue_s), ("prefill", summary.prefill_s))
    for name, duration_s in parts:
        if duration_s is None:
            return
        yield _Phase(name, begin_s, begin_s + duration_s)
        begin_s += duration_s
    if summary.decode_s is None:
        return
    yield _Phase("decode", begin_s, begin_s + summary.decode_s)
    if summary.parse_s is not None:
        yield _Phase("parse", begin_s, summary.total_s)


def _resource() -> Resource:
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource

    given = Resource.create()  # from the environment
    is_named = not str(given.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service")
    own = {SERVICE_VERSION: __version__} if is_named else {SERVICE_VERSION: __version__, SERVICE_NAME: _SERVICE}
    return given.merge(Resource(own))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False
