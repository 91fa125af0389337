"""Prometheus metrics of a server.

Names start with ``localllm_`` and follow Prometheus' rules.  Metrics that llama.cpp's server or vLLM has are also
reported under the names of these programs, for existing dashboards.

Sources: https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md,
https://docs.vllm.ai/en/stable/usage/metrics/.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    Metric,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from localllm.engine.engine import Counts
from localllm.engine.request import Timings, Usage
from localllm.errors import ClosedError
from localllm.server.models import Models, ServedModel
from localllm.server.records import METHODS, RequestRecord
from localllm.version import __version__

#: Upper bounds of the histograms' buckets.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)
_SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)


class _Sample(NamedTuple):
    """A model's counters, their increase since the last request of the metrics, and its number of queued requests."""

    counts: Counts
    new: Counts
    n_waiting: int = 0


class _EngineMetric(NamedTuple):
    """A metric of a model's engine: a counter if the name ends with ``_total``, otherwise a gauge."""

    name: str
    help: str
    value: Callable[[_Sample], float]
    aliases: tuple[str, ...] = ()
    tier: str = ""  # value of the label ``tier``; empty without this label


_CACHED = "Prompt tokens found in the cache, in memory or on disk"

_ENGINE_METRICS = (
    _EngineMetric(
        "localllm_prompt_tokens_total",
        "Prompt tokens, evaluated or found in the cache",
        lambda of: of.counts.prompt_tokens + of.counts.cached_tokens,
        ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    ),
    _EngineMetric(
        "localllm_prompt_tokens_evaluated_total",
        "Prompt tokens evaluated",
        lambda of: of.counts.prompt_tokens,
        ("llamacpp:prompt_tokens_total",),
    ),
    _EngineMetric(
        "localllm_prompt_tokens_cached_total",
        _CACHED,
        lambda of: of.counts.cached_tokens - of.counts.disk_tokens,
        ("llamacpp:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
        tier="memory",
    ),
    _EngineMetric(
        "localllm_prompt_tokens_cached_total",
        _CACHED,
        lambda of: of.counts.disk_tokens,
        ("llamacpp:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"),
        tier="disk",
    ),
    _EngineMetric(
        "localllm_generated_tokens_total",
        "Tokens generated",
        lambda of: of.counts.generated_tokens,
        ("llamacpp:tokens_predicted_total", "vllm:generation_tokens_total"),
    ),
    _EngineMetric(
        "localllm_prefill_seconds_total",
        "Seconds of evaluating prompts, summed over requests",
        lambda of: of.counts.prefill_s,
        ("llamacpp:prompt_seconds_total",),
    ),
    _EngineMetric(
        "localllm_decode_seconds_total",
        "Seconds of generating tokens, summed over requests",
        lambda of: of.counts.decode_s,
        ("llamacpp:tokens_predicted_seconds_total",),
    ),
    _EngineMetric("localllm_steps_total", "Steps", lambda of: of.counts.steps, ("llamacpp:n_decode_total",)),
    _EngineMetric("localllm_step_seconds_total", "Seconds of steps", lambda of: of.counts.step_s),
    _EngineMetric(
        "localllm_requests_per_step",
        "Mean number of requests in a step",
        lambda of: of.counts.in_steps / (of.counts.steps or 1),
        ("llamacpp:n_busy_slots_per_decode",),
    ),
    _EngineMetric(
        "localllm_draft_steps_total",
        "Steps with drafts",
        lambda of: of.counts.draft_steps,
        ("llamacpp:spec_decode_num_drafts_total", "vllm:spec_decode_num_drafts_total"),
    ),
    _EngineMetric(
        "localllm_drafted_tokens_total",
        "Tokens drafted",
        lambda of: of.counts.drafted,
        ("llamacpp:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ),
    _EngineMetric(
        "localllm_accepted_tokens_total",
        "Drafted tokens accepted",
        lambda of: of.counts.accepted,
        ("llamacpp:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    ),
    _EngineMetric(
        "localllm_longest_sequence_tokens",
        "Tokens of the longest sequence",
        lambda of: of.counts.longest,
        ("llamacpp:n_tokens_max",),
    ),
    _EngineMetric(
        "localllm_requests_running",
        "Requests running",
        lambda of: of.counts.running,
        ("llamacpp:requests_processing", "vllm:num_requests_running"),
    ),
    _EngineMetric(
        "localllm_requests_waiting",
        "Requests queued",
        lambda of: of.n_waiting,
        ("llamacpp:requests_deferred", "vllm:num_requests_waiting"),
    ),
    _EngineMetric("localllm_requests_total", "Requests ended", lambda of: of.counts.ended),
    _EngineMetric("localllm_pictures_encoded_total", "Images and audio clips encoded", lambda of: of.counts.encoded),
    _EngineMetric(
        "localllm_preemptions_total",
        "Requests preempted because the cache was full",
        lambda of: of.counts.preempted,
        ("vllm:num_preemptions_total",),
    ),
    _EngineMetric(
        "localllm_cache_usage_ratio",
        "Cache in use, from 0 to 1",
        lambda of: of.counts.n_pages_used / max(1, of.counts.n_pages),
        ("vllm:kv_cache_usage_perc",),
    ),
    # Only for llama.cpp's dashboards: Prometheus computes rates from the counters.  The first token of each reply
    # has no share in the seconds of decoding.
    _EngineMetric(
        "llamacpp:prompt_tokens_seconds",
        "Prompt tokens evaluated per second since the last request of the metrics",
        lambda of: of.new.prompt_tokens / (of.new.prefill_s or 1),
    ),
    _EngineMetric(
        "llamacpp:predicted_tokens_seconds",
        "Tokens generated per second since the last request of the metrics",
        lambda of: of.new.decode_tokens / (of.new.decode_s or 1),
    ),
)


class _ModelCollector(Collector):
    """Reads the counters of all models when the metrics are requested.

    The counters of a model restart at 0 when it is loaded again.
    """

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        loaded = _family("localllm_model_loaded", "Whether the model is loaded")
        loads = _family("localllm_model_loads_total", "Number of times that the model was loaded")
        families = {of.name: _family(of.name, of.help, ["tier"] if of.tier else []) for of in _ENGINE_METRICS}
        for model in list(self._models.served.values()):
            loaded.add_metric([model.name], model.llm is not None)
            loads.add_metric([model.name], model.n_loads)
            if (sample := _sample(model)) is not None:
                for metric in _ENGINE_METRICS:
                    labels = [model.name, *([metric.tier] if metric.tier else [])]
                    families[metric.name].add_metric(labels, metric.value(sample))
        yield from (loaded, loads, *families.values())


def _family(name: str, help: str, labels: Sequence[str] = ()) -> Any:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, help, labels=["model", *labels])


def _sample(model: ServedModel) -> _Sample | None:
    """Return the counters of a model; None if it was never loaded."""
    counts, n_waiting = model.last_counts, 0
    if (llm := model.llm) is not None:
        with contextlib.suppress(ClosedError):  # it is being unloaded
            counts, n_waiting = llm.counts, llm.n_waiting
    if counts is None:
        return None
    counts = replace(counts)  # the engine's thread keeps counting
    new, model.told_counts = counts.since(model.told_counts), counts
    return _Sample(counts, new, n_waiting)


class _ReplyFacts(NamedTuple):
    """Facts about a reply at its end.  ``started_s`` and ``ended_s`` count from the arrival of the request."""

    timings: Timings
    usage: Usage
    queue_s: float
    started_s: float  # until the reply was queued: loading, rendering and tokenizing
    ended_s: float
    is_finished: bool  # neither cancelled nor failed


class _ReplyHistogram(NamedTuple):
    """A histogram of a value that every reply has once.  ``value`` returns None if there is no value to observe."""

    name: str
    help: str
    bounds: Sequence[float]
    alias: str
    value: Callable[[_ReplyFacts], float | None]


_REPLY_HISTOGRAMS = (
    _ReplyHistogram(
        "localllm_time_to_first_token_seconds",
        "Seconds from the arrival of a request to the first token of a reply, including loading and the queue",
        _SECONDS,
        "vllm:time_to_first_token_seconds",
        lambda reply: reply.started_s + reply.timings.first_token_s if reply.timings.first_token_s else None,
    ),
    _ReplyHistogram(
        "localllm_time_per_output_token_seconds",
        "Mean seconds per token of a reply, without the first token",
        _SECONDS_PER_TOKEN,
        "vllm:request_time_per_output_token_seconds",
        lambda reply: reply.timings.decode_s / reply.timings.decode_tokens if reply.timings.decode_tokens else None,
    ),
    _ReplyHistogram(
        "localllm_request_queue_seconds",
        "Seconds that a reply waited in the queue of the model",
        _SECONDS,
        "vllm:request_queue_time_seconds",
        lambda reply: reply.queue_s,
    ),
    _ReplyHistogram(
        "localllm_request_prefill_seconds",
        "Seconds of evaluating the prompt of a reply",
        _SECONDS,
        "vllm:request_prefill_time_seconds",
        lambda reply: reply.timings.prefill_s or None,
    ),
    _ReplyHistogram(
        "localllm_request_decode_seconds",
        "Seconds of generating a reply, without the first token",
        _SECONDS,
        "vllm:request_decode_time_seconds",
        lambda reply: reply.timings.decode_s or None,
    ),
    _ReplyHistogram(
        "localllm_request_seconds",
        "Seconds from the arrival of a request to the end of the response, of finished replies",
        _SECONDS,
        "vllm:e2e_request_latency_seconds",
        lambda reply: reply.ended_s if reply.is_finished else None,
    ),
    _ReplyHistogram(
        "localllm_request_prompt_tokens",
        "Prompt tokens of finished replies",
        _TOKENS,
        "vllm:request_prompt_tokens",
        lambda reply: reply.usage.prompt_tokens if reply.is_finished else None,
    ),
    _ReplyHistogram(
        "localllm_request_generated_tokens",
        "Generated tokens of finished replies",
        _TOKENS,
        "vllm:request_generation_tokens",
        lambda reply: reply.usage.completion_tokens if reply.is_finished else None,
    ),
)

#: Names in other programs by localllm's name.
_ALIASES = (
    {metric.name: metric.aliases for metric in _ENGINE_METRICS}
    | {histogram.name: (histogram.alias,) for histogram in _REPLY_HISTOGRAMS}
    | {"localllm_replies_total": ("vllm:request_success_total",)}
)


class Metrics:
    """The metrics of one server, in a separate registry, so that several servers can run in one process.

    A reply is observed once, when its request ends.
    """

    def __init__(self, models: Models, *, per_key: bool = False) -> None:
        """``per_key``: whether to count the requests and tokens of each API key."""
        self._registry = registry = CollectorRegistry()
        registry.register(_ModelCollector(models))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        Info("localllm_build", "Version of localllm", registry=registry).info({"version": __version__})
        self._histograms = [
            (Histogram(of.name, of.help, ["model"], buckets=of.bounds, registry=registry), of.value)
            for of in _REPLY_HISTOGRAMS
        ]
        self._replies = Counter(
            "localllm_replies_total",
            "Replies by the reason of their end: stop, length, timeout, cancelled or error",
            ["model", "finished_reason"],
            registry=registry,
        )
        labels = ["method", "route", "status"]
        self._http = Counter("localllm_http_requests_total", "HTTP requests", labels, registry=registry)
        self._http_seconds = Histogram(
            "localllm_http_request_duration_seconds",
            "Seconds from the head of an HTTP request to the end of the response",
            ["method", "route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._key_requests = self._key_tokens = None
        if per_key:
            help_text = "Requests with the API key"
            self._key_requests = Counter(
                "localllm_key_requests_total", help_text, ["key", "status"], registry=registry
            )
            self._key_tokens = Counter(
                "localllm_key_tokens_total",
                "Tokens of requests with the API key: prompt, of these cached, and generated",
                ["key", "model", "kind"],
                registry=registry,
            )

    def observe(self, record: RequestRecord, route: str) -> None:
        """Count a request at its end.  ``route`` is the template of its path; empty for an unknown path."""
        now = time.perf_counter()
        method, route = record.method if record.method in METHODS else "other", route or "none"
        self._http.labels(method, route, str(record.status)).inc()
        self._http_seconds.labels(method, route).observe(now - record.started)
        for stream in record.streams:
            reason = record.finish_reason(stream)
            self._replies.labels(record.model, reason).inc()
            is_finished = reason in ("stop", "length", "timeout")
            facts = _ReplyFacts(
                stream.timings,
                stream.usage,
                record.queue_s(stream),
                stream.submitted_at - record.submitted,
                now - record.submitted,
                is_finished,
            )
            for histogram, value_of in self._histograms:
                if (value := value_of(facts)) is not None:
                    histogram.labels(record.model).observe(value)
        if record.key and self._key_requests is not None and self._key_tokens is not None:
            self._key_requests.labels(record.key, str(record.status)).inc()
            usage = record.usage
            counts = {
                "prompt": usage.prompt_tokens,
                "cached": usage.cached_tokens,
                "generated": usage.completion_tokens,
            }
            for kind, n in counts.items() if record.model else ():
                self._key_tokens.labels(record.key, record.model, kind).inc(n)

    def text(self, *, has_aliases: bool = True) -> bytes:
        """Return all metrics in Prometheus' text format.

        The OpenMetrics format is not offered: for it, prometheus_client 0.26 replaces the colons in names of samples.
        """
        return generate_latest(_Families(self._registry, has_aliases))


class _Families(Collector):
    """The metrics of a registry, also under their aliases.  Omits the times at which metrics were created."""

    def __init__(self, registry: CollectorRegistry, has_aliases: bool) -> None:
        self._registry, self._has_aliases = registry, has_aliases

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            if self._has_aliases or ":" not in family.name:
                yield family
            suffix = "_total" if family.type == "counter" else ""
            for alias in _ALIASES.get(family.name + suffix, ()) if self._has_aliases else ():
                yield _renamed(family, alias.removesuffix("_total"))


def _renamed(family: Metric, name: str) -> Metric:
    """Return a family under the name of another program, where the tiers of the cache are one value.

    vLLM's label for the model is ``model_name``.
    """
    values = dict[tuple[str, tuple[tuple[str, str], ...]], float]()
    for sample in family.samples:
        labels = {label: value for label, value in sample.labels.items() if label != "tier"}
        if name.startswith("vllm:"):
            labels["model_name"] = labels["model"]
        key = name + sample.name.removeprefix(family.name), tuple(labels.items())
        values[key] = values.get(key, 0) + sample.value
    renamed = Metric(name, family.documentation, family.type)
    for (sample_name, items), value in values.items():
        renamed.add_sample(sample_name, dict(items), value)
    return renamed
