"""`load(prompt_cache=…)`: the same tokens after a restart, of models with every kind of cache."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, UsageError
from localllm.engine import cache as cache_module
from localllm.engine.block_store import BlockStore
from localllm.kernels.graph import CacheType
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.devices import DEVICES
from tests.helpers.tiny_models import tiny_gguf
from tests.localllm.engine.test_block_store import N_KILLS

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "window": {"model_type": "mistral", "sliding_window": 50},
}
GREEDY: Any = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=512, **MODELS[request.param])


def load(path: Path | None, folder: Path | None, **options: Any) -> LLM:
    return localllm.load(path, prompt_cache=folder, threads=2, **options)


def prompts() -> Iterator[list[int]]:
    """Yield prompts with common beginnings."""
    ids = np.random.default_rng(1).integers(3, 300, 400).tolist()
    yield from (ids, ids[:300], [*ids[:200], *ids[:100]], [*ids[:330], 7])


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", pytest.param("q4_0", marks=pytest.mark.ci), "q8_0/q4_0"])
def test_equal_tokens_after_a_restart(tmp_path: Path, device: str, model: Path, cache_type: CacheType) -> None:
    options: dict[str, Any] = {"device": device, "cache_type": cache_type}
    with load(model, None, **options) as llm:
        expected = []
        for ids in prompts():
            llm.forget()
            expected.append(llm.generate(ids, **GREEDY).ids)
    folder = tmp_path / "cache"
    with load(model, folder, **options) as llm:
        assert [llm.generate(ids, **GREEDY).ids for ids in prompts()] == expected
    for ids, reply in zip(prompts(), expected, strict=True):
        with load(model, folder, **options) as llm:
            assert llm.generate(ids, **GREEDY).ids == reply
            assert llm.counts.restored_tokens >= llm.counts.disk_tokens == llm.counts.cached_tokens == len(ids) - 1
            assert llm.counts.prompt_tokens == 1
            done = llm.generate([*ids, *reply, 5], **GREEDY)
            assert done.usage.cached_tokens == len(ids) + len(reply) - 1
            assert llm.counts.disk_tokens == len(ids) - 1
            llm.forget()
            assert llm.generate([*ids, *reply, 5], **GREEDY).ids == done.ids


def test_other_models_and_cache_types_find_nothing(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=512)
    other = tiny_gguf(tmp_path / "other.gguf", max_position_embeddings=512, rope_theta=5000.0)
    ids = next(prompts())
    with load(path, tmp_path / "cache", device="cpu") as llm:
        llm.generate(ids, **GREEDY)
    for file, options in (
        (path, {"cache_type": "q8_0"}),
        (path, {"device": "reference"}),
        (other, {"device": "cpu"}),
    ):
        with load(file, tmp_path / "cache", **options) as llm:
            llm.generate(ids, **GREEDY)
            assert llm.counts.restored_tokens == 0
    with load(path, tmp_path / "cache", device="cpu") as llm:
        llm.generate(ids, **GREEDY)
        assert llm.counts.restored_tokens >= len(ids) - 1


def test_models_of_one_process_share_a_folder(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=512)
    ids = next(prompts())
    with load(path, tmp_path / "cache") as llm, load(None, tmp_path / "cache") as demo:
        expected = llm.generate(ids, **GREEDY).ids
        text = demo.generate("Once upon a time " * 30, **GREEDY).text
    with load(path, tmp_path / "cache") as llm, load(None, tmp_path / "cache") as demo:
        assert llm.generate(ids, **GREEDY).ids == expected
        assert demo.generate("Once upon a time " * 30, **GREEDY).text == text
        assert llm.counts.restored_tokens > 300
        assert demo.counts.restored_tokens > 30


def test_a_hybrid_model_on_five_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    from dataclasses import replace

    from tests.models.tiny import TINY, make_model, write

    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", 128)
    entry = TINY["qwen35"]
    entry = replace(entry, config={**entry.config, "max_position_embeddings": 2048})
    path = write(tmp_path / "model.gguf", entry, model := make_model(entry))
    rng, folder = np.random.default_rng(0), tmp_path / "cache"
    n_vocab = model.config.vocab_size
    common, branches = rng.integers(3, n_vocab, 300).tolist(), []
    with load(path, folder) as llm:
        common += llm.generate(common, **GREEDY | {"max_tokens": 200}).ids
        for _ in range(5):
            ids = [*common, *rng.integers(3, n_vocab, 50).tolist()]
            branches.append([*ids, *llm.generate(ids, **GREEDY | {"max_tokens": 300}).ids, 9])
    with load(path, None) as llm:
        expected = [llm.generate(ids, **GREEDY).ids for ids in branches]
    for ids, reply in zip(branches, expected, strict=True):
        with load(path, folder) as llm:
            assert llm.generate(ids, **GREEDY).ids == reply
            assert llm.counts.prompt_tokens <= 2


WRITER = """
import sys
from pathlib import Path
from tests.localllm.test_prompt_cache import GREEDY, load, session
with load(Path(sys.argv[1]), Path(sys.argv[2]), device="cpu", context=512) as llm:
    for ids in session(int(sys.argv[3])):
        llm.generate(ids, **GREEDY)
        print(len(ids), flush=True)
"""


def session(seed: int) -> Iterator[list[int]]:
    """Yield growing prompts without end."""
    rng = np.random.default_rng(seed)
    while True:
        ids = rng.integers(3, 300, 100).tolist()
        while len(ids) < 480:
            ids += rng.integers(3, 300, 20).tolist()
            yield ids


@pytest.mark.posix("needs SIGKILL")
def test_a_killed_program_leaves_no_wrong_block(tmp_path: Path) -> None:
    path, chance = tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=512), random.Random()
    n_restored = 0
    with load(path, None, device="cpu") as alone:
        for seed in range(max(2, N_KILLS // 10)):
            words = [sys.executable, "-c", WRITER, str(path), str(tmp_path / "cache"), str(seed)]
            with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline()
                time.sleep(chance.random())
                process.send_signal(signal.SIGKILL)
                n_done = 1 + len(process.stdout.readlines())
            with load(path, tmp_path / "cache", device="cpu") as llm:
                for _, ids in zip(range(min(n_done, 20)), session(seed), strict=False):
                    assert llm.generate(ids, **GREEDY).ids == alone.generate(ids, **GREEDY).ids
                n_restored += llm.counts.restored_tokens
    assert n_restored > 100


FULL = """
import resource, sys, warnings
from pathlib import Path
from tests.localllm.test_prompt_cache import GREEDY, load, prompts
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
ids = next(prompts())
with load(Path(sys.argv[1]), Path(sys.argv[2]), device="cpu") as llm:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (200, 300, 400):
            print(llm.generate(ids[:n], **GREEDY).ids)
    print([str(warning.message)[:32] for warning in caught])
"""


@pytest.mark.posix("needs limits of resources")
def test_a_full_disk_is_one_warning(tmp_path: Path) -> None:
    path, ids = tiny_gguf(tmp_path / "model.gguf", max_position_embeddings=512), next(prompts())
    words = [sys.executable, "-c", FULL, str(path), str(tmp_path / "cache")]
    outcome = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    *texts, warned = outcome.stdout.splitlines()
    assert warned == "['new prompts are no longer stored']"
    with load(path, tmp_path / "cache", device="cpu") as llm:
        assert [str(llm.generate(ids[:n], **GREEDY).ids) for n in (200, 300, 400)] == texts


def test_a_second_program_is_warned(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "cache")
    with pytest.warns(UserWarning, match="another program writes to it"):
        llm = load(None, tmp_path / "cache")
    assert llm.generate("Hello", max_tokens=3).text
    llm.close()
    store.close()


def test_faulty_options() -> None:
    with pytest.raises(UsageError, match="prompt_cache_size is 0, but must be a number of gigabytes"):
        localllm.load(prompt_cache="a", prompt_cache_size=0)
    with pytest.raises(UsageError, match="cache_scope is 'client', but must be one of 'all', 'key'"):
        localllm.load(cache_scope="client")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the folder of the prompt cache .*: name another folder"):
        localllm.load(prompt_cache=__file__)


def test_the_command_lists_and_clears(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with load(None, tmp_path / "cache", cache_type="q8_0") as llm:
        llm.generate("Once upon a time " * 30, **GREEDY)
    listed = run_main(capfdbinary, "cache", tmp_path / "cache").out.split("\n")
    assert listed[0].split() == ["model", "cache", "size", "tokens", "last", "stored"]
    assert listed[1].split()[:2] == ["demo.gguf", "q8_0"]
    assert str(tmp_path / "cache") in listed[2]
    assert '"cache_type": "q8_0", "n_bytes": ' in run_main(capfdbinary, "cache", tmp_path / "cache", "--json").out
    store = BlockStore(tmp_path / "cache")
    outcome = run_main(capfdbinary, "cache", tmp_path / "cache", "--clear")
    assert "another program writes to it; close that program first" in outcome.error()
    store.close()
    removed = json.loads(run_main(capfdbinary, "cache", tmp_path / "cache", "--clear", "--json").out)
    assert (removed["n_removed_bytes"] > 0, removed["n_bytes"], removed["models"]) == (True, 0, [])
    assert run_main(capfdbinary, "cache", tmp_path / "cache").out.endswith(": empty\n")
    assert "removed 0 B" in run_main(capfdbinary, "cache", tmp_path / "cache", "--clear").out
    assert not list((tmp_path / "cache").glob("*.blocks"))
    assert "there is no folder" in run_main(capfdbinary, "cache", tmp_path / "none").error()
