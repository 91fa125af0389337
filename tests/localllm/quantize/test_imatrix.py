"""Importance matrices: both formats, and files that are invalid or of another model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from localllm.errors import GGUFError, ModelError
from localllm.quantize import ImportanceMatrix
from tests.helpers.gguf_writer import write_gguf

METADATA = {
    "general.type": "imatrix",
    "imatrix.datasets": ["wiki.txt"],
    "imatrix.chunk_count": 12,
    "imatrix.chunk_size": 512,
}


def old_format(entries: dict[str, tuple[int, list[float]]], tail: bytes = b"") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, (n_calls, values) in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", n_calls, len(values))
        data += np.array(values, "<f4").tobytes()
    return data + tail


def test_gguf_has_means_of_each_expert(tmp_path: Path) -> None:
    sums = np.array([[2, 4], [0, 0], [30, 60]], np.float32)
    counts = np.array([[2], [0], [10]], np.float32)
    path = write_gguf(tmp_path / "i.gguf", METADATA, {"a.weight.in_sum2": sums, "a.weight.counts": counts})
    found = ImportanceMatrix.read(path)
    assert (found.datasets, found.n_chunks) == (("wiki.txt",), 12)
    of_experts = found.of("a.weight", (3, 5, 2))
    assert of_experts is not None
    np.testing.assert_array_equal(of_experts, [[1, 2], [1, 1], [3, 6]])  # the unused expert has equal values
    assert found.of("b.weight", (5, 2)) is None


def test_the_old_format_has_means_times_calls(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    tail = struct.pack("<ii", 40, 5) + b"a.txt"
    path.write_bytes(old_format({"a.weight": (4, [4, 8]), "b.weight": (0, [1, 2])}, tail))
    found = ImportanceMatrix.read(path)
    assert (found.datasets, found.n_chunks) == (("a.txt",), 40)
    np.testing.assert_array_equal(found.entries["a.weight"].means, [1, 2])
    np.testing.assert_array_equal(found.entries["b.weight"].means, [1, 2])
    path.write_bytes(old_format({"a.weight": (4, [4, 8])}))
    assert ImportanceMatrix.read(path).datasets == ()


def test_another_model_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(old_format({"a.weight": (1, [1, 2]), "token_embd.weight": (1, [1, 2])}))
    found = ImportanceMatrix.read(path)
    with pytest.raises(ModelError, match=r"another model: 'a.weight' has 2 columns there and 4 here"):
        found.of("a.weight", (3, 4))
    assert found.of("token_embd.weight", (3, 4)) is None
    found.check_is_of(["x", "a.weight"])
    with pytest.raises(ModelError, match=r"tensors such as 'a.weight', and this model has none"):
        found.check_is_of(["x", "y"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends early"),
        (b"\0\0\0\0", "empty, or is another"),
        (b"# a text, and not a matrix", "ends early"),
        (old_format({"a": (1, [1, 2])})[:-1], "ends early"),
        (old_format({"a": (1, [1, float("nan")])}), "'a' are not all finite"),
        (old_format({"a": (1, [1, -2])}), "'a' are not all finite and at least 0"),
    ],
)
def test_an_invalid_importance_matrix_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "i.dat"
    path.write_bytes(data)
    with pytest.raises(GGUFError, match=words):
        ImportanceMatrix.read(path)


def test_a_model_is_no_importance_matrix(tmp_path: Path) -> None:
    weights = {"a.weight": np.ones((2, 2), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, weights)
    with pytest.raises(GGUFError, match="no tensors named"):
        ImportanceMatrix.read(path)
    path = write_gguf(tmp_path / "h.gguf", METADATA, {"a.in_sum2": np.ones((2, 2), np.float32)})
    with pytest.raises(GGUFError, match="'a' has sums but no counts"):
        ImportanceMatrix.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"none\.gguf cannot be read"):
        ImportanceMatrix.read(tmp_path / "none.gguf")
