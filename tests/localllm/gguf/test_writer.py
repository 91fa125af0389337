"""Writing GGUF files: what is read back is what was given, and half a file never has the name of a whole one."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.errors import OutputError
from localllm.gguf import GGUFFile
from localllm.gguf.metadata import ValueType
from localllm.gguf.writer import GGUFWriter, TensorSpec, encode_value
from localllm.quant.types import GGMLType
from tests.helpers.gguf_writer import write_gguf

TENSORS = [TensorSpec("a", (3, 32), GGMLType.Q4_0), TensorSpec("b", (5,), GGMLType.F32)]
DATA = [np.arange(54, dtype=np.uint8), np.arange(20, dtype=np.uint8)]
METADATA = {"general.architecture": encode_value("llama")}


def write(path: Path, metadata: dict[str, bytes] = METADATA, alignment: int = 32) -> int:
    with GGUFWriter(path, metadata, TENSORS, alignment) as writer:
        writer.write(DATA[0][:20])
        writer.write(DATA[0][20:])
        writer.write(DATA[1])
    return writer.n_bytes


def test_what_was_written_is_read(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "a.bool": True,
        "a.int": 7,
        "a.float": 0.5,
        "a.texts": ["one", "zwei ü"],
    }
    encoded = {key: encode_value(value) for key, value in values.items()}
    encoded["a.short"] = encode_value(3, ValueType.UINT16)
    encoded["a.signed"] = encode_value(-4, ValueType.INT32)
    n_bytes = write(tmp_path / "new.gguf", encoded)
    assert (tmp_path / "new.gguf").stat().st_size == n_bytes
    with GGUFFile.open(tmp_path / "new.gguf") as file:
        found = {key: list(value) if key == "a.texts" else value for key, value in file.metadata.items()}
        assert found == {**values, "a.short": 3, "a.signed": -4}
        assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [
            (t.name, t.shape, t.type) for t in TENSORS
        ]
        for tensor, data in zip(file.tensors.values(), DATA, strict=True):
            np.testing.assert_array_equal(tensor.data.ravel(), data)
            assert tensor.offset % 32 == 0


def test_values_are_copied_as_they_stand(tmp_path: Path) -> None:
    given = {
        "general.architecture": "llama",
        "general.alignment": 64,
        "a.numbers": np.arange(5, dtype=np.int16),
        "a.text": b"caf\xe9",
        "a.texts": ["x", "yy"],
        "a.double": np.array([1.5], np.float64),
    }
    source = write_gguf(tmp_path / "source.gguf", given, {"a": np.ones((3, 32), np.float32)})
    with GGUFFile.open(source) as file:
        write(tmp_path / "copy.gguf", {key: file.metadata.encoded(key) for key in file.metadata}, 64)
        with GGUFFile.open(tmp_path / "copy.gguf") as copy:
            assert list(copy.metadata) == list(file.metadata)
            assert all(copy.metadata.encoded(key) == file.metadata.encoded(key) for key in file.metadata)
            assert all(tensor.offset % 64 == 0 for tensor in copy.tensors.values())


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    def stopped() -> None:
        with GGUFWriter(tmp_path / "new.gguf", METADATA, TENSORS) as writer:
            writer.write(DATA[0])
            assert not (tmp_path / "new.gguf").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(KeyboardInterrupt), GGUFWriter(path, METADATA, TENSORS):
        raise KeyboardInterrupt
    assert path.read_bytes() == b"precious"
    write(path)
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.skipif(sys.platform == "win32", reason="nothing keeps others out there")
def test_a_file_that_another_program_writes_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    for origin in ("", "the same"):
        with GGUFWriter(path, METADATA, TENSORS, origin=origin) as first:
            with (
                pytest.raises(OutputError, match=r"another program writes .*new\.gguf now"),
                GGUFWriter(path, METADATA, TENSORS, origin=origin),
            ):
                pass
            for data in DATA:
                first.write(data)
        with GGUFFile.open(path) as file:
            assert list(file.tensors) == [tensor.name for tensor in TENSORS]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("n", [0, 1])
def test_a_tensor_too_few_is_a_mistake(tmp_path: Path, n: int) -> None:
    def write_some() -> None:
        with GGUFWriter(tmp_path / "new.gguf", METADATA, TENSORS) as writer:
            for data in DATA[:n]:
                writer.write(data)

    with pytest.raises(ValueError, match="not all"):
        write_some()
    assert list(tmp_path.iterdir()) == []


def test_bytes_too_many_are_a_mistake(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="more bytes"),
        GGUFWriter(tmp_path / "new.gguf", METADATA, TENSORS) as writer,
    ):
        writer.write(np.zeros(55, np.uint8))


def test_too_small_a_disk_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(OutputError, match=r"new\.gguf takes 256 bytes but the disk has 100 left"):
        write(tmp_path / "new.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path) -> None:
    def write_until_full() -> None:
        with GGUFWriter(tmp_path / "new.gguf", METADATA, TENSORS) as writer:
            writer._file = Full(writer._file)  # type: ignore[assignment]
            writer.write(DATA[0])

    with pytest.raises(OutputError, match="the disk is full: make space"):
        write_until_full()
    assert list(tmp_path.iterdir()) == []


class Full:
    """A file on a disk that is full."""

    def __init__(self, file: Any) -> None:
        self.close = file.close

    def write(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"none/new\.gguf cannot be written \(No such file"):
        write(tmp_path / "none" / "new.gguf")
