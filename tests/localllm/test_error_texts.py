"""An error about texts in a file is one line of bounded length without control characters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm.errors import LocalLLMError, path_text, quoted
from localllm.gguf import GGUFFile
from localllm.quant.types import GGMLType
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.vocabulary import Vocabulary
from tests.helpers import tiny_models
from tests.helpers.gguf_writer import RawGGUF, RawTensor, array, key, string
from tests.helpers.vocabularies import FakeFile, bpe_metadata

MOST = 300
#: A short path, so that the rest of the message counts.
NAME = "m\n\x1b.gguf"
#: Control characters, line ends and a bidirectional override, at the start, in the middle and at the end.
HOSTILE = "\x1b]0;x\x07\n\r\u2028\u202e " * 10_000 + "\x1b[2J\n"
#: The longest allowed names of a key and a tensor.
KEY, TENSOR = HOSTILE[:30_000], "\1" * 63

Keys = dict[str, Any]
Tensors = dict[str, tuple[Any, GGMLType]]


def model(kind: str) -> tuple[Keys, Tensors]:
    """Return metadata and tensors of a valid model, with texts in every field that can have one."""
    settings = tiny_models.config(num_hidden_layers=1, hidden_size=32, intermediate_size=64, vocab_size=280)
    keys = tiny_models.gguf_metadata(settings) | {
        "general.name": "tiny",
        "llama.rope.scaling.type": "none",
        "llama.tensor_data_layout": "reference",
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    if kind == "spm":
        keys |= tiny_models.spm_vocabulary(280)
    else:
        merges = [("a", "b"), ("ab", "c")]
        fill = [(f"<{i}>", 4) for i in range(280 - 256 - len(merges))]
        keys |= bpe_metadata(merges, fill, token_type=None, pre="gpt-2")
    weights = tiny_models.gguf_tensors(settings, tiny_models.random_weights(settings))
    return keys, {name: tiny_models.encode(np.asarray(array), GGMLType.F32) for name, array in weights.items()}


def damaged(keys: Keys, tensors: Tensors) -> Iterator[tuple[str, str, Keys, Tensors]]:
    """Yield, for each text in the file: the damaged field, the architecture, metadata and tensors."""
    yield "architecture", HOSTILE, keys, tensors
    for name, value in keys.items():
        for other in (HOSTILE, HOSTILE.encode() + b"\xff", ["\x1b\n"] * 100, list(range(1000)), 1):
            if type(value) is not type(other):
                yield f"{name} is another", "llama", keys | {name: other}, tensors
        if isinstance(value, str):
            yield f"{name} is hostile", "llama", keys | {name: HOSTILE}, tensors
        if isinstance(value, list) and isinstance(value[0], str):
            for i in {0, 1, 2, 3, len(value) // 2, len(value) - 1} & set(range(len(value))):
                # Alone, with the space of a merge in the middle, and equal to another text.
                for changes in ({i: HOSTILE}, {i: f"a {'b' * 100_000}"}, {i: HOSTILE, i - 1: HOSTILE}):
                    changed = [changes.get(j, text) for j, text in enumerate(value)]
                    changed[-1] = changes.get(-1, changed[-1])
                    yield f"{name}[{i}]", "llama", keys | {name: changed}, tensors
    for name in tensors:
        renamed = {TENSOR if each == name else each: tensor for each, tensor in tensors.items()}
        yield f"tensor {name}", "llama", keys, renamed
        yield f"copy of {name}", "llama", keys, tensors | {TENSOR: tensors[name]}


@pytest.mark.parametrize("kind", ["spm", "bpe"])
def test_every_text_of_a_file_damaged(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys, tensors = model(kind)
    said: list[tuple[str, str]] = []
    n_loaded = 0
    for what, architecture, its_keys, its_tensors in damaged(keys, tensors):
        tiny_models.write_file(Path(NAME), architecture, its_keys, its_tensors)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with localllm.load(NAME, device="reference", threads=1, context=32) as llm:
                    n_loaded += 1
                    llm.tokenize("ab")
            except LocalLLMError as error:
                said.append((what, str(error)))
        said += [(what, str(warning.message)) for warning in warned]
    assert n_loaded > 5
    assert len({text for _, text in said}) > 50
    assert [(what, text[:400]) for what, text in said if len(text) >= MOST or not text.isprintable()] == []


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a  b", "'a  b'"),
        ("\n\x1b\u202e\ud800", r"'\n\x1b\u202e\ud800'"),
        (np.arange(4), "array([0, 1, 2, 3])"),
        (np.eye(2), "array([[1., 0.],        [0., 1.]])"),
        (1.5, "1.5"),
    ],
)
def test_a_short_value_is_quoted_whole(value: object, shown: str) -> None:
    assert quoted(value) == shown


@pytest.mark.parametrize("value", [HOSTILE, "x" * 61, np.arange(5000), [HOSTILE] * 9, ((HOSTILE,) * 9,) * 9, 10**90])
def test_a_long_value_is_cut(value: object) -> None:
    assert len(quoted(value)) <= 60
    assert quoted(value).isprintable()


NOT_UTF8 = string(b"\xff")
BROKEN: dict[str, tuple[RawGGUF, Callable[[GGUFFile], object]]] = {
    "a key's value": (RawGGUF(keys=[key(KEY, 7, b"\2")]), lambda file: file),
    "a key's text": (RawGGUF(keys=[key(KEY, 8, NOT_UTF8)]), lambda file: file.metadata[KEY]),
    "a key's strings": (RawGGUF(keys=[key(KEY, 9, array(8, [NOT_UTF8]))]), lambda file: list(file.metadata[KEY])),
    "a tensor's type": (RawGGUF(tensors=[RawTensor(TENSOR, [32], b"", type=31)]), lambda file: file),
    "a tensor's end": (RawGGUF(tensors=[RawTensor(TENSOR, [32], bytes(128), offset=2**63)]), lambda file: file),
    "a tensor's place": (RawGGUF(tensors=[RawTensor(TENSOR, [32], bytes(256), offset=32)]), lambda file: file),
    "no architecture": (RawGGUF(keys=[]), lambda file: file.architecture),
    "a missing part": (RawGGUF(keys=[key("split.count", 2, b"\2\0")]), lambda file: file),
    "closed": (RawGGUF(), lambda file: (file.close(), file.metadata)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_names_in_a_broken_file(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw, read = BROKEN[what]
    raw.write(Path(NAME))
    with pytest.raises(LocalLLMError) as caught:
        read(GGUFFile.open(NAME))
    assert len(str(caught.value)) < MOST
    assert str(caught.value).isprintable()


def test_tokens_that_differ() -> None:
    keys, _ = model("spm")
    ours, others = keys["tokenizer.ggml.tokens"], [*keys["tokenizer.ggml.tokens"][:-1], HOSTILE[:1000]]
    arrays = {f"tokenizer.ggml.{name}": np.array(keys[f"tokenizer.ggml.{name}"]) for name in ("scores", "token_type")}
    mine, theirs = (FakeFile(keys | arrays | {"tokenizer.ggml.tokens": tokens}) for tokens in (ours, others))
    for one, other in ((mine, theirs), (theirs, mine)):
        said = Tokenizer.from_gguf(one).difference(Vocabulary.from_gguf(other))
        assert said is not None
        assert len(said) < 150


def test_paths_are_whole_and_printable(tmp_path: Path) -> None:
    assert path_text(tmp_path) == str(tmp_path)
    assert path_text("a\n\udcff" + "b" * 500) == r"a\n\udcff" + "b" * 500
    with pytest.raises(localllm.LocalLLMError, match=r"no\\nne\.gguf does not exist"):
        GGUFFile.open(tmp_path / "no\nne.gguf")
