"""Writing GGUF files: values are read back unchanged, and an incomplete file never has the final name."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from localllm.errors import OutputError, UsageError
from localllm.gguf import GGUFFile, StringArray, limits
from localllm.gguf.metadata import ValueType
from localllm.gguf.writer import GGUFWriter, TensorSpec, encode_value
from localllm.quant.types import GGMLType
from tests.helpers.gguf_writer import write_gguf

TENSORS = [TensorSpec("a", (3, 32), GGMLType.Q4_0), TensorSpec("b", (5,), GGMLType.F32)]
DATA = [np.arange(54, dtype=np.uint8), np.arange(20, dtype=np.uint8)]
METADATA = {"general.architecture": encode_value("llama")}


def write(path: Path, metadata: dict[str, bytes] = METADATA) -> int:
    with GGUFWriter(path, metadata, TENSORS) as writer:
        writer.write(DATA[0][:20])
        writer.write(DATA[0][20:])
        writer.write(DATA[1])
    return writer.n_bytes


def test_written_values_are_read_back(tmp_path: Path) -> None:
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
    encoded["a.signed too"] = encode_value(np.int32(-5))
    n_bytes = write(tmp_path / "new.gguf", encoded)
    assert (tmp_path / "new.gguf").stat().st_size == n_bytes
    with GGUFFile.open(tmp_path / "new.gguf") as file:
        found = {key: list(value) if key == "a.texts" else value for key, value in file.metadata.items()}
        assert found == {**values, "a.short": 3, "a.signed": -4, "a.signed too": -5}
        assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [
            (t.name, t.shape, t.type) for t in TENSORS
        ]
        for tensor, data in zip(file.tensors.values(), DATA, strict=True):
            np.testing.assert_array_equal(tensor.data.ravel(), data)
            assert tensor.offset % 32 == 0


def test_values_are_copied_unchanged(tmp_path: Path) -> None:
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
        write(tmp_path / "copy.gguf", {key: file.metadata.encoded(key) for key in file.metadata})
        with GGUFFile.open(tmp_path / "copy.gguf") as copy:
            assert list(copy.metadata) == list(file.metadata)
            assert all(copy.metadata.encoded(key) == file.metadata.encoded(key) for key in file.metadata)
            assert all(tensor.offset % 64 == 0 for tensor in copy.tensors.values())


@pytest.mark.parametrize(
    "value",
    [
        None, {}, b"bytes", object(), 1j, 1 << 32, -1, 1e39, "\ud800",
        ["a", {}], ["a", 1], [1, "a"], [True, 1], [1.0, True], [None], [[1], [2]], [[1, 2]], (("a",),), [{}],
        [1 << 31], [-1, 1 << 63], [1 << 400, 0.5], [1e39], ["a", "\udfff"], np.zeros((2, 2)), np.zeros(()),
        np.array(["2020"], "datetime64[D]"), np.array([1j]),
    ],
    ids=lambda value: "object" if type(value) is object else repr(value),  # addresses vary
)  # fmt: skip
def test_values_that_no_file_has(value: object) -> None:
    with pytest.raises(
        UsageError, match="has no place in a GGUF file: values are bools, integers and floats of 32 bits"
    ):
        encode_value(value)


NO_FILE: dict[str, tuple[dict[str, bytes], list[TensorSpec], str]] = {
    "no name": ({}, [TensorSpec("", (1,), GGMLType.F32)], "the tensor's name has 0 bytes"),
    "long name": ({}, [TensorSpec("ü" * 32, (1,), GGMLType.F32)], "has 64 bytes but must have 1 to 63"),
    "twice": ({}, [TensorSpec("a", (1,), GGMLType.F32)] * 2, "tensor 'a': the tensor's name occurs twice"),
    "5 dimensions": ({}, [TensorSpec("a", (1,) * 5, GGMLType.F32)], "tensor 'a': 5 dimensions are more than 4"),
    "40 leading ones": ({}, [TensorSpec("a", (1,) * 40 + (8,), GGMLType.F32)], "41 dimensions are more than 4"),
    "nothing in it": ({}, [TensorSpec("a", (3, 0), GGMLType.F32)], r"a dimension of \[0, 3\] is zero"),
    "negative": ({}, [TensorSpec("a", (-3,), GGMLType.F32)], r"no file has room for the shape \[-3\]"),
    "huge": ({}, [TensorSpec("a", (1 << 64,), GGMLType.F32)], "no file has room for the shape"),
    "part of a block": ({}, [TensorSpec("a", (48,), GGMLType.Q4_0)], "rows of 48 values do not fill Q4_0's blocks"),
    "too many": (
        {}, [TensorSpec(f"{i}", (1,), GGMLType.F32) for i in range(limits.MAX_TENSORS + 1)],
        "16385 tensors are more than localllm takes",
    ),
    "no key": ({"": encode_value(1)}, [], "the key has 0 bytes"),
    "long key": ({"k" * 65_536: encode_value(1)}, [], "the key has 65536 bytes but must have 1 to 65535"),
    "too many keys": (
        {f"{i}": encode_value(1) for i in range(limits.MAX_KEYS + 1)}, [], "4097 metadata keys are more than",
    ),
    "too many texts": ({"a": encode_value([""] * (limits.MAX_STRINGS + 1))}, [], "strings are more than localllm"),
    "odd alignment": ({"general.alignment": encode_value(33)}, [], "33 is not a power of two"),
    "wide alignment": ({"general.alignment": encode_value(1 << 31)}, [], "is not a power of two from 8 to 2097152"),
    "alignment of another type": ({"general.alignment": encode_value("32")}, [], "is of type STRING, not UINT32"),
    "half a value": ({"a": encode_value(1)[:-1], "b": encode_value(1)}, [], "metadata key 1: the key takes"),
    "two values": ({"a": encode_value(True) + b"\0"}, [], "key 'a': its bytes are not those of a single value"),
    "deep": (
        {"a": bytes([9, 0, 0, 0] + [9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0] * 4 + [0] * 12)}, [], "nested more than 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_FILE)
def test_values_that_the_reader_refuses_are_not_written(tmp_path: Path, name: str) -> None:
    metadata, tensors, message = NO_FILE[name]
    with pytest.raises(OutputError, match=r"new\.gguf would not load: .*" + message):
        GGUFWriter(tmp_path / "new.gguf", metadata, tensors)
    assert list(tmp_path.iterdir()) == []


NUMBERS = st.integers(-(2**65), 2**65) | st.integers(-3, 3) | st.floats() | st.floats(width=32) | st.booleans()
VALUES = st.recursive(
    NUMBERS | st.text(max_size=5) | st.text(st.characters(), max_size=3) | st.none() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=1),
    max_leaves=6,
)
GOOD_NUMBERS = st.integers(0, 2**32 - 1) | st.floats(width=32) | st.booleans()
GOOD = GOOD_NUMBERS | st.text(max_size=5) | st.lists(st.integers(-(2**31), 2**31 - 1)) | st.lists(st.text(max_size=3))
GOOD |= st.lists(st.booleans()) | st.lists(st.floats(width=32))
NAMES = st.text(max_size=4) | st.sampled_from(["a", "b", "x" * 63, "x" * 64, "general.alignment", "ü" * 32])
SIZES = st.integers(-1, 3) | st.sampled_from([32, 256, 1 << 70])
SPECS = st.builds(TensorSpec, NAMES, st.lists(SIZES, max_size=6).map(tuple), st.sampled_from(GGMLType))
GOOD_NAMES, ROWS = st.text("abcü", min_size=1, max_size=30), st.lists(st.integers(1, 3), max_size=3).map(tuple)
GOOD_SPECS = st.builds(
    lambda *of: TensorSpec(of[0], (*of[1], 256), of[2]), GOOD_NAMES, ROWS, st.sampled_from(GGMLType)
)
METADATA_GIVEN = st.dictionaries(GOOD_NAMES, GOOD, max_size=4) | st.dictionaries(NAMES, GOOD | VALUES, max_size=3)
TENSORS_GIVEN = st.lists(GOOD_SPECS, max_size=3) | st.lists(GOOD_SPECS | SPECS, max_size=3)


def same(given: Any, found: Any) -> bool:
    """Return whether a value was read unchanged, floats as float32."""
    if isinstance(given, list):
        return isinstance(found, np.ndarray | StringArray) and [
            same(*pair) for pair in zip(given, found, strict=True)
        ] == [True] * len(given)
    if isinstance(given, float) or isinstance(found, float | np.floating):
        return bool(np.float32(given) == np.float32(found)) or (given != given and found != found)
    return type(given) is type(found.item() if isinstance(found, np.generic) else found) and bool(given == found)


@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=METADATA_GIVEN, tensors=TENSORS_GIVEN)
def test_anything_is_refused_or_loads_equal(
    tmp_path: Path, values: dict[str, object], tensors: list[TensorSpec]
) -> None:
    path = tmp_path / "new.gguf"
    try:
        encoded = {key: encode_value(value) for key, value in values.items()}
        writer = GGUFWriter(path, encoded, tensors)
        too_large = writer.n_bytes > 1 << 20
        if not too_large:
            with writer:
                for i, tensor in enumerate(tensors):
                    writer.write(np.full(tensor.n_bytes, i + 1, np.uint8))
    except (OutputError, UsageError):
        too_large = True
    if too_large:
        assert list(tmp_path.iterdir()) == []
        return
    with GGUFFile.open(path) as file:
        assert list(file.metadata) == list(values)
        assert all(same(value, file.metadata[key]) for key, value in values.items())
        assert [(t.name, t.shape, t.type) for t in file.tensors.values()] == [
            (t.name, t.shape, t.type) for t in tensors
        ]
        assert all((tensor.data == i + 1).all() for i, tensor in enumerate(file.tensors.values()))
    path.unlink()


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def stopped() -> None:
        with GGUFWriter(tmp_path / "new.gguf", METADATA, TENSORS) as writer:
            writer.write(DATA[0])
            assert not (tmp_path / "new.gguf").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(KeyboardInterrupt), GGUFWriter(path, METADATA, TENSORS):
        raise KeyboardInterrupt
    assert path.read_bytes() == b"precious"
    write(path)
    assert path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("system", ["here", "windows"])
def test_a_file_of_another_program_is_not_overwritten(
    system: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if system == "windows":
        request.getfixturevalue("windows")
    path = tmp_path / "new.gguf"
    for origin in ("", "the same"):
        with GGUFWriter(path, METADATA, TENSORS, origin=origin) as first:
            with (
                pytest.raises(OutputError, match=r"another program is writing .*new\.gguf"),
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
    with pytest.raises(OutputError, match=r"new\.gguf needs 256 bytes, but only 100 bytes are free"):
        write(tmp_path / "new.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_leaves_nothing(tmp_path: Path) -> None:
    def write_until_full() -> None:
        with GGUFWriter(tmp_path / "new.gguf", METADATA, TENSORS) as writer:
            writer._file = Full(writer._file)  # type: ignore[assignment]
            writer.write(DATA[0])

    with pytest.raises(OutputError, match="the disk is full: free space"):
        write_until_full()
    assert list(tmp_path.iterdir()) == []


class Full:
    def __init__(self, file: Any) -> None:
        self.close = file.close

    def write(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"none/new\.gguf cannot be written \(No such file"):
        write(tmp_path / "none" / "new.gguf")
