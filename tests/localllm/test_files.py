"""Invalid file names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm import LLM, load
from localllm.errors import LocalLLMError, OutputError
from localllm.files import NewFile, check_is_new

#: An invalid end of a path on every file system.
NAMES = {"a NUL": "a\0b", "too long": "x" * 5000, "folders too long": "x/" * 5000 + "a", "not Unicode": "\ud800x"}

#: Functions of the library that accept a file name.
CALLS: dict[str, Callable[[LLM, str], object]] = {
    "load": lambda llm, name: load(name),
    "load a Path": lambda llm, name: load(Path(name)),
    "load an encoder": lambda llm, name: load(mmproj=name),
    "load a draft model": lambda llm, name: load(draft_model=name),
    "load adapters": lambda llm, name: load(adapters={"a": name}),
    "load_adapter": lambda llm, name: llm.load_adapter("a", name),
    "save_prompts": lambda llm, name: llm.save_prompts(name),
    "load_prompts": lambda llm, name: llm.load_prompts(name),
    "an image": lambda llm, name: llm.generate("a", images=[name], max_tokens=1),
    "a sound": lambda llm, name: llm.generate("a", audio=[name], max_tokens=1),
    "an image of a chat": lambda llm, name: llm.chat(
        [{"role": "user", "content": [{"type": "image", "image": name}]}], max_tokens=1
    ),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load(context=512, threads=1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_every_call_refuses_a_name_that_no_file_can_have(llm: LLM, tmp_path: Path, call: str, name: str) -> None:
    with pytest.raises(LocalLLMError):
        CALLS[call](llm, f"{tmp_path}/{NAMES[name]}")


@pytest.mark.parametrize("name", [*NAMES.values(), ""])
def test_a_file_to_write_needs_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match="choose another"):
        NewFile(tmp_path / name if name else Path(""), 1).__enter__()


def test_a_name_that_is_too_long_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="choose another name"):
        check_is_new(tmp_path / NAMES["too long"])
