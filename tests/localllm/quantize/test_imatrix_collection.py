"""Collection of importance matrices compared with `plain_transformer`'s formulas, and the command."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localllm.errors import GGUFError, ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import Backend
from localllm.kernels.cpu.backend import CPUBackend
from localllm.kernels.reference import ReferenceBackend
from localllm.quant.formats import dequantize
from localllm.quantize import ImportanceMatrix, plan, run
from localllm.quantize.imatrix import ImatrixEntry
from localllm.quantize.imatrix_collection import chunks, collect
from localllm.tokenizer import Tokenizer
from tests.helpers import plain_transformer, tiny_models
from tests.helpers.command_line import Outcome, run_main
from tests.helpers.gguf_writer import write_gguf

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Longer than a step, so that later steps count too.
PIECES = [[(7 * i + 3 * j) % 290 + 5 for i in range(200)] for j in range(2)]


class _Watched:
    """Return sums of squares of the plain transformer's inputs of matrices, and row counts per expert."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_experts: int) -> None:
        self.sums: dict[str, Any] = defaultdict(float)
        self.counts = np.zeros(n_experts)
        linear, mixture = plain_transformer._linear, plain_transformer._mixture

        def watched_linear(layer: Any, name: str, x: Any) -> Any:
            self.sums[NAMES[name]] = self.sums[NAMES[name]] + (x**2).sum(axis=0)
            return linear(layer, name, x)

        def watched_mixture(config: Any, layer: Any, x: Any) -> Any:
            logits = x @ layer["mlp.gate.weight"].T
            self.sums["ffn_gate_inp"] = self.sums["ffn_gate_inp"] + (x**2).sum(axis=0)
            for row, order in zip(x, np.argsort(-logits, axis=1), strict=True):
                for expert in order[: config["num_experts_per_tok"]]:
                    gate, up = np.split(layer["mlp.experts.gate_up_proj"][expert] @ row, 2)
                    self.counts[expert] += 1
                    for name, value in (("ffn_up_exps", row), ("ffn_down_exps", gate / (1 + np.exp(-gate)) * up)):
                        of_all = np.zeros((n_experts, value.size))
                        of_all[expert] = value**2
                        self.sums[name] = self.sums[name] + of_all
            return mixture(config, layer, x)

        monkeypatch.setattr(plain_transformer, "_linear", watched_linear)
        monkeypatch.setattr(plain_transformer, "_mixture", watched_mixture)


@pytest.mark.parametrize("make_backend", [ReferenceBackend, lambda: CPUBackend(1)], ids=["reference", "cpu"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_sums_match_the_inputs_of_the_weights(
    model_type: str, make_backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_models.config(model_type, num_hidden_layers=1, vocab_size=300)
    weights = tiny_models.random_weights(settings)
    n_experts = tiny_models.n_experts(settings)
    expected = _Watched(monkeypatch, n_experts)
    for piece in PIECES:
        plain_transformer.logits(settings, weights, piece)
    path = tiny_models.write_gguf(tmp_path / "model.gguf", settings, weights)
    backend: Backend = make_backend()
    with GGUFFile.open(path) as file:
        *_, found = collect(file, PIECES, backend)
    assert (found.n_chunks, found.chunk_size) == (2, 200)
    assert {name.split(".")[2] for name in found.entries} >= set(expected.sums)
    assert "output.weight" not in found.entries
    for name, sums in expected.sums.items():
        entry = found.entries[f"blk.0.{name}.weight"]
        counts = expected.counts if "_exps" in name else [400]
        np.testing.assert_array_equal(entry.counts, counts)
        sums = np.atleast_2d(sums)
        assert np.abs(entry.sums - sums).max() < 1e-2 * sums.max()


def test_files_of_both_formats_contain_the_collected_sums(tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf", "qwen3_moe")
    with GGUFFile.open(path) as file:
        *_, found = collect(file, PIECES, ReferenceBackend())
    found.write(tmp_path / "i.gguf")
    found.write(tmp_path / "i.dat")
    assert not list(tmp_path.glob("*.part"))
    again, old = (ImportanceMatrix.read(tmp_path / name) for name in ("i.gguf", "i.dat"))
    assert (again.n_chunks, again.chunk_size, old.n_chunks) == (2, 200, 2)
    for name, entry in found.entries.items():
        np.testing.assert_allclose(again.entries[name].sums, entry.sums, rtol=1e-6)
        np.testing.assert_array_equal(again.entries[name].counts, entry.counts)
        met = entry.counts.repeat(entry.sums.shape[1]) > 0
        np.testing.assert_allclose(old.entries[name].means[met], entry.means[met], rtol=1e-6)
    # keys that llama.cpp's quantiser requires
    fields = gguf.GGUFReader(tmp_path / "i.gguf").fields
    assert {"general.type", "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"} <= set(fields)


def test_merged_files_equal_one_collection(tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file:
        first, second = (list(collect(file, [piece], ReferenceBackend()))[-1] for piece in PIECES)
        *_, whole = collect(file, PIECES, ReferenceBackend())
    both = first + second
    assert both.n_chunks == whole.n_chunks
    for name, entry in whole.entries.items():
        np.testing.assert_allclose(both.entries[name].sums, entry.sums, rtol=1e-12)


def test_chunks_start_with_bos_and_need_a_long_enough_text(tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
    pieces = chunks(tokenizer, "abc " * 40, 16)
    assert {len(piece) for piece in pieces} == {16}
    assert all((piece[0] == tokenizer.bos_id) == tokenizer.add_bos for piece in pieces)
    with pytest.raises(UsageError, match=r"the text has \d+ tokens, but 512 are needed: give a longer one"):
        chunks(tokenizer, "abc", 512)


def test_quantize_reads_the_commands_file(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf", hidden_size=256, intermediate_size=256, head_dim=64)
    text, target = tmp_path / "text.txt", tmp_path / "i.gguf"
    text.write_text("abc def " * 60)
    outcome = run_main(capfdbinary, "imatrix", path, "-f", text, "-c", 32, "--chunks", 2, "-o", target, "-t", 1)
    assert (outcome.code, outcome.out) == (0, f"{target}: 21 tensors, 2 chunks\n")
    more = tmp_path / "more.gguf"
    flags = ("-f", text, "-c", 32, "--chunks", 3, "--in-file", target, "-o", more, "-q")
    assert run_main(capfdbinary, "imatrix", path, *flags) == Outcome(0, "", "")
    assert ImportanceMatrix.read(more).n_chunks == 5
    small = tmp_path / "small.gguf"
    assert run_main(capfdbinary, "quantize", path, small, "IQ2_XS", "--imatrix", more, "-q").code == 0
    with GGUFFile.open(small) as file:
        assert file.metadata["quantize.imatrix.chunks_count"] == 5
        assert file.metadata["quantize.imatrix.dataset"] == "text.txt"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "is not valid UTF-8: byte 0 is 0xff"),
        (b"abc", "tokens, but 512 are needed: give a longer one"),
        (None, "cannot be read (No such file or directory): check the path"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(
    content: bytes | None, words: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path, text = tiny_models.tiny_gguf(tmp_path / "model.gguf"), tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    outcome = run_main(capfdbinary, "imatrix", path, "-f", text, "-o", tmp_path / "i.gguf")
    assert outcome.code == 2
    assert words in outcome.error()
    assert not (tmp_path / "i.gguf").exists()


def test_hessians_match_the_inputs_of_the_weights_and_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_models.config(num_hidden_layers=1, vocab_size=300)
    weights = tiny_models.random_weights(settings)
    expected: dict[str, Any] = defaultdict(float)
    linear = plain_transformer._linear

    def watched(layer: Any, name: str, x: Any) -> Any:
        expected[NAMES[name]] = expected[NAMES[name]] + x.T @ x
        return linear(layer, name, x)

    monkeypatch.setattr(plain_transformer, "_linear", watched)
    for piece in PIECES:
        plain_transformer.logits(settings, weights, piece)
    path = tiny_models.write_gguf(tmp_path / "model.gguf", settings, weights)
    with GGUFFile.open(path) as file:
        *_, found = collect(file, PIECES, CPUBackend(1), hessians=True)
    found.write(tmp_path / "i.gguf")
    with GGUFFile.open(tmp_path / "i.gguf") as file:
        held = {name.split(".")[2] for name in file.tensors if name.endswith(".hessian")}
    assert held == {"attn_k", "attn_output", "ffn_down", "ffn_gate"}  # q and v share k's, and up gate's
    both = ImportanceMatrix.read(tmp_path / "i.gguf") + found
    for name, hessian in expected.items():
        entry = both.entries[f"blk.0.{name}.weight"]
        assert entry.hessian is not None
        assert np.abs(entry.hessian - 2 * hessian).max() < 2e-2 * hessian.max()
    assert both.entries["blk.0.attn_q.weight"].hessian is both.entries["blk.0.attn_v.weight"].hessian


def test_hessians_make_products_more_exact(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path, text = tiny_models.tiny_gguf(tmp_path / "model.gguf"), tmp_path / "text.txt"
    text.write_text("abc def ghi " * 200)
    collected = tmp_path / "i.gguf"
    run_main(capfdbinary, "imatrix", path, "-f", text, "-c", 64, "--hessian", "-o", collected)
    matrix = ImportanceMatrix.read(collected)
    plain = ImportanceMatrix(None, {name: ImatrixEntry(e.sums, e.counts) for name, e in matrix.entries.items()})
    errors = []
    for number, each in enumerate((plain, matrix)):
        target = tmp_path / f"{number}.gguf"
        with GGUFFile.open(path) as file:
            results = list(run(plan(file, target, "Q4_0", imatrix=each)))
        with GGUFFile.open(path) as old, GGUFFile.open(target) as new:
            errors.append(0.0)
            for name, entry in matrix.entries.items():
                difference = dequantize(new.tensors[name].data, new.tensors[name].type) - dequantize(
                    old.tensors[name].data, old.tensors[name].type
                )
                assert entry.hessian is not None
                errors[-1] += float(((difference @ entry.hessian) * difference).sum())
        assert all(result.error is None or result.error < 0.2 for result in results)
    assert errors[1] < 0.5 * errors[0]


def _quantized(file: GGUFFile, folder: Path) -> None:
    matrix = ImportanceMatrix.read(folder / "bad.gguf")
    list(run(plan(file, folder / "small.gguf", "Q4_0", imatrix=matrix)))


@pytest.mark.parametrize("change", [lambda h: h[:-1], lambda h: np.full_like(h, np.nan)])
def test_a_damaged_hessian_is_noticed(change: Any, tmp_path: Path) -> None:
    path = tiny_models.tiny_gguf(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file:
        *_, found = collect(file, PIECES[:1], ReferenceBackend(), hessians=True)
        name = "blk.0.attn_output.weight"
        entry = found.entries[name]
        assert entry.hessian is not None
        found.write(tmp_path / "good.gguf")
        with GGUFFile.open(tmp_path / "good.gguf") as good:
            arrays = {key: dequantize(t.data, t.type).reshape(t.shape) for key, t in good.tensors.items()}
        arrays[f"{name}.hessian"] = change(arrays[f"{name}.hessian"])
        write_gguf(tmp_path / "bad.gguf", {"imatrix.hessians": [f"{name}={name}"]}, arrays)
        with pytest.raises((GGUFError, ModelError), match=r"Hessian|collect them again"):
            _quantized(file, tmp_path)
