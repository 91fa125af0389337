"""Logits and texts of models with real weights, compared with llama.cpp and with float32."""

from __future__ import annotations

import numpy as np
import pytest

from localllm import LLM
from localllm.evaluate import perplexity
from tests.benchmarks.real_models import gap_errors, texts_of
from tests.helpers.data import shared_data
from tests.real.conftest import recorded
from tests.real.record import N_GREEDY

#: llama.cpp's perplexity over the first 8 chunks of 512 tokens of wikitext-2.
THEIR_PERPLEXITY = {"smollm2": 24.615, "gemma": 18.112}

#: Limits of the errors of the gap between the two best logits: root mean square, and largest.  Measured were 0.115
#: and 0.56 for SmolLM2, 0.124 and 1.03 for Gemma; llama.cpp has 0.149 and 0.82, and 0.244 and 2.11.
MAX_GAP_ERROR = {"smollm2": (0.18, 1.2), "gemma": (0.19, 1.9)}

#: The largest lead of the best logit over llama.cpp's token if the tokens differ; the largest measured lead is 0.77.
NEAR_TIE = 1.2


def test_perplexity_is_that_of_llama_cpp(name: str, llm: LLM) -> None:
    text = shared_data("text/wiki.test.raw").read_text(encoding="utf-8")[:30_000]
    found = perplexity(llm, text, chunks=8)
    assert (found.n_chunks, found.context) == (8, 512)
    assert found.perplexity.value == pytest.approx(THEIR_PERPLEXITY[name], rel=0.005)


def test_gaps_between_the_best_logits_are_near_those_of_float(name: str, llm: LLM) -> None:
    """At every position of 16 prompts and of the reference's replies."""
    errors = np.concatenate(
        [gap_errors(lambda ids, first: iter(llm.logits(ids)[first:]), text) for text in texts_of(name)]
    )
    rms, worst = MAX_GAP_ERROR[name]
    assert len(errors) > 800
    assert np.sqrt(np.mean(errors**2)) < rms
    assert np.abs(errors).max() < worst


def test_greedy_texts_equal_those_of_llama_cpp(name: str, llm: LLM) -> None:
    """Token by token up to the first near tie; later tokens may differ."""
    n_tokens = n_others = n_texts = 0
    for i, case in enumerate(recorded("llama_cpp")[name]["greedy"]):
        prompt, reply = case["prompt"], case["reply"]
        rows = llm.logits([*prompt, *reply], last=len(reply) + 1)[: len(reply)]
        behind = rows.max(axis=1) - rows[np.arange(len(reply)), reply]
        assert behind.max() < NEAR_TIE
        n_tokens += len(reply)
        n_others += int((behind > 0).sum())
        if i % 2:
            continue
        # Decoding gives the bits of evaluating the same tokens in one batch.
        n_same = int(np.argmax(behind > 0)) if behind.any() else len(reply)
        done = llm.generate(prompt, max_tokens=N_GREEDY, temperature=0.0)
        assert list(done.ids[:n_same]) == reply[:n_same]
        if n_same == len(reply) == len(done.ids):
            n_texts += 1
            assert done.text == case["text"]
            assert done.finish_reason == ("length" if len(reply) == N_GREEDY else "stop")
    assert n_tokens > 300
    assert n_others < 0.1 * n_tokens
    assert n_texts >= 2
