"""Perplexity and divergence compared with a second implementation of llama.cpp's definitions, token by token."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm import LLM, OutputError, UsageError
from localllm.evaluate import BaseLogits, divergence, perplexity
from localllm.evaluate.base_logits import packed
from localllm.evaluate.perplexity import _chunks, _compared
from localllm.files import read_text
from tests.helpers.tiny_models import config, random_weights, write_gguf

CONTEXT = 16
TEXT = "".join(chr(97 + i * i % 26) for i in range(90))
Logits = NDArray[np.float32]


def tiny(path: Path, seed: int = 0, **changes: Any) -> Path:
    settings = config(num_hidden_layers=1, **changes)
    return write_gguf(path, settings, random_weights(settings, seed=seed))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with localllm.load(tiny(tmp_path_factory.mktemp("evaluate") / "tiny.gguf"), device="reference") as llm:
        yield llm


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with localllm.load(tiny(tmp_path_factory.mktemp("evaluate") / "other.gguf", seed=1), device="reference") as llm:
        yield llm


def counted(llm: LLM) -> Iterator[tuple[Logits, list[int]]]:
    """Yield, for each chunk, the evaluated logits and the following tokens."""
    ids = llm.tokenize(TEXT)
    for start in range(0, len(ids) - CONTEXT + 1, CONTEXT):
        chunk = ids[start : start + CONTEXT]
        bos = llm.tokenizer.bos_id
        assert bos is not None
        rows = llm.logits([bos, *chunk[1:]])
        yield rows[CONTEXT // 2 : CONTEXT - 1], chunk[CONTEXT // 2 + 1 :]


def log_softmax(row: Logits) -> NDArray[np.float64]:
    row = row.astype(np.float64)
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


def nll(llm: LLM) -> list[float]:
    return [-log_softmax(row)[id_] for rows, came in counted(llm) for row, id_ in zip(rows, came, strict=True)]


def test_perplexity_is_that_of_the_second_halves(llm: LLM) -> None:
    seen: list[tuple[int, int, float]] = []
    found = perplexity(llm, TEXT, context=CONTEXT, progress=lambda *each: seen.append(each))
    values = nll(llm)
    assert found.perplexity.value == pytest.approx(math.exp(np.mean(values)), rel=1e-5)
    error = np.std(values) / math.sqrt(len(values) - 1)
    assert found.perplexity.error == pytest.approx(found.perplexity.value * error, rel=1e-4)
    n_chunks = len(llm.tokenize(TEXT)) // CONTEXT
    assert (found.n_tokens, found.n_chunks, found.context) == (7 * n_chunks, n_chunks, CONTEXT)
    assert [each[:2] for each in seen] == [(i + 1, n_chunks) for i in range(n_chunks)]
    assert seen[-1][2] == pytest.approx(found.perplexity.value)
    assert perplexity(llm, TEXT, context=CONTEXT, chunks=2).n_chunks == 2


@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_few_chunks_tokenize_only_part_of_the_text(
    chunks: int, llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text, lengths, read = "é" + TEXT * 500, list[int](), list[int]()
    file = tmp_path / "text.txt"
    file.write_text(text, "utf-8")
    expected = _chunks(llm, text, CONTEXT, None)[:chunks]
    tokenize = LLM.tokenize

    def counting(self: LLM, text: str, *more: Any) -> list[int]:
        lengths.append(len(text))
        return tokenize(self, text, *more)

    def reading(path: Path, *, n_bytes: int) -> str:
        read.append(n_bytes)
        return read_text(path, n_bytes=n_bytes)

    monkeypatch.setattr(LLM, "tokenize", counting)
    monkeypatch.setattr(sys.modules["localllm.evaluate.perplexity"], "read_text", reading)
    for source in (text, file):
        assert np.array_equal(_chunks(llm, source, CONTEXT, chunks), expected)
    assert sum(lengths) < len(text) / 5
    assert 0 < sum(read) < len(text) / 10
    with pytest.raises(UsageError, match="chunks is 0"):
        _chunks(llm, text, CONTEXT, 0)


def test_the_file_of_logits_is_llama_cpps(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "base.bin"
    perplexity(llm, TEXT, context=CONTEXT, save_logits=path)
    data, ids = path.read_bytes(), llm.tokenize(TEXT)
    n_chunks, n_vocab = len(ids) // CONTEXT, llm.info.n_vocab
    head = b"_logits_" + struct.pack("<iii", CONTEXT, n_vocab, n_chunks)
    head += struct.pack(f"<{n_chunks * CONTEXT}i", *ids[: n_chunks * CONTEXT])
    assert data.startswith(head)
    rows = data[len(head) :]
    width = 2 * (2 * ((n_vocab + 1) // 2) + 4)
    expected = [row for rows, _ in counted(llm) for row in rows]
    assert len(rows) == width * len(expected)
    for i, row in enumerate(expected):
        scale, lowest = struct.unpack_from("<ff", rows, i * width)
        steps = np.frombuffer(rows, "<u2", n_vocab, i * width + 8)
        assert np.abs(lowest + scale * steps - np.maximum(log_softmax(row), lowest)).max() < 1e-3
        assert steps.max() == 65535
    assert np.array_equal(BaseLogits.read(path).tokens.ravel(), ids[: n_chunks * CONTEXT])


def test_very_unlikely_tokens_are_clipped() -> None:
    logits = np.array([[0, -5, -16, -40, 3, -np.inf, 0], [2, 2, 2, 2, 2, 2, 2]], np.float32)
    rows = packed(logits)
    assert rows.shape == (2, 12)  # rows of an odd vocabulary are padded
    scale, lowest = rows[0, :4].copy().view(np.float32)
    assert scale * 65535 == pytest.approx(16)
    restored = lowest + scale * rows[0, 4:11]
    assert restored[[0, 1, 4]] == pytest.approx(log_softmax(logits[0])[[0, 1, 4]], abs=1e-3)
    assert (rows[0, [6, 7, 9]] == 0).all()
    assert not rows[1, 4:].any()
    assert rows[1, :4].copy().view(np.float32).tolist() == pytest.approx([0, -math.log(7)])


def test_divergence_is_that_of_each_token(llm: LLM, other: LLM, tmp_path: Path) -> None:
    base_path = tmp_path / "base.bin"
    perplexity(llm, TEXT, context=CONTEXT, save_logits=base_path)
    found = divergence(other, BaseLogits.read(base_path))
    kl, change, same = [], [], []
    for (base_rows, came), (rows, _) in zip(counted(llm), counted(other), strict=True):
        for base_row, row, id_ in zip(base_rows, rows, came, strict=True):
            p, q = log_softmax(base_row), log_softmax(row)
            kl.append(float(np.sum(np.exp(p) * (p - q))))
            change.append(math.exp(q[id_]) - math.exp(p[id_]))
            same.append(p.argmax() == q.argmax())
    n = len(kl)
    assert found.kl.value == pytest.approx(np.mean(kl), rel=1e-3)
    assert found.kl.error == pytest.approx(np.std(kl) / math.sqrt(n - 1), rel=1e-3)
    assert found.kl_percentiles[100] == pytest.approx(max(kl), rel=1e-3)
    assert found.kl_percentiles[50] == pytest.approx(np.median(kl), rel=1e-3)
    assert found.probability_change.value == pytest.approx(np.mean(change), abs=1e-6)
    assert found.probability_change_rms.value == pytest.approx(math.sqrt(np.mean(np.square(change))), rel=1e-3)
    assert found.probability_change_percentiles[0] == pytest.approx(min(change), rel=1e-3)
    share = np.mean(same)
    assert found.same_top.value == pytest.approx(share)
    assert found.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))
    x, y = np.array(nll(other)), np.array(nll(llm))
    assert found.perplexity.perplexity.value == pytest.approx(math.exp(x.mean()), rel=1e-4)
    assert found.base_perplexity.value == pytest.approx(math.exp(y.mean()), rel=1e-3)
    assert found.log_ratio.value == pytest.approx((x - y).mean(), abs=1e-4)
    assert found.log_ratio.error == pytest.approx(np.std(x - y) / math.sqrt(n - 1), rel=1e-2)
    assert found.correlation == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-3)
    assert found.ratio.value == pytest.approx(math.exp(found.log_ratio.value))
    assert found.difference.value == pytest.approx(found.perplexity.perplexity.value - found.base_perplexity.value)


def test_a_model_is_not_far_from_itself(llm: LLM, tmp_path: Path) -> None:
    perplexity(llm, TEXT, context=CONTEXT, save_logits=tmp_path / "base.bin")
    found = divergence(llm, BaseLogits.read(tmp_path / "base.bin"), chunks=2)
    assert abs(found.kl.value) < 1e-6
    assert found.same_top == (1, 0)
    assert found.correlation == pytest.approx(1, abs=1e-5)
    assert found.perplexity.n_chunks == 2


def test_a_model_that_is_sure_of_itself_has_the_perplexity_of_its_own_logits(tmp_path: Path) -> None:
    """Probabilities below the file's resolution are clipped equally."""
    settings = config(num_hidden_layers=1)
    weights = {name: 4 * weight for name, weight in random_weights(settings, seed=0).items()}
    with localllm.load(write_gguf(tmp_path / "sure.gguf", settings, weights), device="reference") as sure:
        own = perplexity(sure, TEXT, context=CONTEXT, save_logits=tmp_path / "base.bin")
        found = divergence(sure, BaseLogits.read(tmp_path / "base.bin"))
    assert max(float(-log_softmax(row)[id_]) for row, id_ in _rows(tmp_path / "sure.gguf")) > 20
    assert found.ratio.value == pytest.approx(1, abs=1e-3)
    assert found.difference.value == pytest.approx(0, abs=1e-3 * found.base_perplexity.value)
    assert found.perplexity.perplexity.value == pytest.approx(own.perplexity.value, rel=1e-6)


def _rows(path: Path) -> Iterator[tuple[Logits, int]]:
    with localllm.load(path, device="reference") as model:
        for rows, came in counted(model):
            yield from zip(rows, came, strict=True)


def test_tokens_that_the_base_model_finds_impossible_have_no_part() -> None:
    expected = np.log(np.array([[0.5, 0.5, 1e-9]], np.float32))
    logits = np.array([[1, 1, -1000]], np.float32)
    assert _compared(logits, expected, np.array([0], np.int32))[2] == pytest.approx(0, abs=1e-6)


def test_texts_that_cannot_be_measured(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the text has \d+ tokens, but at least 64 are needed for chunks of 32"):
        perplexity(llm, "short", context=32)
    with pytest.raises(UsageError, match=r"chunks of 999 tokens do not fit into the context of 128"):
        perplexity(llm, TEXT, context=999)
    with pytest.raises(UsageError, match="context is 3, but must be a whole number of at least 4"):
        perplexity(llm, TEXT, context=3)
    with pytest.raises(OutputError, match="cannot be written"):
        perplexity(llm, TEXT, context=CONTEXT, save_logits=tmp_path / "nowhere" / "base.bin")
    perplexity(llm, TEXT, context=CONTEXT, save_logits=tmp_path / "base.bin")
    smaller = tiny(tmp_path / "small.gguf", vocab_size=290)
    with (
        localllm.load(smaller, device="reference") as small,
        pytest.raises(UsageError, match="a vocabulary of 300 tokens, but the model's has 290"),
    ):
        divergence(small, BaseLogits.read(tmp_path / "base.bin"))


def test_a_failure_leaves_no_file(llm: LLM, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perplexity(llm, TEXT, context=CONTEXT, save_logits=tmp_path / "base.bin", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "base.bin"
    perplexity(llm, TEXT, context=CONTEXT, save_logits=path)
    whole, base = path.read_bytes(), BaseLogits.read(path)
    for data, words in [
        (b"", "is not a file of base logits"),
        (b"GGUF" + bytes(100), "is not a file of base logits"),
        (whole[:-1], "is damaged or was not written to its end"),
        (whole[:8] + struct.pack("<iii", -5, 300, 5) + whole[20:], "is damaged"),
        (whole[:20] + struct.pack("<i", 300) + whole[24:], "tokens outside the vocabulary"),
    ]:
        path.write_bytes(data)
        with pytest.raises(UsageError, match=words):
            BaseLogits.read(path)
    with pytest.raises(UsageError, match="cannot be read"):
        BaseLogits.read(tmp_path / "nowhere.bin")
    first_row = 20 + 4 * base.tokens.size
    for scale in (np.nan, 1e36, -1.0):
        path.write_bytes(whole[:first_row] + struct.pack("<f", scale) + whole[first_row + 4 :])
        with pytest.raises(UsageError, match="logits that are not finite"):
            BaseLogits.read(path).log_probabilities(0)
