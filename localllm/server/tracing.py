"""OpenTelemetry traces of requests.  They need the extra ``otel``.

A request has a span for HTTP.  If it uses a model, a second span describes this with the semantic conventions for
generative AI.

Sources: https://github.com/open-telemetry/semantic-conventions-genai/blob/main/docs/gen-ai/gen-ai-spans.md,
https://opentelemetry.io/docs/specs/semconv/http/http-spans/,
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.types import Scope

from localllm.errors import UsageError
from localllm.server.records import METHODS, RequestRecord
from localllm.version import __version__

#: Options of a generation by the names of the conventions.
_OPTIONS = {
    "gen_ai.request.max_tokens": "max_tokens",
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.top_k": "top_k",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
    "gen_ai.request.seed": "seed",
}

#: Seconds that the end of the server waits for the export of spans.
_CLOSE_S = 3.0


class Tracing:
    """Creates the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider, self._tracer = provider, provider.get_tracer("localllm", __version__)

    def start(self, scope: Scope) -> Span:
        """Start the span of an HTTP request, which continues the trace of the header ``traceparent``."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        attributes: dict[str, AttributeValue] = {
            "http.request.method": method,
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "network.protocol.version": scope["http_version"],
        }
        if server := scope.get("server"):
            attributes |= {"server.address": server[0]} | ({} if server[1] is None else {"server.port": server[1]})
        if client := scope.get("client"):
            attributes["client.address"] = client[0]
        if "user-agent" in headers:
            attributes["user_agent.original"] = headers["user-agent"]
        context = propagate.extract(headers)
        return self._tracer.start_span(_name(method), context, SpanKind.SERVER, attributes)

    def end(self, span: Span, record: RequestRecord, route: str) -> str:
        """End the span of a request, with the span of its generation.  Return the trace's id."""
        if span.is_recording():
            if record.operation:
                self._add_generation(span, record)
            span.set_attribute("http.response.status_code", record.status)
            span.set_attribute("localllm.request_id", record.id)
            if route:
                span.set_attribute("http.route", route)
                span.update_name(f"{_name(record.method)} {route}")
            if record.status >= 500:
                _fail(span, record)
        span.end()
        return trace.format_trace_id(span.get_span_context().trace_id)

    def _add_generation(self, span: Span, record: RequestRecord) -> None:
        model = record.requested_model or record.model
        now = time.time_ns()
        generation = self._tracer.start_span(
            f"{record.operation} {model}",
            trace.set_span_in_context(span),
            SpanKind.INTERNAL,  # the model runs in this process
            _attributes(record, model),
            start_time=now - int(1e9 * (time.perf_counter() - record.submitted)),
        )
        if record.error:
            _fail(generation, record)
        generation.end(now)

    def close(self) -> None:
        """Export the remaining spans, for at most `_CLOSE_S` seconds."""
        # An exporter retries for ten seconds if no collector answers.
        thread = threading.Thread(target=self._provider.shutdown, name="localllm-tracing", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


def _name(method: str) -> str:
    return method if method in METHODS else "HTTP"


def _fail(span: Span, record: RequestRecord) -> None:
    span.set_attribute("error.type", str(record.error_status or record.status))
    span.set_status(Status(StatusCode.ERROR, record.discreet_error))


def _attributes(record: RequestRecord, model: str) -> dict[str, AttributeValue]:
    """Return the attributes of a generation."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "localllm",
        "gen_ai.request.model": model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
    }
    for name, option in _OPTIONS.items():
        if (value := record.options.get(option)) is not None:
            attributes[name] = value
    if not record.streams:
        return attributes
    if stop := record.options.get("stop"):
        attributes["gen_ai.request.stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    if record.n > 1:
        attributes["gen_ai.request.choice.count"] = record.n
    if record.is_streamed:
        attributes["gen_ai.request.stream"] = True
        if (first_s := record.first_token_s) is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = first_s
    return attributes | {
        "gen_ai.response.finish_reasons": [record.finish_reason(stream) for stream in record.streams],
        "gen_ai.usage.output_tokens": record.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.usage.cached_tokens,
    }


# -- Configuration -------------------------------------------------------------------------------------------------


def provider_from(environment: Mapping[str, str] = os.environ) -> TracerProvider:
    """Return a provider with the exporters of the OTEL_* environment variables.

    Raises UsageError if an exporter is not installed.
    """
    names = environment.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    exporters = [_exporter(name.strip(), environment) for name in names]
    has_name = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create({} if has_name else {SERVICE_NAME: "localllm"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `Tracing.close` does this
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(name: str, environment: Mapping[str, str]) -> SpanExporter:
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
        name = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}.get(protocol, protocol)
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        raise UsageError(
            f"the OTEL_* environment variables name the exporter {name!r:.80}, which is not installed: install the "
            f"package {package:.80}, or choose another exporter"
        )
    exporter: Any = next(iter(found)).load()
    return exporter()  # type: ignore[no-any-return]
