"""A KV cache of 8-, 5- or 4-bit codes instead of float16: less memory, nearly the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, PromptCacheError, UsageError
from localllm.kernels.graph import CacheType
from tests.helpers.command_line import run_main
from tests.helpers.devices import DEVICES
from tests.helpers.tiny_models import tiny_gguf

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-window": {"model_type": "mistral", "sliding_window": 50},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
}


def in_ci(*types: CacheType) -> list[Any]:
    """Mark types whose kernels take seconds to compile."""
    return [pytest.param(type, marks=pytest.mark.ci) for type in types]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def load(path: Path | None, device: str, cache_type: CacheType) -> LLM:
    return localllm.load(path, device=device, threads=2, cache_type=cache_type)


def logits(path: Path | None, device: str, cache_type: CacheType, ids: list[int]) -> Any:
    with load(path, device, cache_type) as llm:
        assert llm.info.cache_type == cache_type
        return llm.logits(ids)


def check_logits(path: Path | None, device: str, ids: list[int], cache_type: CacheType = "q8_0") -> None:
    """Compare all logits: within 1 %, or 20 % for the fewest bits, and not identical."""
    halves, scaled = (logits(path, device, type, ids) for type in ("f16", cache_type))
    bound = max({"f16": 0.0, "q8_0": 0.01, "q5_0": 0.1, "q4_0": 0.2}[type] for type in cache_type.split("/"))
    assert 0 < np.linalg.norm(scaled - halves) / np.linalg.norm(halves) < bound


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_of_random_models(tmp_path: Path, device: str, name: str) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", **ARCHITECTURES[name])
    check_logits(path, device, np.random.default_rng(0).integers(0, 300, 120).tolist())


@pytest.mark.parametrize("cache_type", ["q8_0", *in_ci("q5_0", "q4_0", "f16/q5_0"), "q8_0/q4_0"])
def test_logits_of_the_demo_model(device: str, cache_type: CacheType) -> None:
    with localllm.load(device="reference") as llm:
        ids = llm.tokenize("Once upon a time there was a dog who wanted to fly. One day the dog met a bird.")
    check_logits(None, device, ids, cache_type)


def test_the_plan_counts_half_the_bytes() -> None:
    placements = [load(None, "cpu", cache_type).info.placement for cache_type in ("f16", "q8_0")]
    halves, scaled = (placement.kv_cache for placement in placements)
    assert halves == 5 * 2 * 32 * 1024 * 2 * 2  # the demo model's layers, heads, head size and context
    assert scaled == halves * 34 // 64
    assert placements[0].total - placements[1].total == halves - scaled


@pytest.mark.parametrize("cache_type", ["q8_0", *in_ci("q5_0", "q4_0", "f16/q4_0")])
def test_decoding_continues_after_prefill(device: str, cache_type: CacheType) -> None:
    """Single tokens, in a sequence that shares pages with another, equal a single evaluation of all tokens."""
    with load(None, device, cache_type) as llm:
        first = llm.generate("What is localllm?", max_tokens=40, temperature=0, ignore_eos=True)
        ids = llm.tokenize("What is localllm?")
        again = llm.generate([*ids, *first.ids[:10]], max_tokens=20, temperature=0, ignore_eos=True)
        llm.forget()
        alone = llm.generate([*ids, *first.ids[:10]], max_tokens=20, temperature=0, ignore_eos=True)
    assert again.ids == alone.ids == first.ids[10:30]


@pytest.mark.parametrize("cache_type", ["q5_0", "q8_0/q4_0"])
@pytest.mark.parametrize("name", ["llama", "llama-window"])
def test_a_restored_cache_continues_like_the_original(tmp_path: Path, name: str, cache_type: CacheType) -> None:
    """Cut, share and restore the cache, also with a window; a cache of another type is rejected."""
    path = tiny_gguf(tmp_path / "model.gguf", **ARCHITECTURES[name])
    ids = np.random.default_rng(1).integers(0, 300, 110).tolist()
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with load(path, "cpu", cache_type) as llm:
        expected = [llm.generate(prompt, **options).ids for prompt in (ids, ids[:90], [*ids[:70], *ids[:30]])]
        llm.forget()
        llm.generate(ids, **options)
        llm.save_prompts(tmp_path / "saved")
    with load(path, "cpu", cache_type) as llm:
        assert llm.load_prompts(tmp_path / "saved") > 0
        again = [llm.generate(prompt, **options).ids for prompt in (ids, ids[:90], [*ids[:70], *ids[:30]])]
    assert again == expected
    with load(path, "cpu", "q4_0") as llm, pytest.raises(PromptCacheError, match=r"type of cache|a different"):
        llm.load_prompts(tmp_path / "saved")


def test_the_command_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    flags = ("generate", "-p", "Hello", "-n", "1", "-v", "--device", "reference", "--cache-type")
    outcome = run_main(capfdbinary, *flags, "q8_0")
    assert outcome.code == 0
    assert "q8_0 KV cache" in outcome.err
    outcome = run_main(capfdbinary, *flags, "q4_1")
    assert outcome.code != 0
    assert "--cache-type: 'q4_1' is not one of 'f16', 'q8_0', 'q5_0', 'q4_0'" in outcome.err


@pytest.mark.parametrize("value", ["Q8_0", "q8_0/", "q8_0/f16/f16", ["f16"], np.array(["f16", "q8_0"])])
def test_other_types_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"cache_type is .*, but must be one of 'f16', 'q8_0'"):
        localllm.load(cache_type=value)
