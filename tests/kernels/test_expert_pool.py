"""Experts that stay in the file: the bits of experts in memory, and errors of reading."""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.cli.commands import bench
from localllm.errors import ExpertReadError, NotEnoughMemoryError
from localllm.gguf import GGUFFile
from localllm.kernels.cpu import expert_pool
from localllm.kernels.cpu.backend import CPUBackend, CPUStep
from localllm.kernels.operations import Route
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType as T
from tests.helpers import tiny_models
from tests.helpers.command_line import run_main
from tests.helpers.run_model import make_batch

IDS = [int(i) for i in np.random.default_rng(3).integers(3, 300, 60)]
PAGES = range(4)


@cache
def cpu() -> CPUBackend:
    return CPUBackend(threads=2)


def loaded(path: Path, expert_bytes: int | None) -> CPUStep:
    """Return the step of a model with ``expert_bytes`` of memory for experts, or with all experts in memory."""
    with GGUFFile.open(path) as file:
        graph = read_model(file).graph
        sizes: dict[str, Any] = {"n_pages": (8,) * len(graph.windows), "max_tokens": 64, "max_outputs": 64}
        step = cpu().footprint(graph, **sizes, expert_bytes=expert_bytes).load(None)
    assert isinstance(step, CPUStep)
    return step


def token_bytes(path: Path) -> int:
    """Return the bytes of one token's experts of a layer."""
    with GGUFFile.open(path) as file:
        model = read_model(file)
        planned = cpu().footprint(model.graph, n_pages=(1,), max_tokens=1, max_outputs=1).weights
    route = next(node.operation for node in model.graph.nodes if isinstance(node.operation, Route))
    share = route.k / route.logits.width
    return round(share * sum(weight.n_bytes for weight in planned if weight.is_expert and weight.layer == 0))


def logits(step: CPUStep) -> list[NDArray[np.float32]]:
    """Return logits of a prompt, of its tokens one by one, and of the prompt again."""
    prompt = make_batch([(IDS, 0, PAGES)])
    decoded = [step(make_batch([([id_], i, PAGES)])).copy() for i, id_ in enumerate(IDS)]
    return [step(prompt).copy(), *decoded, step(prompt).copy()]


@pytest.fixture(params=[("mixtral", T.Q4_0), ("qwen3_moe", T.Q4_K), ("qwen3_moe", T.F16)], ids=str)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind, type_ = request.param
    return tiny_models.tiny_gguf(tmp_path / "model.gguf", kind, type=type_, head_dim=16)


@pytest.mark.parametrize("n_tokens", [1, 2.5, 100])
def test_experts_in_the_file_give_the_bits_of_experts_in_memory(path: Path, n_tokens: float) -> None:
    """With memory for one token's experts of a layer, for some experts, and for all."""
    step = loaded(path, round(n_tokens * token_bytes(path)))
    for found, expected in zip(logits(step), logits(loaded(path, None)), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert step.pool is not None
    needed, read = int(step.pool.counts[1]), step.pool.bytes_read
    with GGUFFile.open(path) as file:
        in_file = sum(tensor.n_bytes for name, tensor in file.tensors.items() if "_exps" in name)
    if n_tokens == 100:
        assert read <= in_file  # each expert at most once
    else:
        assert in_file < read
    assert needed > 0


def test_memory_for_less_than_one_token_is_refused(path: Path) -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"one token's experts of a layer take .* MB, but there are"):
        loaded(path, token_bytes(path) // 3)


def test_the_next_layers_experts_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention adds nothing, so all routers choose the same experts, and every prediction is right."""
    settings = tiny_models.config("qwen3_moe", head_dim=16)
    weights = tiny_models.random_weights(settings)
    weights = {name: 0 * array if name.endswith("o_proj.weight") else array for name, array in weights.items()}
    path = tiny_models.write_gguf(tmp_path / "model.gguf", settings, weights)
    step, asked = loaded(path, 10 * token_bytes(path)), list[tuple[int, bool]]()
    assert step.pool is not None
    ask, ahead = step.pool._ask, step.pool._queue.ahead

    def record(entry: int, memory: Any, queue: Any) -> None:
        asked.append((entry // (2 * settings["num_experts"]), queue is ahead))
        ask(entry, memory, queue)

    monkeypatch.setattr(step.pool, "_ask", record)
    for i, id_ in enumerate(IDS):
        step(make_batch([([id_], i, PAGES)]))
    assert {layer for layer, is_ahead in asked if is_ahead} == {0, 1, 2}
    assert {layer for layer, is_ahead in asked if not is_ahead} == {0}


# -- Errors of reading ---------------------------------------------------------------------------------------------


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return tiny_models.tiny_gguf(tmp_path / "model.gguf", "qwen3_moe", type=T.Q4_0, num_hidden_layers=1)


def test_a_read_error_fails_only_the_sequences_that_need_the_expert(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch([(IDS[:2], 0, range(2)), (IDS[2:40], 0, range(2, 6))])
    expected = loaded(mixture, None)(batch).copy()
    step = loaded(mixture, 100 * token_bytes(mixture))
    step(make_batch([(IDS[:2], 0, range(2))]))  # loads its experts

    def fail(*_: object) -> NDArray[np.uint8]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(expert_pool._ExpertFile, "read", fail)
    with pytest.raises(ExpertReadError, match="Input/output error") as caught:
        step(batch)
    assert caught.value.sequences == {1}
    np.testing.assert_array_equal(caught.value.logits[:2], expected[:2])
    monkeypatch.undo()
    np.testing.assert_array_equal(step(batch), expected)  # the next read succeeds


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [truncate, write])
def test_a_changed_file_fails_requests_that_read_it(mixture: Path, change: Callable[[Path], None]) -> None:
    step = loaded(mixture, 100 * token_bytes(mixture))
    first = make_batch([(IDS[:1], 0, PAGES)])
    expected = step(first).copy()
    change(mixture)
    with pytest.raises(ExpertReadError, match=r"model.gguf, tensor blk.0.ffn.* expert \d: the file was changed by"):
        step(make_batch([(IDS, 0, PAGES)]))
    np.testing.assert_array_equal(step(first), expected)


def test_a_pool_keeps_working_when_it_gets_no_more_memory(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(loaded(mixture, None))
    step, take, live = loaded(mixture, 100 * token_bytes(mixture)), expert_pool.aligned_zeros, list[int]()

    def refuse(n_bytes: int, kind: type) -> NDArray[Any]:
        if sum(live) + n_bytes > 1.5 * token_bytes(mixture):
            raise MemoryError("the system gives no memory")
        memory = take(n_bytes, kind)
        live.append(n_bytes)
        weakref.finalize(memory, live.remove, n_bytes)
        return memory

    monkeypatch.setattr(expert_pool, "aligned_zeros", refuse)
    decoded = [step(make_batch([([id_], i, PAGES)])).copy() for i, id_ in enumerate(IDS)]
    for found, each in zip(decoded, expected[1:-1], strict=True):
        np.testing.assert_array_equal(found, each)
    with pytest.raises(ExpertReadError, match="memory for experts ran out"):  # a prompt needs all experts at once
        step(make_batch([(IDS, 0, PAGES)]))
    np.testing.assert_array_equal(step(make_batch([(IDS[:1], 0, PAGES)])), decoded[0])


# -- Whole models --------------------------------------------------------------------------------------------------


def test_a_model_larger_than_memory_generates_the_same_text(mixture: Path) -> None:
    with localllm.load(mixture, context=64) as llm:
        whole, expected = llm.info.placement, llm.generate(IDS[:20], max_tokens=8, temperature=0, ignore_eos=True).ids
    assert not whole.pool
    limit = (whole.total - token_bytes(mixture)) / 1e9
    with localllm.load(mixture, context=64, max_memory=limit) as llm:
        placed = llm.info.placement
        assert placed.total <= limit * 1e9
        assert 0 < placed.pool < placed.experts_in_file
        assert placed.multiplied == whole.multiplied
        assert llm.generate(IDS[:20], max_tokens=8, temperature=0, ignore_eos=True).ids == expected
        counts = llm.counts
        assert counts.experts is not None
        assert counts.experts.needed > 0 < counts.experts.read
    with pytest.raises(NotEnoughMemoryError, match=r"for experts of a token.* but .* is available"):
        localllm.load(mixture, context=64, max_memory=(whole.total - placed.experts_in_file) / 1e9)


def test_the_plan_and_the_bench_report_experts_in_the_file(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with localllm.load(mixture, context=64) as llm:
        total = llm.info.placement.total
    limit = total - 2 * token_bytes(mixture)
    shown = run_main(capfdbinary, "inspect", mixture, "--plan", "-c", "64", "--max-memory", str(limit / 1e9))
    assert re.search(r"experts  .* stay in the file, at most .* in memory: a token reads about", shown.out)
    assert shown.err == ""
    monkeypatch.setattr("localllm.loading.load.available_memory", lambda: limit)
    monkeypatch.setattr("localllm.loading.load.RESERVE", 0)
    shown = run_main(capfdbinary, "inspect", mixture, "--plan", "-c", "64", "--json")
    assert "is larger than memory" in shown.err
    assert "--max-memory silences this warning" in shown.err
    plan = json.loads(shown.out)["plan"]
    assert sum(group["pool"] for group in plan["groups"]) < plan["experts_in_file"]
    assert plan["total"] <= limit
    monkeypatch.setattr(bench, "disturbance", lambda other_cpus, scatter: None)
    flags = "-q", "-p", "61", "-n", "61", "-r", "1", "--max-memory", str(limit / 1e9)
    shown = run_main(capfdbinary, "bench", mixture, *flags)
    for name in ("pp61", "tg61"):
        assert re.search(rf"{name}: \d+% of experts were in memory; .* the disk gives .*B/s", shown.out)
    experts = json.loads(run_main(capfdbinary, "bench", mixture, *flags, "--json").out)["results"][1]["experts"]
    assert 0 <= experts["hits"] <= 1
    assert experts["disk"] > 0


def test_a_prompt_reads_each_expert_once(mixture: Path) -> None:
    with localllm.load(mixture) as llm:
        total = llm.info.placement.total
    with localllm.load(mixture, max_memory=(total - token_bytes(mixture)) / 1e9) as llm:
        llm.generate(IDS + IDS[:59], max_tokens=0)
        assert llm.counts.steps == 1
        assert llm.counts.experts is not None
        with GGUFFile.open(mixture) as file:
            in_file = sum(tensor.n_bytes for name, tensor in file.tensors.items() if "_exps" in name)
        assert llm.counts.experts.read <= in_file


def test_a_request_with_its_experts_in_memory_continues(mixture: Path) -> None:
    with localllm.load(mixture, context=64) as llm:
        total = llm.info.placement.total
    with localllm.load(mixture, context=64, parallel=2, max_memory=(total - 1000) / 1e9) as llm:
        assert llm.info.placement.pool
        options: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        expected = llm.generate(IDS[:1], **options).ids
        truncate(mixture)
        with ThreadPoolExecutor(2) as threads:
            fails, goes_on = (threads.submit(llm.generate, ids, **options) for ids in (IDS[1:], IDS[:1]))
            with pytest.raises(ExpertReadError, match="was changed by another program"):
                fails.result()
            assert goes_on.result().ids == expected
