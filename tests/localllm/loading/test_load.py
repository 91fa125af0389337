"""Loading a file: reading, memory, reported details, and files that change afterwards."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.errors import GGUFError, ModelError, TokenizerError
from localllm.kernels.cpu import backend as cpu_backend, host
from localllm.kernels.cpu.cache import CPUCache
from localllm.kernels.cpu.thread_choice import ThreadChoice
from localllm.llm import LLM
from localllm.loading import load, planned_memory
from localllm.loading.placement import Format
from localllm.options.declared import LoadOptions
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.blocks import random_rows
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.devices import DEVICES

T = GGMLType


def write_model(
    path: Path,
    tensors: dict[str, tuple[np.ndarray, GGMLType]] | None = None,
    metadata: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny F32 model with encoded tensors and metadata added or replaced."""
    settings = tiny_models.config(**changes)
    arrays = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings))
    encoded = {name: tiny_models.encode(array, T.F32) for name, array in arrays.items()} | (tensors or {})
    keys = tiny_models.gguf_metadata(settings) | tiny_models.spm_vocabulary(settings["vocab_size"])
    return tiny_models.write_file(path, tiny_models.gguf_architecture(settings), keys | (metadata or {}), encoded)


def greedy(llm: LLM) -> tuple[int, ...]:
    return llm.generate([1, 40, 41, 42], temperature=0, max_tokens=12, ignore_eos=True).ids


# Tensors of odd shapes.


@pytest.mark.parametrize(
    "name",
    ["token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight"],
)
@pytest.mark.parametrize("shape", [(), (63,), (300, 1), (2, 3, 64)])
def test_tensors_of_any_shape_are_refused_by_name(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write_model(tmp_path / "odd.gguf", {name: (np.zeros(shape, np.float32), T.F32)})
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        localllm.load(path, device="reference")


# LongRoPE.


@pytest.mark.parametrize("device", DEVICES)
def test_longrope_selects_factors_by_the_loaded_context(device: str, tmp_path: Path) -> None:
    """Each choice gives the logits of a plain model with these factors in ``rope_freqs``."""
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(3, 9, 8, dtype=np.float32)
    keys = {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 64,
        "llama.context_length": 128,
    }
    factors = {"rope_factors_short.weight": (short, T.F32), "rope_factors_long.weight": (long, T.F32)}
    path = write_model(tmp_path / "longrope.gguf", factors, keys)
    ids = list(range(40, 60))
    for context, chosen in ((64, short), (65, long), (None, long)):
        plain = write_model(tmp_path / "plain.gguf", {"rope_freqs.weight": (chosen, T.F32)})
        with (
            localllm.load(path, device=device, context=context, threads=1) as llm,
            localllm.load(plain, device=device, context=context, threads=1) as expected,
        ):
            np.testing.assert_array_equal(llm.logits(ids), expected.logits(ids))


# Formats.


def quantised(tmp_path: Path, scales: list[float]) -> Path:
    """Write a model with a matrix [512, 256] in IQ2_XS in layer 0, with scales from ``scales``."""
    changes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    rows = random_rows(T.IQ2_XS, 512, 256, scales=scales)
    return write_model(tmp_path / "iq2.gguf", {"blk.0.ffn_up.weight": (rows, T.IQ2_XS)}, **changes)


def test_the_formats_of_kernels_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = quantised(tmp_path, [0.001])
    caplog.set_level(logging.INFO, "localllm")
    with localllm.load(path, device="cpu", threads=1) as llm:
        info = llm.info
    n_bytes = 512 * 256 * 4 // 8
    assert Format("IQ2_XS", "LUT_IQ2_16", n_bytes) in info.formats
    embedding, layers, output = info.placement.groups
    assert layers.formats[1] == ("IQ2_XS", "LUT_IQ2_16", n_bytes)
    assert [format[:2] for format in embedding.formats + output.formats] == [("F32", "F32")] * 2
    assert sum(format.n_bytes for format in info.formats) == info.placement.weights
    assert f"IQ2_XS read as LUT_IQ2_16 ({n_bytes:,} bytes)" in caplog.text


def test_a_warning_reports_scales_out_of_range_and_their_memory(tmp_path: Path) -> None:
    path = quantised(tmp_path, [40000.0])
    with pytest.warns(UserWarning, match=r"1 of .*\(blk\.0\.ffn_up\.weight\).*float16.*IQ2_XS.*F32.*GB") as caught:
        llm = localllm.load(path, device="cpu", threads=1)
    assert [warning.filename for warning in caught] == [__file__]
    with llm:
        assert ("IQ2_XS", "F32", 4 * 512 * 256) in llm.info.formats


def test_scales_of_a_draft_model_out_of_range_are_warned_of(tmp_path: Path) -> None:
    path = quantised(tmp_path, [40000.0]).replace(tmp_path / "wide.gguf")
    arguments: dict[str, Any] = {"device": "cpu", "threads": 1, "context": 64}
    with pytest.warns(UserWarning, match=r"1 of the tensors of the draft model .*wide\.gguf") as caught:
        localllm.load(quantised(tmp_path, [0.001]), draft_model=path, **arguments).close()
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(UserWarning, match="float16") as caught:
        localllm.load(path, draft_model=path, **arguments).close()
    assert len(caught) == 2


def test_a_plan_states_the_bytes_that_loading_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """With one thread per core: the number of partial results in attention grows with the threads."""
    path = write_model(tmp_path / "model.gguf", max_position_embeddings=1024)
    monkeypatch.setattr(host, "core_speeds", lambda: [1.0] * 3)
    monkeypatch.setattr(host, "cpu_quota", lambda: None)
    monkeypatch.setattr(cpu_backend, "choose_threads", lambda *_: ThreadChoice(2, host.default_threads()))
    arenas, allocate = list[int](), cpu_backend.aligned_zeros
    caches, allocate_cache = list[int](), CPUCache.allocate

    def taken(n_bytes: int, kind: type) -> Any:
        arenas.append(n_bytes)
        return allocate(n_bytes, kind)

    def cache(made: CPUCache) -> None:
        allocate_cache(made)
        caches.append(made.memory.nbytes)

    monkeypatch.setattr(cpu_backend, "aligned_zeros", taken)
    monkeypatch.setattr(CPUCache, "allocate", cache)
    with localllm.load(path, device="cpu") as llm:
        placement = llm.info.placement
    plan = json.loads(run_main(capfdbinary, "inspect", path, "--plan", "--device", "cpu", "--json").out)["plan"]
    planned = {name: sum(group[name] for group in plan["groups"]) for name in ("weights", "kv_cache", "scratch")}
    assert [planned["scratch"]] == arenas == [placement.scratch]
    assert [planned["kv_cache"]] == caches == [placement.kv_cache]
    assert (planned["weights"], plan["total"]) == (placement.weights, placement.total)
    with localllm.load(path, device="cpu", threads=1) as llm:
        fewer = run_main(capfdbinary, "inspect", path, "--plan", "--device", "cpu", "--threads", 1, "--json").out
        assert json.loads(fewer)["plan"]["total"] == llm.info.placement.total < placement.total


# Files that change.

OVERWRITE = """
import os, sys
import localllm

for path, device in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    with localllm.load(path, device=device, threads=1) as llm:
        text = llm.generate("Once", temperature=0, max_tokens=30).text
        assert len(text) > 20
        llm.forget()
        size = os.path.getsize(path)
        with open(path, "r+b") as file:
            file.write(b"\\x3f" * size)
        assert llm.generate("Once", temperature=0, max_tokens=30).text == text, "changed by overwriting the file"
        llm.forget()
        os.truncate(path, 0)
        assert llm.generate("Once", temperature=0, max_tokens=30).text == text, "changed by truncating the file"
        assert llm.has_chat_template is False
        llm.tokenize("Once upon"), llm.info
        if sys.platform == "linux":
            assert path not in open("/proc/self/maps").read(), "the file is still mapped"
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let anyone write into a mapped file")
def test_a_file_that_is_overwritten_after_it_was_loaded(tmp_path: Path) -> None:
    """A separate process, which the system kills if it reads a page that the file lost."""
    models: list[object] = []
    for device in DEVICES:
        for tied in (False, True):
            path = tmp_path / f"{device}-{tied}.gguf"
            models += [tiny_models.tiny_gguf(path, type=T.Q8_0, tie_word_embeddings=tied), device]
    command = [sys.executable, "-c", OVERWRITE, *map(str, models)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def touch(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(0, 1))  # file system timestamps are coarse


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let anyone write into a mapped file")
def test_a_file_that_is_written_while_it_is_loaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    with pytest.raises(GGUFError, match=r"tiny\.gguf was changed by another program"):
        localllm.load(path, device="reference", progress=lambda *_: touch(path))
    localllm.load(path, device="reference").close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not let anyone replace a mapped file")
def test_a_file_that_is_replaced_or_deleted_while_it_is_loaded(tmp_path: Path) -> None:
    """The opened file still exists unchanged."""
    path = write_model(tmp_path / "tiny.gguf")
    with localllm.load(path, device="reference") as llm:
        expected = greedy(llm)

    def replace(*_: object) -> None:
        (tmp_path / "other").write_bytes(b"another one")
        os.replace(tmp_path / "other", path)

    with localllm.load(path, device="reference", progress=replace) as llm:
        assert greedy(llm) == expected
    write_model(path)
    with localllm.load(path, device="reference", progress=lambda *_: path.unlink(missing_ok=True)) as llm:
        assert greedy(llm) == expected


# The vocabulary is read while weights are packed.


@pytest.mark.parametrize("is_early", [False, True])
def test_a_damaged_vocabulary_ends_loading(is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "model.gguf", metadata={"tokenizer.ggml.bos_token_id": 5000})
    if is_early:  # no thread can start: it is read before the first weight is packed

        def start(reader: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(load._TokenizerReader, "start", start)
    packed: list[str] = []
    with pytest.raises(TokenizerError, match="bos_token_id is 5000"):
        localllm.load(path, device="reference", progress=lambda stage, done, total: packed.append(stage))
    assert "localllm-tokenizer" not in [thread.name for thread in threading.enumerate()]
    assert not is_early or not packed
    path.unlink()


def test_the_cache_of_a_loaded_model_is_not_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports memory that a cache has not written yet as available."""
    monkeypatch.setattr(planned_memory, "_open", set())
    monkeypatch.setattr(load, "available_memory", lambda: 4 << 30)
    options = LoadOptions(device="cpu", context=512, parallel=1)
    assert load.plan_file(options).free == {"cpu": 4 << 30}
    with localllm.load(None, device="cpu", context=1024, parallel=1) as llm:
        placed = llm.info.placement
        for used, unused in (
            (0, placed.kv_cache),
            (placed.memory.host - 1000, 1000),
            (placed.total + 1000, 0),
        ):
            monkeypatch.setattr(planned_memory, "used_memory", lambda used=used: used)
            assert load.plan_file(options).free == {"cpu": (4 << 30) - unused}
    assert load.plan_file(options).free == {"cpu": 4 << 30}
