"""The GGUF loader compared with the gguf package, which writes the files, and with a simple parser of real files."""

from __future__ import annotations

import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import ClosedError, GGUFError
from localllm.gguf import GGUFFile, StringArray, strings as strings_module
from localllm.quant.types import BLOCK_SIZES, GGMLType
from tests.helpers.data import shared_data
from tests.helpers.gguf_writer import (
    ARCHITECTURE_KEY,
    RawGGUF,
    RawTensor,
    Typed,
    array,
    finish,
    key,
    string,
    u32,
    u64,
    write_gguf,
)

KIND = gguf.GGUFValueType

SCALARS: dict[str, Typed] = {
    "s.u8": Typed(KIND.UINT8, 255),
    "s.i8": Typed(KIND.INT8, -128),
    "s.u16": Typed(KIND.UINT16, 65_535),
    "s.i16": Typed(KIND.INT16, -32_768),
    "s.u32": Typed(KIND.UINT32, 2**32 - 1),
    "s.i32": Typed(KIND.INT32, -(2**31)),
    "s.u64": Typed(KIND.UINT64, 2**64 - 1),
    "s.i64": Typed(KIND.INT64, -(2**63)),
    "s.f32": Typed(KIND.FLOAT32, 1.5e-5),
    "s.f64": Typed(KIND.FLOAT64, 1e300),
    "s.true": Typed(KIND.BOOL, True),
    "s.false": Typed(KIND.BOOL, False),
    "s.text": Typed(KIND.STRING, "naïve 文字 🙂\0\n"),
    "s.empty": Typed(KIND.STRING, ""),
}

ARRAYS: dict[str, Typed] = {
    "a.u8": Typed(KIND.ARRAY, [0, 1, 255], KIND.UINT8),
    "a.i8": Typed(KIND.ARRAY, [-128, 127], KIND.INT8),
    "a.u16": Typed(KIND.ARRAY, [0, 65_535], KIND.UINT16),
    "a.i16": Typed(KIND.ARRAY, [-32_768, 32_767], KIND.INT16),
    "a.u32": Typed(KIND.ARRAY, [0, 2**32 - 1], KIND.UINT32),
    "a.i32": Typed(KIND.ARRAY, [-(2**31), 7], KIND.INT32),
    "a.u64": Typed(KIND.ARRAY, [2**64 - 1], KIND.UINT64),
    "a.i64": Typed(KIND.ARRAY, [-(2**63), 1], KIND.INT64),
    "a.f32": Typed(KIND.ARRAY, [0.5, -1000.0, 3.25], KIND.FLOAT32),
    "a.f64": Typed(KIND.ARRAY, [1e300, -0.1], KIND.FLOAT64),
    "a.bool": Typed(KIND.ARRAY, [True, False, True], KIND.BOOL),
    "a.text": Typed(KIND.ARRAY, ["", "▁the", "a\0b", "x" * 256, "🙂"], KIND.STRING),
}


def tensor_values() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    tensors: dict[str, Any] = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal(7).astype(np.float16),
        "f64": rng.standard_normal((2, 1, 3)),
        "i8": rng.integers(-128, 128, (2, 3, 4, 5)).astype(np.int8),
        "i32": rng.integers(-9, 9, 11).astype(np.int32),
    }
    for name in ("BF16", "Q4_0", "Q8_0", "Q2_K", "Q6_K", "IQ4_XS", "MXFP4"):
        block = BLOCK_SIZES[GGMLType[name]]
        shape = (2, 3, 2 * block.length)
        data = rng.bytes(2 * 3 * block.row_bytes(shape[-1]))
        tensors[name] = (GGMLType[name], shape, data)
    return tensors


def plain(value: Any) -> Any:
    """Convert a metadata value to lists and Python scalars."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, StringArray | tuple):
        return [plain(element) for element in value]
    return value


def assert_agrees_with_gguf_package(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
        assert list(file.metadata) == list(fields)
        for name, reader_field in fields.items():
            assert plain(file.metadata[name]) == reader_field.contents(), name
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for expected in reader.tensors:
            tensor = file.tensors[expected.name]
            assert tensor.shape == tuple(reversed(expected.shape.tolist()))
            assert tensor.type.name == expected.tensor_type.name
            assert tensor.offset == expected.data_offset
            assert tensor.n_bytes == expected.n_bytes == tensor.data.nbytes
            assert tensor.n_values == expected.n_elements
            assert tensor.data.dtype == np.uint8
            assert tensor.data.shape[:-1] == tensor.shape[:-1]
            assert tensor.data.tobytes() == expected.data.tobytes()


def test_agrees_with_the_gguf_package_on_every_metadata_type(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", **SCALARS, **ARRAYS}
    path = write_gguf(tmp_path / "m.gguf", metadata)
    assert_agrees_with_gguf_package(path)
    with GGUFFile.open(path) as file:
        assert file.architecture == "llama"
        assert len(file.tensors) == 0
        for name, typed in SCALARS.items():
            value = file.metadata[name]
            expected = np.float32(typed.value) if typed.type is KIND.FLOAT32 else typed.value
            assert value == expected
            assert type(value) is type(typed.value)
        for name, typed in ARRAYS.items():
            assert plain(file.metadata[name]) == typed.value


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_agrees_with_the_gguf_package_on_tensors(tmp_path: Path, alignment: int) -> None:
    metadata = {"general.architecture": "llama", "general.alignment": alignment}
    assert_agrees_with_gguf_package(write_gguf(tmp_path / "t.gguf", metadata, tensor_values()))


@pytest.mark.parametrize(
    "name", ["models/stories260K/stories260K.gguf", "models/story656K/TinyStories-656K-Q8_0.gguf"]
)
def test_agrees_with_the_gguf_package_on_real_models(name: str) -> None:
    assert_agrees_with_gguf_package(shared_data(name))


def walk(file: bytes, at: int, n: int) -> list[bytes]:
    strings = []
    for _ in range(n):
        (length,) = struct.unpack_from("<Q", file, at)
        strings.append(file[at + 8 : at + 8 + length])
        at += 8 + length
    return strings


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "gpt-2", "starcoder", "llama-spm", "phi-3"])
def test_strings_of_real_vocabularies(name: str) -> None:
    path = shared_data(f"vocab/ggml-vocab-{name}.gguf")
    content = path.read_bytes()
    with GGUFFile.open(path) as file:
        arrays = {k: v for k, v in file.metadata.items() if isinstance(v, StringArray)}
        assert "tokenizer.ggml.tokens" in arrays
        for label, strings in arrays.items():
            value = content.index(label.encode()) + len(label)
            value_type, element_type, n = struct.unpack_from("<IIQ", content, value)
            assert (value_type, element_type, n) == (9, 8, len(strings))
            raw = walk(content, value + 16, n)
            assert strings.raw_all() == raw
            assert strings[n // 2] == raw[n // 2].decode()
        assert len(file.metadata["tokenizer.ggml.token_type"]) == len(arrays["tokenizer.ggml.tokens"])


def strings_file(path: Path, strings: list[bytes]) -> Path:
    # The next key looks like two strings, to mislead the indexer past the array's end.
    after = [key("n", 4, u32(0)), key("after", 9, array(8, [string("x"), string("yz")]))]
    keys = [ARCHITECTURE_KEY, key("strings", 9, array(8, [string(text) for text in strings])), *after]
    return RawGGUF(keys=keys).write(path)


@pytest.mark.parametrize("chunk", [16, 64, 1 << 17])
def test_strings_of_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """The indexer guesses lengths first; strings that look like lengths must not mislead it."""
    monkeypatch.setattr(strings_module, "_CHUNK", chunk)
    path = tmp_path / "s.gguf"
    piece = st.sampled_from([b"", b"\0", bytes(7), bytes(8), bytes(9), u64(1), u64(3) + b"abc", b"ab", b"\x01"])
    length = st.sampled_from([1, 255, 256, 257, 65_535, 65_536])
    text = st.one_of(piece, st.binary(max_size=24), length.map(lambda n: b"t" * n), st.lists(piece).map(b"".join))

    @settings(max_examples=60, database=None, derandomize=True)
    @given(st.lists(text, max_size=40))
    def check(strings: list[bytes]) -> None:
        with GGUFFile.open(strings_file(path, strings)) as file:
            read = file.metadata["strings"]
            assert isinstance(read, StringArray)
            assert read.raw_all() == strings
            assert [read.raw(i) for i in range(len(read))] == strings
            assert plain(file.metadata["after"]) == ["x", "yz"]

    check()


def test_strings_over_many_chunks(tmp_path: Path) -> None:
    rng = random.Random(2)
    strings = [bytes(rng.choices(range(128), k=rng.randrange(12))) for _ in range(40_000)]
    assert sum(map(len, strings)) + 8 * len(strings) > 3 * strings_module._CHUNK
    with GGUFFile.open(strings_file(tmp_path / "s.gguf", strings)) as file:
        read = file.metadata["strings"]
        assert isinstance(read, StringArray)
        assert read.raw_all() == strings
        assert list(read) == [text.decode() for text in strings]


def test_string_array_is_a_sequence(tmp_path: Path) -> None:
    with GGUFFile.open(write_gguf(tmp_path / "s.gguf", {"names": ["a", "b", "c", "d"]})) as file:
        names = file.metadata["names"]
    assert isinstance(names, StringArray)
    assert (len(names), names[0], names[-1], names[1:3], names[::-2]) == (4, "a", "d", ["b", "c"], ["d", "b"])
    assert "c" in names
    assert names.index("d") == 3
    assert names.raw(-2) == b"c"
    for get in (names.__getitem__, names.raw):
        for i in (4, -5):
            with pytest.raises(IndexError):
                get(i)


def test_invalid_utf8_in_values_is_met_only_when_decoded(tmp_path: Path) -> None:
    tokens = array(8, [string("fine"), string(b"\xff\xfe"), string("also")])
    keys = [ARCHITECTURE_KEY, key("text", 8, string(b"ab\x80c")), key("tokens", 9, tokens)]
    path = RawGGUF(keys=keys).write(tmp_path / "u.gguf")
    content = path.read_bytes()
    with GGUFFile.open(path) as file:
        assert "text" in file.metadata
        assert file.metadata.raw("text") == b"ab\x80c"
        assert len(file.fingerprint()) == 32
        with pytest.raises(GGUFError, match=rf"u\.gguf: byte {content.index(0x80)}, key 'text': .*UTF-8"):
            file.metadata["text"]
        read = file.metadata["tokens"]
        assert isinstance(read, StringArray)
        assert (read[0], read[2], read.raw(1)) == ("fine", "also", b"\xff\xfe")
        where = rf"byte {content.index(0xFF)}, key 'tokens': string 1 is not valid UTF-8"
        with pytest.raises(GGUFError, match=where):
            read[1]
        with pytest.raises(GGUFError, match=where):
            list(read)
        with pytest.raises(TypeError):
            file.metadata.raw("tokens")
        with pytest.raises(KeyError):
            file.metadata.raw("nothing")


def test_nested_arrays(tmp_path: Path) -> None:
    value = [[1, 2, 3], [4]], [["a", "é"], []], [[]]
    ints, texts, none = value
    nested = [
        array(9, [array(4, [u32(i) for i in inner]) for inner in ints]),
        array(9, [array(8, [string(t) for t in inner]) for inner in texts]),
        array(9, [array(4, []) for _ in none]),
    ]
    path = RawGGUF(keys=[ARCHITECTURE_KEY, key("nested", 9, array(9, nested))]).write(tmp_path / "n.gguf")
    with GGUFFile.open(path) as file:
        assert plain(file.metadata["nested"]) == [list(v) for v in value]
    written = write_gguf(tmp_path / "w.gguf", {"nested": Typed(KIND.ARRAY, [[1, 2], [3]], KIND.ARRAY)})
    with GGUFFile.open(written) as file:
        assert plain(file.metadata["nested"]) == [[1, 2], [3]]


def test_invalid_utf8_in_a_nested_array_names_the_inner_array(tmp_path: Path) -> None:
    nested = array(9, [array(8, [string("a")]), array(8, [string("b"), string(b"\xc3")])])
    path = RawGGUF(keys=[key("k", 9, nested)]).write(tmp_path / "n.gguf")
    with GGUFFile.open(path) as file:
        value = file.metadata["k"]
        assert isinstance(value, tuple)
        with pytest.raises(GGUFError, match=r"key 'k\[1\]': string 1"):
            list(value[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", range(4))
def test_number_arrays_are_views_where_aligned_and_never_writable(tmp_path: Path, shift: int) -> None:
    numbers = np.arange(5, dtype="<f4") / 3
    name = "k" * (20 + shift)
    keys = [key(name, 9, array(6, [numbers.tobytes()], length=5))]
    path = RawGGUF(keys=keys).write(tmp_path / "a.gguf")
    aligned = path.read_bytes().index(numbers.tobytes()) % 4 == 0
    with GGUFFile.open(path) as file:
        read = file.metadata[name]
    assert isinstance(read, np.ndarray)
    np.testing.assert_array_equal(read, numbers)
    assert read.flags.aligned
    assert read.flags.owndata is not aligned
    assert read.dtype == np.float32
    assert not read.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        read[0] = 1


def test_tensor_data_is_a_read_only_view(tmp_path: Path) -> None:
    with GGUFFile.open(write_gguf(tmp_path / "t.gguf", {}, tensor_values())) as file:
        for tensor in file.tensors.values():
            assert not tensor.data.flags.owndata
            assert not tensor.data.flags.writeable
            with pytest.raises(ValueError, match="WRITEABLE"):
                tensor.data.flags.writeable = True
        with pytest.raises(TypeError):
            file.tensors["new"] = tensor  # type: ignore[index]
        with pytest.raises(AttributeError):
            tensor.name = "other"  # type: ignore[misc]


def test_version_2_scalar_tensors_any_order_and_no_final_padding(tmp_path: Path) -> None:
    tensors = [
        RawTensor("second", [3], b"bbbbccccdddd", offset=32),
        RawTensor("first", [], b"aaaa", offset=0),
    ]
    raw = RawGGUF(version=2, tensors=tensors)
    content = bytearray(bytes(raw))
    # Offsets out of order: the data follows the offsets.
    data = len(content) - 64
    content[data:] = b"aaaa".ljust(32, b"\0") + b"bbbbccccdddd"
    path = tmp_path / "v2.gguf"
    path.write_bytes(content)
    with GGUFFile.open(path) as file:
        assert file.version == 2
        assert file.size == len(content)
        first, second = file.tensors["first"], file.tensors["second"]
        assert (first.shape, first.n_values, first.data.tobytes()) == ((), 1, b"aaaa")
        assert (second.shape, second.n_values, second.data.tobytes()) == ((3,), 3, b"bbbbccccdddd")


def test_architecture_is_required_only_when_used(tmp_path: Path) -> None:
    for keys in ([], [key("general.architecture", 4, u32(1))], [key("general.architecture", 8, string(""))]):
        with GGUFFile.open(RawGGUF(keys=keys).write(tmp_path / "a.gguf")) as file:
            assert len(file.metadata) == len(keys)
            with pytest.raises(GGUFError, match=r"a\.gguf.*general\.architecture"):
                _ = file.architecture


def test_path_may_be_text_or_pathlike(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "p.gguf", {"general.architecture": "llama"})
    for given_path in (path, str(path)):
        with GGUFFile.open(given_path) as file:
            assert file.path == path
            assert file.paths == (path,)


# ---- closing ------------------------------------------------------------------------------------------


def test_closed_file_refuses_and_views_stay_valid(tmp_path: Path) -> None:
    values = {"t": np.arange(1000, dtype=np.float32)}
    path = write_gguf(tmp_path / "c.gguf", {"names": ["a", "b"], "numbers": np.arange(9)}, values)
    with GGUFFile.open(path) as file:
        tensor, metadata = file.tensors["t"], file.metadata
        names, numbers = metadata["names"], metadata["numbers"]
    file.close()
    if sys.platform != "win32":  # Windows keeps a mapped file
        path.unlink()
    np.testing.assert_array_equal(tensor.data.view(np.float32), values["t"])
    tensor.drop_pages()
    np.testing.assert_array_equal(tensor.data.view(np.float32), values["t"])
    assert plain(names) == ["a", "b"]
    assert plain(numbers) == list(range(9))
    for use in (lambda: file.metadata, lambda: file.tensors, lambda: file.architecture, file.__enter__):
        with pytest.raises(ClosedError, match=r"c\.gguf"):
            use()


needs_proc = pytest.mark.skipif(
    not (sys.platform == "linux" and os.path.exists("/proc/self/smaps")), reason="needs /proc/self/smaps"
)


def resident_bytes(path: Path) -> int | None:
    """Return the bytes of the file's map that are in this process's memory; None if it is not mapped."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        if line.endswith(str(path)):
            rss = next(entry for entry in lines[i:] if entry.startswith("Rss:"))
            return int(rss.split()[1]) * 1024
    return None


@needs_proc
def test_the_map_goes_with_the_last_view(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"t": np.ones(8)})
    file = GGUFFile.open(path)
    data = file.tensors["t"].data[2:]
    file.close()
    assert resident_bytes(path) is not None
    del data
    assert resident_bytes(path) is None


@needs_proc
def test_drop_pages_takes_the_tensor_out_of_memory(tmp_path: Path) -> None:
    ones = np.ones((512, 1024), np.float32)
    path = write_gguf(tmp_path / "d.gguf", {}, {"before": ones, "t": 2 * ones, "after": ones})
    with GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            assert tensor.data.max() > 0
        before = resident_bytes(path)
        file.tensors["t"].drop_pages()
        after = resident_bytes(path)
        assert before is not None
        assert after is not None
        # The kernel may keep data that shares a page, or a huge page, with its neighbours.
        assert before - after >= ones.nbytes // 2
        assert file.tensors["t"].data.view(np.float32).sum() == 2 * ones.size


# ---- split models -------------------------------------------------------------------------------------


def write_split(folder: Path, name: str = "model") -> tuple[list[Path], dict[str, np.ndarray]]:
    """Write a model of five tensors in three files with the gguf package."""
    tensors = {f"t{i}": np.full((2, 3 + i), i, np.float32) for i in range(5)}
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama", split_max_tensors=2)
    writer.add_string("general.name", "in parts")
    for tensor_name, tensor in tensors.items():
        writer.add_tensor(tensor_name, tensor)
    finish(writer)
    return [folder / f"{name}-{i:05d}-of-00003.gguf" for i in (1, 2, 3)], tensors


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_of_a_split_model_opens_the_whole(tmp_path: Path, opened: int) -> None:
    paths, tensors = write_split(tmp_path)
    with GGUFFile.open(paths[opened]) as file:
        assert file.path == paths[0]
        assert file.paths == tuple(paths)
        assert file.size == sum(path.stat().st_size for path in paths)
        assert file.metadata["general.name"] == "in parts"
        assert list(file.tensors) == list(tensors)
        for name, tensor in tensors.items():
            assert file.tensors[name].shape == tensor.shape
            assert file.tensors[name].data.tobytes() == tensor.tobytes()


def test_split_model_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, tensors = write_split(tmp_path)
    monkeypatch.chdir(tmp_path)
    with GGUFFile.open(paths[1].name) as file:
        assert list(file.tensors) == list(tensors)


def test_merged_split_model(tmp_path: Path) -> None:
    """Merging keeps the split keys, with count 0."""
    values = {"split.no": Typed(KIND.UINT16, 0), "split.count": Typed(KIND.UINT16, 0)}
    with GGUFFile.open(write_gguf(tmp_path / "m.gguf", values, {"t": np.ones(3)})) as file:
        assert list(file.tensors) == ["t"]


def test_split_model_with_a_part_missing(tmp_path: Path) -> None:
    paths, _ = write_split(tmp_path)
    paths[1].unlink()
    with pytest.raises(GGUFError, match=r"1 of the model's 3 files .*model-00002-of-00003\.gguf"):
        GGUFFile.open(paths[0])


def test_split_model_with_a_part_under_another_name(tmp_path: Path) -> None:
    paths, _ = write_split(tmp_path)
    renamed = paths[0].rename(tmp_path / "first.gguf")
    with pytest.raises(GGUFError, match=r"first\.gguf.*-of-00003\.gguf.*original names"):
        GGUFFile.open(renamed)


def test_split_model_with_parts_swapped(tmp_path: Path) -> None:
    paths, _ = write_split(tmp_path)
    paths[1].rename(tmp_path / "aside")
    paths[2].rename(paths[1])
    (tmp_path / "aside").rename(paths[2])
    with pytest.raises(GGUFError, match=r"model-00002-of-00003\.gguf.*are 2 and 3, not 1 and 3"):
        GGUFFile.open(paths[0])


def test_split_model_with_a_part_of_a_whole_model(tmp_path: Path) -> None:
    paths, _ = write_split(tmp_path)
    write_gguf(paths[2], {"general.architecture": "llama"}, {"t4": np.ones(3)})
    with pytest.raises(GGUFError, match=r"model-00003-of-00003\.gguf.*'split\.no' is missing"):
        GGUFFile.open(paths[0])


def split_keys(number: int, count: int, n_tensors: int) -> dict[str, Typed]:
    return {
        "split.no": Typed(KIND.UINT16, number),
        "split.count": Typed(KIND.UINT16, count),
        "split.tensors.count": Typed(KIND.INT32, n_tensors),
    }


@pytest.mark.parametrize(
    ("second", "total", "message"),
    [("a", 2, r"tensor 'a' is also in another part"), ("b", 3, r"2 tensors together, but .* is 3")],
)
def test_split_model_whose_tensors_disagree(tmp_path: Path, second: str, total: int, message: str) -> None:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(paths[0], split_keys(0, 2, total), {"a": np.ones(3)})
    write_gguf(paths[1], split_keys(1, 2, total), {second: np.ones(3)})
    with pytest.raises(GGUFError, match=message):
        GGUFFile.open(paths[0])


def test_split_model_with_a_part_of_another_count(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(paths[0], split_keys(0, 2, 2), {"a": np.ones(3)})
    write_gguf(paths[1], split_keys(1, 3, 2), {"b": np.ones(3)})
    with pytest.raises(GGUFError, match=r"m-00002-of-00002\.gguf.*are 1 and 3, not 1 and 2"):
        GGUFFile.open(paths[0])
