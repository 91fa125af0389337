"""Tokens chosen on the device: the text is the one of full logits, but only ids and a few logits are downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.engine.drafting import Drafts
from localllm.engine.drafting.cost import StepCost
from localllm.engine.drafting.lookup import LookupDrafter
from localllm.kernels.backend import Batch, Output
from localllm.kernels.cuda.step import CUDAOutput, CUDAStep
from localllm.llm import LLM
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.backends import emulated_cuda, no_harness
from tests.kernels.cuda.watched import WatchedDriver

pytestmark = pytest.mark.skipif(no_harness() is not None, reason="the CUDA harness does not run here")

#: Vocabulary, and generated tokens; fewer tokens for tests with many settings.
N_VOCAB, N_WRITTEN, N_FEW = 3000, 8, 4
PROMPT = [int(i) for i in np.random.default_rng(5).integers(3, N_VOCAB, 9)]
#: Options, and the downloaded bytes per token.
SETTINGS: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"temperature": 0}, 8),
    "greedy without an end": ({"temperature": 0, "ignore_eos": True}, 8 * 64 + 4),
    "defaults": ({}, 8 * 64 + 4),
    "a high temperature": ({"temperature": 5, "top_k": 100, "top_p": 1, "min_p": 0}, 8 * 256 + 4),
    "XTC": ({"temperature": 2, "top_k": 20, "xtc_probability": 0.5}, 8 * 64 + 4),
    "a penalty": ({"temperature": 0, "repeat_penalty": 1.2}, 4 * 3008),
    "log-probabilities": ({"temperature": 0, "logprobs": 1}, 4 * 3008),
    "all tokens": ({"top_k": 0}, 4 * 3008),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selection")
    return tiny_models.tiny_gguf(folder / "model.gguf", type=GGMLType.Q4_0, head_dim=16, vocab_size=N_VOCAB)


@pytest.fixture
def full(load: Callable[..., LLM], path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The model on a device that downloads all logits."""
    with monkeypatch.context() as patched:
        patched.setattr("localllm.kernels.cuda.step.MAX_TOP_K", 0)
        return load(path, emulated_cuda())


def write(llm: LLM, options: dict[str, Any], n: int = N_WRITTEN) -> tuple[int, ...]:
    return llm.generate(PROMPT, max_tokens=n, seed=3, **options).ids


def test_the_text_is_that_of_full_logits(load: Callable[..., LLM], path: Path, full: LLM) -> None:
    driver = WatchedDriver()
    llm = load(path, emulated_cuda(driver))
    for name, (options, n_bytes) in SETTINGS.items():
        llm.forget()
        driver.forget()
        expected = write(full, options, N_FEW)
        assert len(expected) == N_FEW, "the text ended too early for the comparison"
        assert write(llm, options, N_FEW) == expected, name
        assert driver.downloaded_bytes == N_FEW * n_bytes, name
        assert driver.calls["download"] == N_FEW


@pytest.mark.parametrize("name", ["greedy", "defaults", "a high temperature"])
def test_the_next_step_starts_with_the_token_that_the_device_draws(
    load: Callable[..., LLM], path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No step is wasted, because the device draws the same token as the sampler."""
    run, begun = CUDAStep.run, list[int]()

    def watched(step: CUDAStep, batch: Batch, hidden: Output | None = None) -> CUDAOutput:
        begun.append(batch.n_chosen)
        return run(step, batch, hidden)

    monkeypatch.setattr(CUDAStep, "run", watched)
    write(load(path, emulated_cuda()), SETTINGS[name][0])
    assert begun == [0] + (N_WRITTEN - 1) * [1]


@pytest.mark.parametrize(
    "options", [{"tensor_split": (2, 1)}, {"n_gpu_layers": 2}], ids=["two devices", "the CPU too"]
)
def test_on_the_last_of_several_devices(
    load: Callable[..., LLM], path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = WatchedDriver(2)

    def load_split() -> LLM:
        return load(path, *(emulated_cuda(driver, i) for i in range(1 + ("tensor_split" in options))), **options)

    with monkeypatch.context() as patched:
        patched.setattr("localllm.kernels.cuda.step.MAX_TOP_K", 0)
        full = load_split()
    llm = load_split()
    assert len(llm.info.placement.devices) == 2
    for settings, n_bytes in (SETTINGS["greedy"], SETTINGS["defaults"]):
        expected = write(full, settings)
        llm.forget()
        driver.forget()
        assert write(llm, settings) == expected
        assert driver.downloaded_bytes == N_WRITTEN * n_bytes


def test_the_device_chooses_a_token_for_each_draft(
    load: Callable[..., LLM], path: Path, full: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three drafts are right."""
    driver = WatchedDriver()
    llm = load(path, emulated_cuda(driver))
    for options, n_bytes in (SETTINGS["greedy"], SETTINGS["defaults"]):
        expected = write(full, options)

        def propose(_: object, tokens: list[int], most: int, expected: tuple[int, ...] = expected) -> list[int]:
            return [*expected[len(tokens) - len(PROMPT) :][:2], 0][:most]

        monkeypatch.setattr(LookupDrafter, "propose", propose)
        llm.forget()
        driver.forget()
        drafted = llm.generate(PROMPT, max_tokens=N_WRITTEN, seed=3, speculate="lookup", **options)
        assert (drafted.ids, drafted.drafts) == (expected, Drafts(drafted=6, accepted=4, steps=3))
        assert driver.downloaded_bytes == n_bytes * (1 + 3 + 6)


def test_a_draft_model_on_a_device(
    load: Callable[..., LLM], path: Path, full: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model also downloads a few logits, to compute the probability of its drafts."""
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: min(most, 3))
    monkeypatch.setattr("localllm.engine.drafting.model.MIN_PROBABILITY", 0)
    driver = WatchedDriver()
    llm = load(path, emulated_cuda(driver), draft_model=path)
    written = llm.generate(PROMPT, max_tokens=N_WRITTEN, temperature=0, speculate="draft")
    assert written.ids == write(full, {"temperature": 0})
    assert written.drafts is not None
    assert written.drafts.accepted == written.drafts.drafted > 0
    checked = 8 * (1 + written.drafts.steps + written.drafts.drafted)
    assert driver.downloaded_bytes == checked + (8 * 64 + 4) * written.drafts.drafted
