"""Traces of requests, by the OpenTelemetry SDK: one span a request, and in it what each sequence waited and computed.

Spans are made when a request is over, from times that were taken anyway, so a token costs nothing. The SDK batches and
sends them in a thread of its own, and its variables hold: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
`OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_*`.
Invariants: a collector that is slow, gone or wrong holds up no request. No text and no token id stands in a span.
Without the extra `otel` nothing here imports OpenTelemetry.
Knows nothing of HTTP beyond the two headers of W3C's trace context.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_runtime.errors import ConfigError
from stoker_runtime.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

PROTOCOLS = {"grpc": "grpc", "http/protobuf": "http"}
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROVIDER = "stoker"
FAREWELL_MS = 2000
"""How long an ending server waits for its last spans to leave."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """One sequence of a request: seconds of the monotonic clock, counts of tokens, and why it ended ("": it did not).

    `queued` are its seconds in the queue. `first` and `last` are when its first and its last token came; 0: none did.
    """

    queued: float
    first: float
    last: float
    prompt_tokens: int
    tokens: int
    finish: str = ""


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """All of a request that is over. `context` are the client's headers of W3C's trace context.

    `name` is the id of its answer, `operation` what the conventions call its route. `parameters` are attributes as they
    stand in the request's span.
    """

    name: str
    operation: str
    model: str
    context: tuple[tuple[str, str], ...]
    arrival: float
    prompt_tokens: int
    cached_tokens: int
    sequences: Sequence[SequenceTimes]
    parameters: dict[str, float]
    error: BaseException | None = None


class RequestTracer:
    """Makes spans and hands them to `exporter`, which it owns."""

    def __init__(self, exporter: SpanExporter, counted: Callable[[int, int], None]) -> None:
        """`counted` is told, by a thread, how many spans were sent and how many could not be."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.version": VERSION})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "stoker"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_counting(exporter, counted)))
        self._tracer = self._provider.get_tracer("stoker", VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: RequestTrace) -> None:
        """Make the spans of a request that ends now."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        now = time.monotonic()
        offset = time.time_ns() - int(now * 1e9)

        def at(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        parent = self._propagator.extract(dict(trace.context))
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=at(trace.arrival))
        if span.is_recording():
            span.set_attributes(_attributes(trace, now))
            if trace.error is not None:
                _fail(span, trace.error)
            inner = set_span_in_context(span)
            for sequence in trace.sequences:
                self._phases(sequence, trace.arrival, inner, at)
        span.end(at(now))

    def close(self) -> None:
        """Send what waits, for two seconds at most."""
        self._provider.force_flush(FAREWELL_MS)
        self._provider.shutdown()

    def _phases(self, sequence: SequenceTimes, arrival: float, inner: Context, at: Callable[[float], int]) -> None:
        if not sequence.first:
            return
        admitted = min(arrival + sequence.queued, sequence.first)
        prompt, generated = (
            {
                "gen_ai.usage.prompt_tokens": sequence.prompt_tokens,
                "gen_ai.usage.input_tokens": sequence.prompt_tokens,
            },
            {
                "gen_ai.usage.completion_tokens": sequence.tokens,
                "gen_ai.usage.output_tokens": sequence.tokens,
                "gen_ai.response.finish_reasons": [sequence.finish],
            },
        )
        phases: tuple[tuple[str, float, float, dict[str, Any]], ...] = (
            ("queue", arrival, admitted, {}),
            ("prefill", admitted, sequence.first, prompt),
            ("decode", sequence.first, sequence.last, generated),
        )
        for name, start, end, attributes in phases:
            span = self._tracer.start_span(name, inner, attributes=attributes, start_time=at(start))
            span.end(at(end))


def require_tracing(endpoint: str) -> None:
    """Raise ConfigError unless traces can be sent, where an `endpoint` is named."""
    if endpoint:
        _exporter_class()


def open_tracer(endpoint: str, counted: Callable[[int, int], None]) -> RequestTracer | None:
    """What sends traces to `endpoint`; None where it is "". Raises ConfigError."""
    if not endpoint:
        return None
    exporter: SpanExporter = _exporter_class()(endpoint=endpoint)
    log.info("traces go to %s by %s", endpoint, _protocol())
    return RequestTracer(exporter, counted)


def _protocol() -> str:
    variable = next((name for name in PROTOCOL_VARIABLES if os.environ.get(name)), "")
    protocol = os.environ[variable] if variable else "grpc"
    if protocol not in PROTOCOLS:
        raise ConfigError(f"{variable} is {protocol!r}; it must be one of {', '.join(PROTOCOLS)}.", param=variable)
    return protocol


def _exporter_class() -> Callable[..., SpanExporter]:
    name = f"opentelemetry.exporter.otlp.proto.{PROTOCOLS[_protocol()]}.trace_exporter"
    try:
        found: Callable[..., SpanExporter] = importlib.import_module(name).OTLPSpanExporter
        importlib.import_module("opentelemetry.sdk.trace")
    except ImportError as error:
        said = (
            f"otlp_traces_endpoint needs OpenTelemetry, which is not installed ({error}): pip install 'stoker[otel]'."
        )
        raise ConfigError(said, param="otlp_traces_endpoint") from error
    return found


def _counting(exporter: SpanExporter, counted: Callable[[int, int], None]) -> SpanExporter:
    """`exporter`, with what becomes of its spans counted."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Counting(SpanExporter):
        """Passes everything on."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            """Send `spans`."""
            result = exporter.export(spans)
            good = result is SpanExportResult.SUCCESS
            counted(len(spans) if good else 0, 0 if good else len(spans))
            return result

        def shutdown(self) -> None:
            """End."""
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            """Send what waits."""
            return exporter.force_flush(timeout_millis)

    return Counting()


def _fail(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))


def _attributes(trace: RequestTrace, end: float) -> dict[str, Any]:
    """Figures by the names of OpenTelemetry's conventions for generative AI, and by vLLM's."""
    tokens = sum(each.tokens for each in trace.sequences)
    found: dict[str, Any] = {
        "gen_ai.operation.name": trace.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.id": trace.name,
        "gen_ai.response.id": trace.name,
        "gen_ai.request.model": trace.model,
        "gen_ai.response.model": trace.model,
        "gen_ai.usage.prompt_tokens": trace.prompt_tokens,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
        "gen_ai.usage.completion_tokens": tokens,
        "gen_ai.usage.output_tokens": tokens,
        "gen_ai.usage.num_sequences": len(trace.sequences),
        "gen_ai.response.finish_reasons": [each.finish for each in trace.sequences if each.finish],
        "gen_ai.latency.e2e": end - trace.arrival,
        **trace.parameters,
    }
    started = [each for each in trace.sequences if each.first]
    if started:
        first = min(started, key=lambda each: each.first)
        last = max(each.last for each in started)
        found |= {
            "gen_ai.latency.time_in_queue": first.queued,
            "gen_ai.latency.time_to_first_token": first.first - trace.arrival,
            "gen_ai.latency.time_in_model_prefill": max(0.0, first.first - trace.arrival - first.queued),
            "gen_ai.latency.time_in_model_decode": last - first.first,
            "gen_ai.latency.time_in_model_inference": max(0.0, last - trace.arrival - first.queued),
        }
    return found
