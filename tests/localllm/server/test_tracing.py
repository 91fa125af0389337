"""Traces: spans of requests, and their configuration by environment variables."""

from __future__ import annotations

import http.server
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from localllm.cli.commands.serve import _tracing
from localllm.errors import UsageError
from localllm.server.monitor import Monitoring
from localllm.server.tracing import Tracing, provider_from
from tests.helpers.engines import eventually
from tests.helpers.http_server import FAILS, Serving, demo, scripted, serving

CHAT = "/v1/chat/completions"
CANARY = "xylophone"
HI = [{"role": "user", "content": CANARY}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A server with spans in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.monitoring = Monitoring(tracing=Tracing(provider))

    def spans(self, n: int) -> tuple[ReadableSpan, ...]:
        """Return ``n`` finished spans, which end after the responses."""
        assert eventually(lambda: len(self.exporter.get_finished_spans()) >= n)
        spans = self.exporter.get_finished_spans()
        assert len(spans) == n
        self.exporter.clear()
        return spans


@pytest.fixture(scope="module")
def traced() -> Traced:
    return Traced()


@pytest.fixture(scope="module")
def traced_server(traced: Traced) -> Iterator[Serving]:
    with serving(demo(), names=("demo", "other"), monitoring=traced.monitoring) as started:
        httpx.post(started.url + CHAT, json={"messages": HI, "max_tokens": 1}, timeout=60)
        traced.spans(2)
        yield started


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_two_spans_of_the_callers_trace(traced: Traced, traced_server: Serving, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "r1"}
    body = {
        "model": "DEMO",
        "messages": HI,
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0.5,
        "stream": stream,
    }
    response = httpx.post(traced_server.url + CHAT, json=body, headers=headers, timeout=60)
    assert response.status_code == 200
    generation, request = traced.spans(2)
    assert request.parent is not None
    assert generation.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert generation.parent.span_id == request.context.span_id
    assert (request.name, request.kind) == (f"POST {CHAT}", SpanKind.SERVER)
    assert (generation.name, generation.kind) == ("chat DEMO", SpanKind.INTERNAL)
    http_facts = attributes(request)
    assert {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "http.response.status_code": 200,
        "server.port": traced_server.port,
        "localllm.request_id": "r1",
    }.items() <= http_facts.items()
    facts = attributes(generation)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "localllm",
        "gen_ai.request.model": "DEMO",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
    }.items() <= facts.items()
    assert facts["gen_ai.usage.input_tokens"] > 3
    assert facts.get("gen_ai.request.stream", False) == stream
    assert ("gen_ai.response.time_to_first_chunk" in facts) == stream
    assert request.start_time is not None
    assert generation.start_time is not None
    assert generation.end_time is not None
    assert request.end_time is not None
    assert request.start_time <= generation.start_time < generation.end_time <= request.end_time
    assert CANARY not in str(http_facts) + str(facts)


def test_requests_without_a_parent_start_a_trace(traced: Traced, traced_server: Serving) -> None:
    for path, method, name in (
        ("/health", "GET", "GET /health"),
        ("/v1/responses/x", "GET", "GET /v1/responses/{id}"),
        ("/unknown", "GET", "GET"),
        ("/health", "BREW", "HTTP /health"),
    ):
        headers = {"traceparent": "nonsense"}
        httpx.request(method, traced_server.url + path, headers=headers)
        (span,) = traced.spans(1)
        assert (span.name, span.parent) == (name, None)
        assert span.status.status_code is StatusCode.UNSET
        assert ("http.route" in attributes(span)) == (path != "/unknown")


def test_an_unsampled_trace_stays_unsampled(traced: Traced, traced_server: Serving) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    body = {"messages": HI, "max_tokens": 1}
    assert httpx.post(traced_server.url + CHAT, json=body, headers=headers, timeout=60).status_code == 200
    httpx.get(traced_server.url + "/health")
    (span,) = traced.spans(1)
    assert span.name == "GET /health"


def test_completions_and_embeddings_have_their_operations(traced: Traced, traced_server: Serving) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "ignore_eos": True, "stop": ["zzz"]}
    httpx.post(traced_server.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    facts = attributes(traced.spans(2)[0])
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.request.choice.count"] == 2
    assert facts["gen_ai.request.stop_sequences"] == ("zzz",)
    assert facts["gen_ai.usage.output_tokens"] == 8
    assert len(facts["gen_ai.response.finish_reasons"]) == 4
    httpx.post(traced_server.url + "/v1/embeddings", json={"input": "a b"}, timeout=60)
    assert traced.spans(2)[0].name == "embeddings demo"


def test_errors_have_their_status() -> None:
    traced = Traced()
    with serving(scripted(f"One {FAILS}"), monitoring=traced.monitoring) as server:
        for stream in (False, True):
            httpx.post(server.url + CHAT, json={"messages": HI, "max_tokens": 9, "stream": stream}, timeout=60)
            generation, request = traced.spans(2)
            assert generation.status.status_code is StatusCode.ERROR
            assert attributes(generation)["error.type"] == "500"
            assert attributes(generation)["gen_ai.response.finish_reasons"] == ("error",)
            assert (request.status.status_code is StatusCode.ERROR) == (not stream)
        httpx.post(server.url + CHAT, json={}, timeout=60)
        (request,) = traced.spans(1)
        assert request.status.status_code is StatusCode.UNSET
        assert attributes(request)["http.response.status_code"] == 400


def test_a_stream_that_its_client_leaves_ends_its_spans() -> None:
    traced = Traced()
    with serving(scripted("word " * 900), monitoring=traced.monitoring) as server:
        with httpx.stream("POST", server.url + CHAT, json={"messages": HI, "stream": True}, timeout=60) as response:
            next(response.iter_lines())
        generation, _ = traced.spans(2)
        assert attributes(generation)["gen_ai.response.finish_reasons"] == ("cancelled",)


# -- Configuration -------------------------------------------------------------------------------------------------


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "is_on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "chat"}, False),
        ({"OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
    ],
)
def test_variables_switch_traces_on(
    unconfigured: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], variables: dict[str, str], is_on: bool
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name, text in variables.items():
        unconfigured.setenv(name, text)
    tracing = _tracing()
    assert (tracing is not None) == is_on
    if tracing is not None:
        tracing.close()
    assert capfd.readouterr().err == ""


def test_the_service_has_a_name() -> None:
    for variables, name in (({}, "localllm"), ({"OTEL_SERVICE_NAME": "chat"}, None)):
        provider = provider_from({"OTEL_TRACES_EXPORTER": "console", **variables})
        assert name is None or provider.resource.attributes["service.name"] == name
        (processor,) = provider._active_span_processor._span_processors
        assert isinstance(processor.span_exporter, ConsoleSpanExporter)  # type: ignore[attr-defined]
        provider.shutdown()


def test_an_exporter_that_is_not_installed_is_named(
    unconfigured: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="opentelemetry-exporter-carrier-pigeon"):
        provider_from({"OTEL_TRACES_EXPORTER": "carrier_pigeon"})
    unconfigured.setenv("OTEL_TRACES_EXPORTER", "carrier_pigeon")
    assert _tracing() is None
    assert "carrier_pigeon" in capfd.readouterr().err


def test_without_the_package_only_a_configured_server_warns(
    unconfigured: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unconfigured.delitem(sys.modules, "localllm.server.tracing")
    unconfigured.setitem(sys.modules, "opentelemetry", None)
    assert _tracing() is None
    assert capfd.readouterr().err == ""
    unconfigured.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert _tracing() is None
    assert capfd.readouterr().err.splitlines() == [
        "localllm: warning: OTEL_EXPORTER_OTLP_ENDPOINT is set, but traces need opentelemetry, which is not "
        'installed: pip install "localllm[otel]"'
    ]


def test_spans_reach_a_collector(unconfigured: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        unconfigured.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        unconfigured.setenv("NO_PROXY", "127.0.0.1")
        tracing = _tracing()
        assert tracing is not None
        with serving(demo(), monitoring=Monitoring(tracing=tracing)) as server:
            httpx.post(server.url + CHAT, json={"messages": HI, "max_tokens": 1}, timeout=60).raise_for_status()
        tracing.close()
        collector.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"POST /v1/chat/completions" in body
    assert b"chat demo" in body
    assert CANARY.encode() not in body
