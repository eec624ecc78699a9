"""Traces as a collector gets them: receivers of OTLP over gRPC and over HTTP that decode the published protobuf."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from api_server import Running, make_state, serve, wait_until
from fake_engine import FakeEngine
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import GenAiOperationNameValues
from server_process import ServerProcess

from stoker_runtime.errors import ConfigError
from stoker_runtime.request import Adapter
from stoker_runtime.tracing import open_tracer, require_tracing

GRPC, HTTP = "grpc", "http/protobuf"
CONVENTIONS = {
    value
    for module in (error_attributes, gen_ai_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
VLLM = {
    "gen_ai.request.id",
    "gen_ai.request.n",
    "gen_ai.usage.num_sequences",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
}
"""Names of vLLM's that the conventions do not know."""
REQUIRED = {gen_ai_attributes.GEN_AI_OPERATION_NAME, gen_ai_attributes.GEN_AI_PROVIDER_NAME}


class Collector:
    """What was received."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []

    def take(self, request: Any) -> Any:
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def attributes(holder: Any) -> dict[str, Any]:
    found = {}
    for each in holder.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [part.string_value for part in value.values] if kind == "array_value" else value
    return found


@contextmanager
def collecting(protocol: str) -> Iterator[tuple[Collector, str]]:
    """A collector and the URL to name it by."""
    collector = Collector()
    if protocol == GRPC:

        class Service(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
            def Export(self, request: Any, context: object) -> Any:
                return collector.take(request)

        server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield collector, f"http://127.0.0.1:{port}"
        server.stop(0).wait()
        return

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            answer = collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body)).SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *said: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield collector, f"http://127.0.0.1:{web.server_port}/v1/traces"
        web.shutdown()


@contextmanager
def traced(url: str, monkeypatch: pytest.MonkeyPatch, protocol: str = GRPC) -> Iterator[Running]:
    """A server that sends its traces to `url`, soon."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=p-0")
    engine = FakeEngine()
    state = make_state(engine, otlp_traces_endpoint=url)
    state.tracer = open_tracer(url, state.metrics.spans)
    assert state.tracer is not None
    yield from serve(state, engine)
    state.tracer.close()


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_a_request_is_one_trace(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{parent}-01", "x-request-id": "mine"}
    with collecting(protocol) as (collector, url), traced(url, monkeypatch, protocol) as server:
        server.engine.delay = 0.01
        server.engine.adapters = {"poet": Adapter(5, "poet", "/a")}
        body = {"model": "poet", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "n": 2}
        before = time.time_ns()
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        assert wait_until(lambda: len(collector.spans) == 7), [span.name for span in collector.spans]
        after = time.time_ns()
        [request] = collector.named("llm_request")
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (trace_id, parent)
        assert request.kind == Span.SPAN_KIND_SERVER
        assert request.status.code == Status.STATUS_CODE_UNSET
        check_attributes(attributes(request), answer.json())
        for name in ("queue", "prefill", "decode"):
            inner = collector.named(name)
            assert len(inner) == 2
            assert {span.parent_span_id for span in inner} == {request.span_id}
            assert {span.trace_id for span in inner} == {request.trace_id}
            assert all(attributes(span).keys() <= CONVENTIONS for span in inner)
        times = [
            (
                queue.start_time_unix_nano,
                queue.end_time_unix_nano,
                prefill.end_time_unix_nano,
                decode.end_time_unix_nano,
            )
            for queue, prefill, decode in zip(*map(collector.named, ("queue", "prefill", "decode")), strict=True)
        ]
        for each in times:
            assert before <= request.start_time_unix_nano == each[0]
            assert list(each) == sorted(each)
            assert each[-1] <= request.end_time_unix_nano <= after
            assert each[-1] - each[-2] > 0, "seven tokens take time"
        assert collector.resources[0]["service.name"] == "stoker"
        assert collector.resources[0]["k8s.pod.name"] == "p-0"
        assert wait_until(lambda: 'stoker:spans_sent_total{model_name="byte-model"} 7.0' in metrics(server))


def check_attributes(found: dict[str, Any], answer: dict[str, Any]) -> None:
    usage = answer["usage"]
    assert found.keys() - CONVENTIONS == VLLM
    assert found.keys() >= REQUIRED
    assert found["gen_ai.operation.name"] == GenAiOperationNameValues.CHAT.value
    assert found["gen_ai.provider.name"] == "stoker"
    assert found["gen_ai.request.id"] == found["gen_ai.response.id"] == answer["id"] == "chatcmpl-mine"
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == "poet"
    for name in ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"):
        assert found[name] == usage["prompt_tokens"]
    for name in ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"):
        assert found[name] == usage["completion_tokens"] == 14
    assert found["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["gen_ai.request.max_tokens"] == 7
    assert found["gen_ai.request.choice.count"] == found["gen_ai.request.n"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    assert found["gen_ai.latency.time_in_queue"] == 0.25


def metrics(server: Running) -> str:
    return httpx.get(f"{server.url}/metrics", timeout=60).text


def test_streams_failures_and_requests_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(HTTP) as (collector, url), traced(url, monkeypatch, HTTP) as server:
        ask = {"prompt": "hi", "max_tokens": 3, "stream": True}
        streamed = httpx.post(f"{server.url}/v1/completions", json=ask, headers={"traceparent": "nonsense"}, timeout=60)
        assert streamed.text.endswith("[DONE]\n\n")
        assert wait_until(lambda: len(collector.named("llm_request")) == 1)
        [request] = collector.spans[-1:]
        assert request.parent_span_id == b""
        said = attributes(request)
        assert said["gen_ai.operation.name"] == GenAiOperationNameValues.TEXT_COMPLETION.value
        assert said["gen_ai.response.id"] == json.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))["id"]
        server.engine.fail_after = 1
        assert httpx.post(f"{server.url}/v1/completions", json=ask | {"stream": False}, timeout=60).status_code == 500
        assert wait_until(lambda: len(collector.named("llm_request")) == 2)
        failed = collector.named("llm_request")[1]
        assert failed.status.code == Status.STATUS_CODE_ERROR
        assert failed.status.message == "The step failed."
        said = attributes(failed)
        assert said["error.type"] == "EngineError"
        assert said.keys() >= REQUIRED
        assert said.keys() <= CONVENTIONS | VLLM
        assert failed.trace_id != request.trace_id


def test_the_client_says_whether_a_trace_is_kept_and_what_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """W3C's flag: of a trace that its client does not sample nothing is sent. `tracestate` stays with the trace."""
    with collecting(HTTP) as (collector, url), traced(url, monkeypatch, HTTP) as server:
        ask, kept = {"prompt": "hi", "max_tokens": 2}, secrets.token_hex(16)
        for flag, trace in (("00", secrets.token_hex(16)), ("01", kept)):
            headers = {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-{flag}", "tracestate": "vendor=a1,other=b2"}
            assert httpx.post(f"{server.url}/v1/completions", json=ask, headers=headers, timeout=60).status_code == 200
        assert wait_until(lambda: len(collector.named("llm_request")) == 1)
        assert {span.trace_id.hex() for span in collector.spans} == {kept}
        assert all(span.trace_state == "vendor=a1,other=b2" for span in collector.spans)


def test_a_collector_that_is_away_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/traces"
        with traced(url, monkeypatch, HTTP) as server:
            for _ in range(3):
                assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi"}, timeout=60).status_code == 200
            assert wait_until(lambda: "stoker:spans_lost_total" in metrics(server), 60)
            assert wait_until(lambda: 'spans_lost_total{model_name="byte-model"} 0.0' not in metrics(server), 60)


def test_what_is_missing_or_misspelt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json'; it must be one of grpc, http"):
        require_tracing("http://collector:4317")
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[otel\]'"):
        open_tracer("http://collector:4317", lambda sent, lost: None)
    assert open_tracer("", lambda sent, lost: None) is None
    require_tracing("")


def test_a_server_that_ends_sends_its_last_spans(processes: list[ServerProcess]) -> None:
    """Of a request that a real engine's own process has run."""
    with collecting(GRPC) as (collector, url):
        program = [sys.executable, str(Path(__file__).parents[1] / "uniform_server.py"), "ok"]
        server = ServerProcess(program, "--otlp-traces-endpoint", url)
        processes.append(server)
        server.wait_ready(60)
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": [1, 2, 3]}, timeout=60).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.exit_status(60) == 0, server.log
        assert sorted(span.name for span in collector.spans) == ["decode", "llm_request", "prefill", "queue"]
        [request], *inner = map(collector.named, ("llm_request", "queue", "prefill", "decode"))
        ends = [span.end_time_unix_nano for [span] in inner]
        assert request.start_time_unix_nano < ends[0] <= ends[1] <= ends[2] <= request.end_time_unix_nano
        assert {span.parent_span_id for [span] in inner} == {request.span_id}
