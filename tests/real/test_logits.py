"""What models with real weights expect and write, against llama.cpp and against float."""

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

#: The root mean square, and the worst, of the errors of gaps between the two best logits: measured were 0.115 and
#: 0.56 of SmolLM2, 0.124 and 1.03 of Gemma; llama.cpp's are 0.149 and 0.82, and 0.244 and 2.11.
MAX_GAP_ERROR = {"smollm2": (0.18, 1.2), "gemma": (0.19, 1.9)}

#: Another token than llama.cpp's is chosen only where its logit is hardly below the best one, by 0.77 at most as
#: measured.
NEAR_TIE = 1.2


def test_perplexity_is_that_of_llama_cpp(name: str, llm: LLM) -> None:
    text = shared_data("text/wiki.test.raw").read_text(encoding="utf-8")[:30_000]
    found = perplexity(llm, text, chunks=8)
    assert (found.n_chunks, found.context) == (8, 512)
    assert found.perplexity.value == pytest.approx(THEIR_PERPLEXITY[name], rel=0.005)


def test_gaps_between_the_best_logits_are_those_of_float(name: str, llm: LLM) -> None:
    """At every position of 16 prompts and of what the reference wrote after them."""
    errors = np.concatenate(
        [gap_errors(lambda ids, first: iter(llm.logits(ids)[first:]), text) for text in texts_of(name)]
    )
    rms, worst = MAX_GAP_ERROR[name]
    assert len(errors) > 800
    assert np.sqrt(np.mean(errors**2)) < rms
    assert np.abs(errors).max() < worst


def test_greedy_texts_are_those_of_llama_cpp(name: str, llm: LLM) -> None:
    """Token by token, but for near ties, after which texts are others."""
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
        # Decoding computes what evaluating the same tokens at once does, to the last bit.
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
