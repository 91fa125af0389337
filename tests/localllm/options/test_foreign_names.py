"""Errors for other libraries' names suggest the right name; the library finds models by the command line's names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm import LLM
from localllm.chat import CHATML
from localllm.errors import GGUFError, ModelNotFoundError, UsageError
from localllm.options.foreign_names import THEIR_LOAD, THEIR_METHODS, THEIR_OPTIONS
from localllm.options.keywords import Options
from localllm.options.settings import CONFIG_VARIABLE
from tests.helpers.tiny_models import tiny_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("habits") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with localllm.load(path, device="reference", context=64, chat_template=CHATML) as llm:
        yield llm


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("n_ctx", "write context="),
        ("model_path", "or as path="),
        ("type_k", "write cache_type="),
        ("verbose", "remove it"),
        ("paralel", "did you mean 'parallel'?"),
        ("n_thread", "write threads="),
        ("torch_dtype", "the types are in the file"),
        ("device_map", "write device="),
        ("xyzzy", "the keywords are path, device, "),
    ],
)
def test_unknown_keywords_of_load(keyword: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^unexpected keyword argument '{keyword}': .*{hint.replace('?', '.')}"):
        localllm.load("missing.gguf", **{keyword: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("stream", "call stream or stream_chat"),
        ("mirostat_mode", "write mirostat="),
        ("temp", "write temperature="),
        ("num_return_sequences", "pass a list with n copies of the prompt to generate_many"),
        ("system", "start the messages with {'role': 'system'"),
        ("xyzzy", "the keywords are max_tokens, "),
    ],
)
def test_unknown_keywords_of_generate(llm: LLM, keyword: str, hint: str) -> None:
    for call in (llm.generate, llm.chat, llm.stream, llm.generate_many):
        with pytest.raises(TypeError, match=f"^unexpected keyword argument '{keyword}': {hint}"):
            call("a", **{keyword: 1})  # type: ignore[operator]


def test_unknown_methods(llm: LLM) -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'create_chat_completion': use LLM\.chat, .*compat\.Llama"
    ):
        llm.create_chat_completion([])
    for name, hint in (
        ("chat_stream", r"LLM\.chat, or"),
        ("chat_many", r"LLM\.generate_many"),
        ("eos_id", r"LLM\.tok"),
    ):
        with pytest.raises(AttributeError, match=f"^'LLM' object has no attribute {name!r}: use {hint}"):
            getattr(llm, name)
    for name in ("Llama", "pull", "generate"):
        with pytest.raises(AttributeError, match=f"^module 'localllm' has no attribute {name!r}: use "):
            getattr(localllm, name)
    done = llm.generate("a", max_tokens=1)
    with pytest.raises(
        AttributeError, match=r"^'Completion' object has no attribute 'content': use Completion\.text$"
    ):
        done.content  # noqa: B018
    with pytest.raises(TypeError, match=r"^an LLM cannot be called: use LLM\.generate"):
        llm("a")  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"^use localllm\.load\('model\.gguf'\)"):
        LLM("model.gguf")
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        llm.xyzzy()
    assert not hasattr(llm, "__len__")


def test_suggested_names_exist() -> None:
    assert not THEIR_LOAD.keys() & inspect.signature(localllm.load).parameters.keys()
    assert not THEIR_OPTIONS.keys() & Options.__annotations__.keys()
    assert not [name for name in THEIR_METHODS if hasattr(LLM, name) and name != "__call__"]
    known = {*inspect.signature(localllm.load).parameters, *Options.__annotations__}
    named = {
        text.split("write ")[1].split("=")[0]
        for text in [*THEIR_LOAD.values(), *THEIR_OPTIONS.values()]
        if "write " in text
    }
    assert named <= known


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], ("a",)])
def test_generate_points_to_generate_many(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UsageError, match="pass it to generate_many"):
        llm.generate(prompts)
    with pytest.raises(UsageError, match="prompt is a list of messages: pass it to chat"):
        llm.generate([{"role": "user", "content": "a"}])  # type: ignore[list-item]


def test_chat_wants_messages(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^messages must be a list of mappings, such as \[.*\], not 'Hello'$"):
        llm.chat("Hello")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["missing.gguf", Path("missing.gguf"), "no/such", "~/missing.gguf", "x" * 40])
def test_a_missing_model_is_a_file_not_found_error(name: Any) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        localllm.load(name)
    assert isinstance(raised.value, GGUFError)
    assert "missing.gguf" in str(raised.value) or str(name) in str(raised.value)


def test_names_of_models(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder, a name in a folder of models, and the demo model, as model and as draft model."""
    monkeypatch.setenv("HOME", str(path.parent))
    monkeypatch.setenv("USERPROFILE", str(path.parent))
    for name in ("~/tiny.gguf", Path("~/tiny.gguf")):
        with localllm.load(name, draft_model=name, device="reference", context=64) as llm:
            assert llm.info.path == path
            assert llm.info.draft is not None
            assert llm.info.draft.path == path
    settings = tmp_path / "settings.toml"
    settings.write_text(f"model_folders = [{str(path.parent)!r}]")
    monkeypatch.setenv(CONFIG_VARIABLE, str(settings))
    with localllm.load("tiny", device="reference", context=64) as llm:
        assert llm.info.path == path


def test_the_demo_model_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with localllm.load("demo", draft_model="demo", device="reference", context=64) as llm:
        assert llm.info.path.name == "demo.gguf"
        assert llm.info.draft is not None
        assert llm.info.draft.path == llm.info.path
    monkeypatch.chdir(tmp_path)
    for name in ("demo", Path("demo")):
        Path("demo").write_bytes(b"no model")
        with pytest.raises(GGUFError, match=r"demo: .*not a GGUF file"):
            localllm.load(name)
    Path("demo").unlink()
    with pytest.raises(ModelNotFoundError, match="demo does not exist"):
        localllm.load(Path("demo"))


@pytest.mark.posix("Windows has no such names")
def test_info_as_a_table(llm: LLM, tmp_path: Path) -> None:
    """File names are always text."""
    hostile = tiny_gguf(tmp_path / "<b onclick=x>&.gguf")
    with localllm.load(hostile, draft_model=hostile, device="reference", context=64) as other:
        html = other.info._repr_html_()
    assert html.count("&lt;b onclick=x&gt;&amp;.gguf: llama") == 2
    assert "onclick" not in html.replace("&lt;b onclick=x&gt;", "")
    assert html.count("<table>") == 2
    for group in llm.info.placement.groups:
        assert f"<td>{group.name}</td><td>reference</td>" in llm.info._repr_html_()
