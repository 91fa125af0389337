"""``localllm bench --serve``: the requests of a load, and the measured results."""

from __future__ import annotations

import json
import random
import statistics
from importlib.util import find_spec

import pytest

from localllm.bench.serving import LONGEST, Load, _length
from tests.helpers.command_line import run_main

needs_server = pytest.mark.skipif(not all(map(find_spec, ("starlette", "uvicorn"))), reason="needs the extra 'serve'")


def test_lengths_scatter_around_their_mean() -> None:
    chance = random.Random(1)
    lengths = [_length(chance, 100, 1.0) for _ in range(5000)]
    assert 60 < statistics.mean(lengths) < 140  # below the mean, because the longest are cut
    assert statistics.median(lengths) < 90
    assert max(lengths) == LONGEST * 100


@needs_server
def test_every_request_is_answered_and_counted() -> None:
    from tests.helpers.http_server import demo, serving

    with serving(demo()) as server:
        load = Load(server.url, 3, 9, 100.0, mean_prompt=12, mean_reply=6)
        load.run()
        llm = server.models.served["demo"].llm
        assert llm is not None
        found = load.summary()
        assert (found["requests"], found["errors"]) == (9, 0)
        assert found["reply_tokens"] == llm.counts.generated_tokens
        assert 0 < found["first_token_ms"]["p50"] <= found["first_token_ms"]["p95"] <= found["first_token_ms"]["p99"]
        broken = Load(server.url, 1, 2, model="nothing")
        broken.run()
        assert len(broken.errors) == 2
        assert "no model 'nothing'" in broken.errors[0]


@needs_server
def test_the_command_starts_a_server_and_measures_it(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    words = ("--serve", "-p", "8", "-n", "4", "--clients", "2", "--requests", "4", "--json")
    outcome = run_main(capfdbinary, "bench", *words)
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert (found["model"], found["clients"], found["requests"], found["errors"]) == ("demo", 2, 4, 0)
    assert run_main(capfdbinary, "bench", "--serve", "--rate", "0").code == 2
