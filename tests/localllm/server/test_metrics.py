"""Metrics: names, labels and values after real requests, and the dashboard."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from localllm.server.http import Limits
from localllm.server.monitor import Monitoring
from tests.helpers.data import ROOT
from tests.helpers.engines import eventually
from tests.helpers.http_server import FAILS, Serving, demo, scripted, serving
from tests.localllm.server.test_keys import key_file, section, serving_keys

HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
DASHBOARD = ROOT / "docs" / "grafana.json"
PAGE = ROOT / "docs" / "monitoring.md"

#: Names of llama.cpp's server that dashboards may use.
LLAMACPP = """
    prompt_tokens_total prompt_tokens_cached_total tokens_predicted_total n_decode_total prompt_seconds_total
    tokens_predicted_seconds_total n_tokens_max spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
    spec_decode_num_accepted_tokens_total n_busy_slots_per_decode prompt_tokens_seconds predicted_tokens_seconds
    requests_processing requests_deferred
"""

#: Names of vLLM, and localllm's.
VLLM = {
    "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
    "request_time_per_output_token_seconds_sum": "time_per_output_token_seconds_sum",
    "request_queue_time_seconds_count": "request_queue_seconds_count",
    "request_prefill_time_seconds_sum": "request_prefill_seconds_sum",
    "request_decode_time_seconds_sum": "request_decode_seconds_sum",
    "e2e_request_latency_seconds_count": "request_seconds_count",
    "request_prompt_tokens_sum": "request_prompt_tokens_sum",
    "request_generation_tokens_sum": "request_generated_tokens_sum",
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generated_tokens_total",
    "prefix_cache_hits_total": "prompt_tokens_cached_total",
    "num_requests_running": "requests_running",
    "num_requests_waiting": "requests_waiting",
    "num_preemptions_total": "preemptions_total",
    "kv_cache_usage_perc": "cache_usage_ratio",
}


def scrape(server: Serving, names: str = "") -> str:
    headers = {"Authorization": "Bearer k"}
    url = f"{server.url}{server.app.limits.prefix}/metrics"
    return httpx.get(url, params={"names": names}, headers=headers).text


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def value(server: Serving, name: str, **labels: str) -> float:
    """Return the sum of the samples with these labels, under localllm's name."""
    samples = [sample for family in families(scrape(server, "localllm")) for sample in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"localllm_{name}" and labels.items() <= sample.labels.items()
    )


def post(server: Serving, path: str = CHAT, **body: Any) -> httpx.Response:
    given = {"messages": HI, "max_tokens": 3} if path == CHAT else {}
    return httpx.post(server.url + path, json={**given, **body}, timeout=60)


def connect(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def send_chat(connection: socket.socket, *, stream: bool) -> None:
    body = json.dumps({"messages": HI, "stream": stream}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(demo(), names=("demo", "other", 'odd "\\name')) as started:
        for model in ("demo", "other", 'odd "\\name'):
            assert post(started, model=model, ignore_eos=True).status_code == 200
        yield started


# -- Names ---------------------------------------------------------------------------------------------------------


def complaints(text: str) -> set[tuple[str, str]]:
    """Return (name, complaint) for what `promtool check metrics` reports, except for units, of which all are base."""
    found = set()
    for family in families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not family.documentation:
            found.add((name, "no help text"))
        if ":" in name:
            found.add((name, "metric names should not contain ':'"))
        if family.type != "counter" and name.endswith("_total"):
            found.add((name, 'non-counter metrics should not have "_total" suffix'))
        if family.type != "histogram" and name.endswith(("_bucket", "_count", "_sum")):
            found.add((name, "reserved suffix"))
        if re.search(r"_(?:counter|gauge|summary|histogram)(?:_|$)", name):
            found.add((name, "metric name should not include its type"))
        if re.search(r"_(?:s|ms|us|ns|sec|b|kb|mb|gb|m|h|d|milliseconds|minutes|hours|bits|kilobytes)(?:_|$)", name):
            found.add((name, "no base unit"))
        if re.search("[a-z][A-Z]", name + "".join(label for sample in family.samples for label in sample.labels)):
            found.add((name, "names should be written in 'snake_case'"))
    return found


def test_the_complaints_are_found() -> None:
    text = '# TYPE a_total gauge\na_total 1\n# HELP a:b_ms x\n# TYPE a:b_ms gauge\na:b_ms{aB=""} 1\n'
    assert len(complaints(text)) == 5


def test_names_follow_the_rules_of_prometheus(server: Serving) -> None:
    assert complaints(scrape(server, "localllm")) == set()
    other = complaints(scrape(server))
    assert {complaint for _, complaint in other} == {"metric names should not contain ':'"}
    assert {name.partition(":")[0] for name, _ in other} == {"llamacpp", "vllm"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_them(server: Serving) -> None:
    def check(text: str) -> list[str]:
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert bool(done.stderr) == bool(done.returncode)
        return done.stderr.splitlines()

    assert check(scrape(server, "localllm")) == []
    assert {line.partition(" ")[2] for line in check(scrape(server))} == {"metric names should not contain ':'"}


def test_every_metric_has_one_head_and_a_model_always_has_its_label(server: Serving) -> None:
    text = scrape(server)
    heads = re.findall("^# TYPE (.*) ", text, re.MULTILINE)
    assert len(heads) == len(set(heads))
    assert "_created" not in text
    models = {"demo", "other", 'odd "\\name'}
    for family in families(text):
        if family.name.startswith(("llamacpp:", "vllm:")) or family.name in (
            "localllm_replies",
            "localllm_model_loaded",
        ):
            assert {sample.labels["model"] for sample in family.samples} == models, family.name
        if family.name.startswith("vllm:"):
            assert all(sample.labels["model_name"] == sample.labels["model"] for sample in family.samples)


def test_names_of_other_programs_remain_and_have_the_same_values(server: Serving) -> None:
    samples = Counter[str]()
    for sample in (sample for family in families(scrape(server)) for sample in family.samples):
        if sample.labels.get("model") == "demo":
            samples[sample.name] += sample.value  # type: ignore[assignment]
    assert {f"llamacpp:{name}" for name in LLAMACPP.split()} <= samples.keys()
    for theirs, ours in VLLM.items():
        assert samples[f"vllm:{theirs}"] == samples[f"localllm_{ours}"], theirs


def test_every_scraper_gets_the_text_format(server: Serving) -> None:
    for accept in ("*/*", "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5"):
        response = httpx.get(f"{server.url}/metrics", headers={"Accept": accept})
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "vllm:time_to_first_token_seconds_bucket{" in response.text


def test_the_dashboard_names_metrics_and_labels_that_exist(server: Serving) -> None:
    with serving(demo(), monitoring=Monitoring(metrics_per_key=True), limits=Limits(api_keys=("k",))) as per_key:
        headers = {"Authorization": "Bearer k"}
        httpx.post(per_key.url + CHAT, json={"messages": HI, "max_tokens": 2}, headers=headers, timeout=60)
        assert eventually(lambda: value(per_key, "key_tokens_total") > 0)
        samples = [sample for family in families(scrape(per_key)) for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, {"instance"}).update(sample.labels)
    board = json.loads(DASHBOARD.read_text("utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [item["query"]["query"] for item in board["templating"]["list"] if item["type"] == "query"]
    assert len(queries) > 30
    for query in queries:
        names = re.findall(r"\b(?:localllm|process|llamacpp:|vllm:)_?\w+", query)
        assert names, query
        grouped = {*re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", query)))}
        for name in names:
            assert name in labels, query
            selectors = " ".join(re.findall(rf"\b{name}{{(.*?)}}", query))
            assert {*re.findall(r'(\w+)=~?"', selectors), *grouped} <= labels[name], query
    if shutil.which("promtool") is not None:
        expressions = [query.replace("$__rate_interval", "5m") for query in queries if "label_values" not in query]
        rules = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(expressions)]
        text = json.dumps({"groups": [{"name": "panels", "rules": rules}]})  # YAML contains JSON
        subprocess.run(["promtool", "check", "rules", "/dev/stdin"], input=text, text=True, check=True)
    shown = {f"{{{{{label}}}}}" for names in labels.values() for label in names}
    legends = [target["legendFormat"] for panel in board["panels"] for target in panel["targets"]]
    assert {word for legend in legends for word in re.findall(r"{{\w+}}", legend)} <= shown


def test_the_page_lists_metrics_that_exist(server: Serving) -> None:
    page = PAGE.read_text("utf-8")
    existing = {sample.name for family in families(scrape(server)) for sample in family.samples}
    existing |= {family.name for family in families(scrape(server))} | {
        "localllm_key_requests_total",
        "localllm_key_tokens_total",
    }
    named = set(re.findall(r"`((?:localllm_|llamacpp:|vllm:|process_)\w+)`", page))
    assert len(named) > 25
    assert named <= existing
    config = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert config is not None
    if shutil.which("promtool") is not None:
        text = config[1].replace("/etc/prometheus/localllm.key", "/dev/null")
        subprocess.run(["promtool", "check", "config", "/dev/stdin"], input=text, text=True, check=True)


# -- Values --------------------------------------------------------------------------------------------------------


def test_a_reply_is_observed_once() -> None:
    with serving(demo()) as server:
        bodies = ({"stream": False}, {"stream": True}, {"n": 2, "stream": False}, {"n": 2, "stream": True})
        n_prompt = 0
        for body in bodies:
            reply = post(server, max_tokens=5, ignore_eos=True, temperature=0, **body)
            assert reply.status_code == 200
            if not body["stream"]:
                n_prompt = reply.json()["usage"]["prompt_tokens"]
        assert eventually(lambda: value(server, "replies_total") == 6)
        assert value(server, "replies_total", finished_reason="length", model="demo") == 6
        assert value(server, "request_prompt_tokens_sum") == 6 * n_prompt
        assert value(server, "request_generated_tokens_sum") == 30
        assert value(server, "generated_tokens_total") == 30
        for name in ("time_to_first_token", "time_per_output_token", "request_queue", "request_decode", "request"):
            assert value(server, f"{name}_seconds_count") == 6, name
        first_s, all_s = value(server, "time_to_first_token_seconds_sum"), value(server, "request_seconds_sum")
        assert 0 < value(server, "request_queue_seconds_sum") < first_s < all_s
        assert value(server, "prompt_tokens_cached_total") > 0
        requests = {"method": "POST", "route": CHAT, "status": "200"}
        assert value(server, "http_requests_total", **requests) == 4
        assert value(server, "http_request_duration_seconds_count", method="POST", route=CHAT) == 4


def test_cached_tokens_have_the_tier_of_the_cache(tmp_path: Path) -> None:
    story = [{"role": "user", "content": "Once upon a time there was a king. " * 8}]
    for tiers in (("memory",), ("disk", "memory")):
        with serving(demo(prompt_cache=tmp_path)) as server:
            n_cached = []
            for _ in range(2):
                usage = post(server, messages=story).json()["usage"]
                n_cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            for tier, n in zip(tiers[::-1], n_cached[::-1], strict=False):
                assert value(server, "prompt_tokens_cached_total", tier=tier) == n > 20
            assert value(server, "prompt_tokens_cached_total") == sum(n_cached)
            hits = [family for family in families(scrape(server)) if family.name == "vllm:prefix_cache_hits"]
            assert [(each.labels.get("tier"), each.value) for each in hits[0].samples] == [(None, sum(n_cached))]


def test_a_reply_that_its_client_leaves_is_cancelled_and_not_finished() -> None:
    with serving(scripted("word " * 900)) as server:
        for stream in (True, False):
            with connect(server) as connection:
                send_chat(connection, stream=stream)
                assert eventually(lambda: server.app.dispatcher.active)
                if stream:
                    assert connection.recv(400).startswith(b"HTTP/1.1 200")
            assert eventually(lambda: not server.app.dispatcher.active)
        assert eventually(lambda: value(server, "replies_total", finished_reason="cancelled") == 2)
        assert value(server, "request_seconds_count") == value(server, "request_generated_tokens_count") == 0
        assert value(server, "http_requests_total", route=CHAT, status="499") == 1
        server.wait_until_idle()


def test_replies_that_fail_are_errors() -> None:
    with serving(scripted(f"One two {FAILS}")) as server:
        for stream, status in ((False, 500), (True, 200)):
            assert post(server, max_tokens=50, stream=stream).status_code == status
        assert eventually(lambda: value(server, "replies_total", finished_reason="error") == 2)
        assert value(server, "replies_total") == 2
        assert value(server, "http_requests_total", route=CHAT, status="500") == 1


def test_refused_requests_are_counted_with_their_route() -> None:
    limits = Limits(api_keys=("k",))
    with serving(scripted("word " * 900, max_waiting=1, parallel=1), limits=limits) as server:
        assert post(server).status_code == 401
        assert httpx.get(f"{server.url}/v1/responses/secret").status_code == 401
        assert value(server, "http_requests_total", route=CHAT, status="401") == 1
        assert value(server, "http_requests_total", route="/v1/responses/{id}", status="401") == 1
        connections = [connect(server) for _ in range(8)]
        for connection in connections:
            send_chat(connection, stream=True)
        statuses = [connection.recv(400).split()[1] for connection in connections]
        for connection in connections:
            connection.close()
        n_refused = statuses.count(b"429")
        assert n_refused > 0
        assert value(server, "http_requests_total", route=CHAT, status="429") == n_refused
        assert eventually(lambda: value(server, "replies_total", finished_reason="cancelled") == 8 - n_refused)
        assert value(server, "request_queue_seconds_count") == 8 - n_refused  # also those that never started
        server.wait_until_idle()


def test_labels_are_bounded_whatever_clients_send() -> None:
    with serving(demo(), names=("demo", "other")) as server:
        before = len(families(scrape(server)))
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for n in range(5):
                for path in (
                    f"/unknown/{n}",
                    f"/v1/models/m{n}",
                    f"/v1/responses/{n}",
                    f"/%0a{n}",
                    f"/slots/{n}?a={n}",
                ):
                    client.get(path)
                    client.request(f"WORD{n}", path)
                client.post(CHAT, json={"messages": HI, "model": f"model{n}"})
                client.get("/v1/models", headers={"Host": f"evil{n}.example"})
        text = scrape(server, "localllm")
        assert len(families(scrape(server))) == before
        samples = [sample for family in families(text) for sample in family.samples]
        values: dict[str, set[str]] = {}
        for sample in samples:
            for label, word in sample.labels.items():
                values.setdefault(label, set()).add(word)
        assert values["method"] == {"GET", "POST", "other"}
        routes = {
            "none",
            CHAT,
            "/v1/models",
            "/v1/models/{name:path}",
            "/v1/responses/{id}",
            "/slots/{id}",
            "/metrics",
        }
        assert values["route"] == routes
        assert values["status"] == {"200", "403", "404", "405"}
        assert values["model"] == {"demo", "other"}


def test_several_servers_in_one_process_count_separately() -> None:
    with serving(demo()) as first, serving(demo()) as second:
        post(first)
        assert eventually(lambda: value(first, "replies_total") == 1)
        assert value(second, "replies_total") == 0


def test_keys_are_counted_on_request() -> None:
    keys = ("sk-1-secret", "sk-2-secret")
    for per_key in (False, True):
        with serving(
            demo(), monitoring=Monitoring(metrics_per_key=per_key), limits=Limits(api_keys=("k", *keys))
        ) as server:
            for key in keys:
                for body in ({"messages": HI, "max_tokens": 4, "ignore_eos": True}, {}):
                    httpx.post(server.url + CHAT, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
            httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer sk-3-secret"})
            assert eventually(lambda: value(server, "http_requests_total", status="401") == 1)
            text = scrape(server)
            assert "secret" not in text
            assert ("localllm_key" in text) == per_key
            if per_key:
                assert value(server, "key_tokens_total", kind="generated", model="demo") == 8
                assert value(server, "key_requests_total", status="400") == 2
                rows = [sample for family in families(text) for sample in family.samples if "key" in sample.labels]
                assert len({row.labels["key"] for row in rows}) == 3  # including the key of the scraper


def test_keys_of_a_file_have_names_and_their_limits_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = key_file(tmp_path, section("alice", requests_per_minute=1), section("scraper", "k", role="metrics"))
    options = Monitoring(metrics_per_key=True)
    caplog.set_level(logging.INFO, "localllm.access")
    with serving_keys(path, prefix="/llm", monitoring=options) as server:
        for status in (200, 429):
            body = {"messages": HI, "max_tokens": 1}
            headers = {"Authorization": "Bearer alice"}
            response = httpx.post(f"{server.url}/llm{CHAT}", json=body, headers=headers, timeout=60)
            assert response.status_code == status
        assert eventually(lambda: value(server, "http_requests_total", route=CHAT, status="429") == 1)
        assert value(server, "key_requests_total", key="alice", status="429") == 1
        assert value(server, "key_tokens_total", key="alice", kind="generated") == 1
        httpx.post(server.url + CHAT, json={})
        assert eventually(lambda: value(server, "http_requests_total", status="404", route=CHAT) == 1)
    lines = [record.fields for record in caplog.records if record.name == "localllm.access"]  # type: ignore[attr-defined]
    refused = next(line for line in lines if line["status"] == 429)
    assert (refused["key"], refused["path"]) == ("alice", f"/llm{CHAT}")
    assert "has used its 1 requests per minute" in refused["error"]


def test_a_model_that_is_loaded_again_is_counted(server: Serving) -> None:
    assert value(server, "model_loads_total", model="other") == 1
    assert httpx.post(f"{server.url}/models/unload", json={"model": "other"}).status_code == 200
    assert value(server, "model_loaded", model="other") == 0
    assert value(server, "generated_tokens_total", model="other") == 3
    post(server, model="other", max_tokens=1, ignore_eos=True)
    assert value(server, "model_loads_total", model="other") == 2
    assert value(server, "generated_tokens_total", model="other") == 1
