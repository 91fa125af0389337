"""Safetensors files: valid contents, and rejected damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert.safetensors import read_folder
from localllm.errors import ModelError
from tests.helpers.checkpoints import write_safetensors

ONE = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
TWO = {"b": np.arange(4, dtype=np.float16), "c": np.float32([[]])}


def test_tensors_of_all_files_are_found(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", ONE)
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", TWO)
    index = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = read_folder(tmp_path)
    for name, array in (ONE | TWO).items():
        np.testing.assert_array_equal(found[name].read(), array)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks 1 of the checkpoint's 2 files, such as 'model-00002-of-00002"):
        read_folder(tmp_path)


def test_a_tensor_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", ONE)
    weight_map = {"a": "model.safetensors", "z": "model.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match="has the tensor 'z'"):
        read_folder(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"has no .safetensors file"):
        read_folder(tmp_path)


def entry(**changes: Any) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(24)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        (1 << 63).to_bytes(8, "little") + bytes(100),
        (4).to_bytes(8, "little") + b"[[[[",
        (2).to_bytes(8, "little") + b"[]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        entry()[:-1],
        entry(dtype="F33"),
        entry(shape=[2, 4]),
        entry(shape=[-2, -3]),
        entry(shape=[2.0, 3]),
        entry(shape=[1 << 62, 1 << 62]),
        entry(data_offsets=[24, 0]),
        entry(data_offsets=[8, 32]),
        entry(data_offsets=[-24, 0]),
        entry(data_offsets=[0]),
        entry(data_offsets=None),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0",
    ],
)
def test_damaged_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model.safetensors is not a whole safetensors file"):
        read_folder(tmp_path)


def test_a_file_that_was_shortened_is_noticed(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", ONE)
    tensor = read_folder(tmp_path)["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match="was shortened"):
        tensor.read()
