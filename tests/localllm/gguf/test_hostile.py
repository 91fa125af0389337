"""Corrupt GGUF files: every defect raises a GGUFError that names the location, and nothing else happens."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from localllm.errors import GGUFError
from localllm.gguf import GGUFFile, StringArray, limits
from localllm.quant.types import GGMLType
from tests.helpers.data import shared_data
from tests.helpers.gguf_writer import ARCHITECTURE_KEY, RawGGUF, RawTensor, array, key, string, u32, u64

U8, BOOL, STRING, ARRAY, F32 = 0, 7, 8, 9, 6

# Memory of Python's objects, independent of the file size.
SLACK = 2 << 20


def numbers(name: str, offset: int | None = None) -> RawTensor:
    """A tensor of 16 f32, two lines of alignment."""
    return RawTensor(name, [16], bytes(64), offset=offset)


def with_key(value_type: int, value: bytes) -> RawGGUF:
    return RawGGUF(keys=[ARCHITECTURE_KEY, key("bad", value_type, value)])


def with_tensor(tensor: RawTensor) -> RawGGUF:
    return RawGGUF(tensors=[numbers("good"), tensor])


def nested(depth: int) -> bytes:
    return array(4, [u32(1)]) if depth == 1 else array(ARRAY, [nested(depth - 1)])


ALIGNMENT = "general.alignment"

# name: file, required text of the error after the file's name
DEFECTS: dict[str, tuple[RawGGUF | bytes, str]] = {
    # header
    "one byte": (b"G", "byte 0, header: not a GGUF file"),
    "magic only": (b"GGUF", "byte 4, header: the version takes 4 bytes but 0 are left"),
    "other magic": (RawGGUF(magic=b"GGUG"), "byte 0, header: not a GGUF file"),
    "older format": (RawGGUF(magic=b"tjgg"), "older than GGUF"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive or PyTorch checkpoint"),
    "safetensors": (u64(200) + b'{"weight":{}}', "safetensors"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "web page": (b"\n<!DOCTYPE html><html>", "a web page"),
    "version 0": (RawGGUF(version=0), "byte 4, header: GGUF version 0"),
    "version 1": (RawGGUF(version=1), "version 1 is not one that localllm reads"),
    "version 4": (RawGGUF(version=4), "version 4 is not one that localllm reads .*update localllm"),
    "big-endian": (RawGGUF(version=0x03000000), "byte 4, header: the file is big-endian"),
    "2^64-1 tensors": (RawGGUF(n_tensors=2**64 - 1), "byte 8, header: 18446744073709551615 tensors cannot"),
    "2^40 keys": (RawGGUF(n_keys=2**40), "byte 16, header: 1099511627776 metadata keys cannot"),
    "too many keys": (RawGGUF(n_keys=4_097, tail=bytes(14 * 4_097)), "4097 metadata keys are more than localllm"),
    "one key too many": (RawGGUF(n_keys=2, tail=bytes(20)), "metadata key 1: the key has 0 bytes"),
    "one tensor too many": (RawGGUF(n_tensors=1), "cannot be in the|length of the tensor's name"),
    # keys
    "empty key": (RawGGUF(keys=[key("", U8, b"\0\0")]), "metadata key 0: the key has 0 bytes"),
    "long key": (RawGGUF(keys=[key("k" * 65_536, U8, b"\0")]), "the key has 65536 bytes but must have 1"),
    "key past the end": (RawGGUF(keys=[string("key", length=2**63) + u32(U8) + b"\0"]), "takes 9223372036854775808"),
    "key not UTF-8": (RawGGUF(keys=[key(b"k\xff", U8, b"\0")]), "byte 33, metadata key 0: .*not valid UTF-8"),
    "duplicate key": (RawGGUF(keys=[ARCHITECTURE_KEY] * 2), "key 'general.architecture': the key occurs twice"),
    "control characters in key": (
        RawGGUF(keys=[key("\x1b[2J", U8, b"")]),
        r"key '\\x1b\[2J': the value takes 1 bytes but 0 are left",
    ),
    # values
    "value type 13": (with_key(13, bytes(8)), r"key 'bad': value type 13 is not one of GGUF's \(0 to 12\)"),
    "value type 2^32-1": (with_key(2**32 - 1, bytes(8)), "key 'bad': value type 4294967295"),
    "bool 2": (with_key(BOOL, b"\2"), "key 'bad': the bool is 2, neither 0 nor 1"),
    "text past the end": (with_key(STRING, string("text", 5)), "the text takes 5 bytes but 4 are left"),
    "text of 2^64-1 bytes": (with_key(STRING, string("", 2**64 - 1)), "takes 18446744073709551615 bytes"),
    "array of type 13": (with_key(ARRAY, array(13, [b"\0"])), "key 'bad': value type 13"),
    "array of 2^40 bytes": (with_key(ARRAY, array(U8, [], 2**40)), "an array of 1099511627776 values of type UINT8"),
    "array whose size wraps to 0": (with_key(ARRAY, array(F32, [], 2**62)), "takes 18446744073709551616 bytes"),
    "array of 2^61 strings": (with_key(ARRAY, array(STRING, [], 2**61)), "2305843009213693952 strings cannot"),
    "strings without room for their lengths": (
        with_key(ARRAY, array(STRING, [bytes(40)], 10)),
        "key 'bad': 10 strings cannot be in the 40 bytes that are left",
    ),
    "more strings than any vocabulary": (
        with_key(ARRAY, array(STRING, [bytes(8 * 2_097_153)], 2_097_153)),
        "2097153 strings are more than localllm takes",
    ),
    "string past the end": (
        with_key(ARRAY, array(STRING, [string("ab"), string("cd", 2**63)])),
        "key 'bad': string 1 takes 9223372036854775808 bytes but 2 are left",
    ),
    "string whose length wraps around": (
        with_key(ARRAY, array(STRING, [string("ab"), string("cd", 2**64 - 10), string("ef")])),
        "key 'bad': string 1 takes 18446744073709551606 bytes",
    ),
    "one string too many": (with_key(ARRAY, array(STRING, [string("a" * 20)] * 3, 4)), "string 3 takes 8 bytes but"),
    "bool array": (with_key(ARRAY, array(BOOL, [b"\0\1\3\1"], 4)), "key 'bad': bool 2 of the array is 3"),
    "nested too deep": (with_key(ARRAY, nested(5)), "key 'bad': arrays are nested more than 4 deep"),
    "2^60 nested arrays": (with_key(ARRAY, array(ARRAY, [], 2**60)), "1152921504606846976 nested arrays cannot"),
    "too many nested arrays": (with_key(ARRAY, array(ARRAY, [array(U8, [])] * 4_097)), "4097 nested arrays are more"),
    "nested arrays of nothing": (
        with_key(ARRAY, array(ARRAY, [array(ARRAY, [array(U8, [])] * 3)] * 1_500)),
        r"key 'bad': 3 nested arrays are more than localllm takes \([0-2]\)",
    ),
    # alignment
    **{
        f"alignment {value}": (RawGGUF(keys=[key(ALIGNMENT, 4, u32(value))]), f"alignment {value} is not a power")
        for value in (0, 1, 4, 24, 33, 2**22, 2**32 - 1)
    },
    "alignment of another type": (RawGGUF(keys=[key(ALIGNMENT, 10, u64(32))]), "the alignment is of type UINT64"),
    "alignment past the end": (
        RawGGUF(keys=[key(ALIGNMENT, 4, u32(2**21))], tensors=[numbers("t")]),
        "tensor 't': its 64 bytes at offset 0 end past the data section of 0 bytes",
    ),
    # tensor table
    "empty tensor name": (with_tensor(numbers("")), "tensor 1: the tensor's name has 0 bytes"),
    "long tensor name": (with_tensor(numbers("n" * 64)), "tensor 1: .*has 64 bytes but must have 1 to 63"),
    "tensor name not UTF-8": (with_tensor(RawTensor(b"a\xc0", [16], bytes(64))), "name is not valid UTF-8"),
    "duplicate tensor": (with_tensor(numbers("good")), "tensor 'good': the tensor's name occurs twice"),
    "5 dimensions": (with_tensor(RawTensor("bad", [1] * 5, bytes(4))), "tensor 'bad': 5 dimensions are more than 4"),
    "2^32-1 dimensions": (with_tensor(RawTensor("bad", [1], bytes(4), n_dims=2**32 - 1)), "4294967295 dimensions"),
    "zero dimension": (with_tensor(RawTensor("bad", [4, 0, 2], b"")), r"a dimension of \[4, 0, 2\] is zero"),
    "size wraps to 0": (with_tensor(RawTensor("bad", [2**32, 2**32], bytes(4))), "its 73786976294838206464 bytes at"),
    "negative dimension": (with_tensor(RawTensor("bad", [2**64 - 1], bytes(4))), "tensor 'bad': .* end past"),
    "columns not whole blocks": (
        with_tensor(RawTensor("bad", [48], bytes(34), type=GGMLType.Q8_0)),
        "tensor 'bad': rows of 48 values do not fill Q8_0's blocks of 32",
    ),
    "scalar of a block type": (
        with_tensor(RawTensor("bad", [], bytes(34), type=GGMLType.Q8_0)),
        "tensor 'bad': rows of 1 values do not fill",
    ),
    "unknown tensor type": (with_tensor(RawTensor("bad", [32], b"", type=250)), "tensor 'bad': tensor type 250 is"),
    **{
        f"removed tensor type {type}": (
            with_tensor(RawTensor("bad", [32], b"", type=type)),
            rf"tensor 'bad': tensor type {type} \({name}\) was removed.*quantisation",
        )
        for type, name in {
            4: "Q4_2",
            5: "Q4_3",
            31: "Q4_0_4_4",
            32: "Q4_0_4_8",
            33: "Q4_0_8_8",
            36: "IQ4_NL_4_4",
            37: "IQ4_NL_4_8",
            38: "IQ4_NL_8_8",
        }.items()
    },
    "misaligned offset": (with_tensor(numbers("bad", 60)), "tensor 'bad': the offset 60 is not a multiple .* 32"),
    "offset past the end": (with_tensor(numbers("bad", 2**63)), "tensor 'bad': its 64 bytes at offset 92233720"),
    "offset that wraps around": (with_tensor(numbers("bad", 2**64 - 32)), "offset 18446744073709551584 end past"),
    "overlapping tensors": (with_tensor(numbers("bad", 32)), "tensor 'bad': its data at offset 32 overlaps"),
    "the same data twice": (with_tensor(numbers("bad", 0)), "tensor 'bad': its data at offset 0 overlaps"),
    "hole between tensors": (
        RawGGUF(tensors=[numbers("a"), RawTensor("b", [16], bytes(96), offset=96)]),
        "tensor 'b': its data at offset 96 leaves a hole after the data before it, which ends at 64",
    ),
    # end
    "bytes after the tensors": (RawGGUF(tensors=[numbers("a")], tail=b"x"), "1 bytes follow that belong to no"),
    "bytes after a file without tensors": (RawGGUF(tail=bytes(64)), "end of the data section: .* bytes follow"),
}


@contextmanager
def bounded_allocation(n_bytes: int) -> Iterator[None]:
    """Fail if Python and numpy together allocate more than the file's size and a fixed amount."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= n_bytes + SLACK


@pytest.mark.parametrize("name", DEFECTS)
def test_defect(tmp_path: Path, name: str) -> None:
    raw, message = DEFECTS[name]
    content = bytes(raw)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with bounded_allocation(len(content)), pytest.raises(GGUFError, match=r"model\.gguf: byte \d+, .*") as caught:
        GGUFFile.open(path)
    assert caught.match(message)
    text = str(caught.value)
    assert len(text) - len(str(path)) < 300
    assert text.isprintable()


def test_the_files_without_defects_are_valid(tmp_path: Path) -> None:
    for raw in (RawGGUF(), with_key(BOOL, b"\1"), with_key(ARRAY, nested(4)), with_tensor(numbers("other"))):
        GGUFFile.open(raw.write(tmp_path / "model.gguf")).close()


def test_strings_are_counted_over_all_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key(name, ARRAY, array(STRING, [string("x")] * 3)) for name in ("a", "b")]
    path = RawGGUF(keys=keys).write(tmp_path / "model.gguf")
    GGUFFile.open(path).close()
    monkeypatch.setattr(limits, "MAX_STRINGS", 5)
    with pytest.raises(GGUFError, match=r"key 'b': 3 strings are more than localllm takes \(2\)"):
        GGUFFile.open(path)


# ---- paths --------------------------------------------------------------------------------------------


def refuses(path: Path, message: str) -> None:
    with pytest.raises(GGUFError, match=message):
        GGUFFile.open(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "e.gguf").touch()
    refuses(tmp_path / "none.gguf", r"none\.gguf does not exist")
    refuses(tmp_path / "none" / "none.gguf", r"none\.gguf does not exist")
    refuses(tmp_path, "is a directory")
    refuses(tmp_path / "e.gguf", r"e\.gguf is empty")
    refuses(tmp_path / "e.gguf" / "m.gguf", r"m\.gguf cannot be opened \(Not a directory\)")
    if hasattr(os, "mkfifo"):  # opening a pipe waits for a writer
        os.mkfifo(tmp_path / "pipe.gguf")
        refuses(tmp_path / "pipe.gguf", r"pipe\.gguf is not a regular file")
    if Path("/dev/zero").exists():
        refuses(Path("/dev/zero"), "/dev/zero is not a regular file")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RawGGUF().write(tmp_path / "secret.gguf")

    # Tests may run as root, for whom permissions do not apply.
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    refuses(path, r"secret\.gguf may not be read by this user")


@pytest.mark.skipif(os.name != "posix", reason="names as POSIX has them")
def test_names_that_the_system_refuses(tmp_path: Path) -> None:
    refuses(tmp_path / ("n" * 300), "cannot be opened .*too long")
    refuses(Path("a\0b"), "cannot be opened .its name has a null character")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refuses(tmp_path / "loop", "cannot be opened .*symbolic links")


@pytest.mark.skipif(os.name != "posix", reason="names as POSIX has them")
def test_name_that_is_not_utf8_can_still_be_printed(tmp_path: Path) -> None:
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    str(caught.value).encode()


# ---- cutting and flipping -----------------------------------------------------------------------------


def rich_gguf() -> bytes:
    """Write a small file with every type of value and several tensors."""
    rng = np.random.default_rng(3)
    scalars = [(0, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (10, 8), (11, 8), (12, 8)]
    keys = [ARCHITECTURE_KEY, key("flag", BOOL, b"\1"), key(ALIGNMENT, 4, u32(32))]
    keys += [key(f"s{kind}", kind, rng.bytes(size)) for kind, size in scalars]
    keys += [key(f"a{kind}", ARRAY, array(kind, [rng.bytes(size) for _ in range(3)])) for kind, size in scalars]
    keys += [
        key("flags", ARRAY, array(BOOL, [b"\0", b"\1"])),
        key("tokens", ARRAY, array(STRING, [string(f"token {i}") for i in range(8)] + [string("")])),
        key("nested", ARRAY, array(ARRAY, [array(STRING, [string("in")]), array(4, [u32(5)])])),
        key("template", STRING, string("{{ messages }}")),
    ]
    tensors = [
        RawTensor("token_embd.weight", [8, 9], rng.bytes(8 * 9 * 4)),
        RawTensor("blk.0.attn_q.weight", [64, 3], rng.bytes(3 * 2 * 34), type=GGMLType.Q8_0),
        RawTensor("blk.0.attn_norm.weight", [10], rng.bytes(20), type=GGMLType.F16),
    ]
    return bytes(RawGGUF(keys=keys, tensors=tensors))


def open_and_read_all(path: Path) -> bool:
    """Open a file and read everything; return whether it opened.  Only GGUFError may be raised."""
    try:
        file = GGUFFile.open(path)
    except GGUFError as error:
        if str(path) not in str(error):
            raise
        return False
    with file:
        for name in file.metadata:
            try:
                value = file.metadata[name]
                if isinstance(value, StringArray):
                    list(value)
            except GGUFError as error:
                if "UTF-8" not in str(error):
                    raise
        for tensor in file.tensors.values():
            assert tensor.data.nbytes == tensor.n_bytes
            tensor.data.max()
    return True


def test_cut_at_every_byte(tmp_path: Path) -> None:
    content = rich_gguf()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content)
    assert open_and_read_all(path)
    last_data = len(content) - 12  # the last tensor's 20 bytes are padded to 32
    for n in range(len(content) - 1, 0, -1):
        os.truncate(path, n)
        assert open_and_read_all(path) == (n >= last_data), n


def mutate(content: bytearray, rng: random.Random, end: int) -> None:
    """Make one to three changes before byte ``end``: a bit, a byte, or an integer with an extreme value."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(end)
        change = rng.randrange(3)
        if change == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            content[at] = rng.randrange(256)
        else:
            ugly = rng.choice((0, 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1))
            at = min(at, len(content) - 8)
            content[at : at + 8] = struct.pack("<Q", ugly)


def test_flipped_bytes(tmp_path: Path) -> None:
    original = rich_gguf()
    rng = random.Random(4)
    path = tmp_path / "flip.gguf"
    opened = 0
    for _ in range(600):
        content = bytearray(original)
        mutate(content, rng, len(content))
        path.write_bytes(content)
        opened += open_and_read_all(path)
    # Most of the file is structure, so changes must be detected more often than not.
    assert 0 < opened < 300


def test_flipped_bytes_allocate_no_more_than_the_file(tmp_path: Path) -> None:
    original = rich_gguf()
    rng = random.Random(5)
    path = tmp_path / "flip.gguf"
    for _ in range(60):
        content = bytearray(original)
        mutate(content, rng, len(content))
        path.write_bytes(content)
        with bounded_allocation(len(content)):
            open_and_read_all(path)


@pytest.mark.parametrize(
    "name", ["models/stories260K/stories260K.gguf", "models/story656K/TinyStories-656K-Q8_0.gguf"]
)
def test_real_file_cut_and_flipped(tmp_path: Path, name: str) -> None:
    original = shared_data(name).read_bytes()
    with GGUFFile.open(shared_data(name)) as file:
        header = min(tensor.offset for tensor in file.tensors.values())
    rng = random.Random(6)
    path = tmp_path / "real.gguf"
    path.write_bytes(original)
    for _ in range(150):
        changed = bytearray(original[:header])
        mutate(changed, rng, header)
        overwrite(path, changed)
        open_and_read_all(path)
    overwrite(path, original[:header])
    assert open_and_read_all(path)
    for n in sorted({*rng.sample(range(1, header), 100), *rng.sample(range(header, len(original)), 30)})[::-1]:
        os.truncate(path, n)
        # Padding is shorter than the alignment.
        assert not open_and_read_all(path) or n > len(original) - 32, n


def overwrite(path: Path, head: bytes | bytearray) -> None:
    with path.open("r+b") as file:
        file.write(head)


def test_noise_after_a_good_header(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "noise.gguf"
    for _ in range(300):
        counts = u64(rng.randrange(4)) + u64(rng.randrange(4))
        # Small numbers are likelier to pass as lengths and types.
        noise = bytes(rng.choice((0, 0, 0, 0, 1, 2, 4, 8, 9, rng.randrange(256))) for _ in range(200))
        path.write_bytes(b"GGUF" + u32(3) + counts + noise)
        open_and_read_all(path)


# ---- large files of small entries ---------------------------------------------------------------------


def all_empty(n: int) -> bytes:
    return bytes(8 * n)


def one_byte_or_empty(n: int) -> bytes:
    """The lengths of every second string cannot be guessed."""
    return (u64(1) + b"x" + u64(0) + u64(0)) * (n // 3)


def looks_like_lengths(n: int) -> bytes:
    return string(u64(1) + b"a") * n


@pytest.mark.parametrize("strings", [all_empty, one_byte_or_empty, looks_like_lengths])
def test_strings_that_cannot_be_guessed(tmp_path: Path, strings: Callable[[int], bytes]) -> None:
    n = 60_000
    data = strings(n)
    content = bytes(with_key(ARRAY, array(STRING, [data], n)))
    path = tmp_path / "strings.gguf"
    path.write_bytes(content)
    with bounded_allocation(len(content)):
        file = GGUFFile.open(path)
    assert len(file.metadata["bad"]) == n  # type: ignore[arg-type]
    path.write_bytes(content[:-1])
    refuses(path, r"key 'bad': .*string 59999 takes|60000 strings cannot be in")
