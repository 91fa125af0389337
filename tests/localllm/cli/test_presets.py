"""Models with separate options, from a file for serve, chat and generate."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.parser import parser_of
from localllm.cli.presets import _actions_of_serve, apply_preset, read_presets
from localllm.errors import UsageError
from tests.helpers.command_line import run_main

TEXT = """
[small]
model = "demo"
context = 512
temperature = 0.0
stop = ["one", "two"]
ignore-eos = true
lora = ["style.gguf=0.5", "elsewhere.gguf"]
chat_template_kwargs = {enable_thinking = false}
alias = ["gpt-4o"]
ttl = 600
max_tokens = 4
group = "chat"

["org/repo:Q4_0"]
top_k = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "models.toml"
    path.write_text(TEXT)
    (tmp_path / "style.gguf").touch()
    return path


def parsed(command: str, *line: str, section: dict[str, Any]) -> argparse.Namespace:
    parser = parser_of(command)
    arguments, _ = parser.parse_known_args(line)
    apply_preset(parser, arguments, section, "small")
    return arguments


def test_a_section_says_what_the_command_line_does_not(path: Path) -> None:
    sections = read_presets(path)
    assert sections["org/repo:Q4_0"] == {"model": "org/repo:Q4_0", "top_k": 3}
    given = parsed("serve", "--temp", "0.7", section=sections["small"])
    assert (given.context, given.temperature, given.ttl, given.max_tokens) == (512, 0.7, 600, 4)
    assert (given.stop, given.ignore_eos, given.aliases) == (["one", "two"], True, ["gpt-4o"])
    assert given.chat_template_kwargs == {"enable_thinking": False}
    assert [(str(file), share) for file, share in given.lora] == [
        (str(path.parent / "style.gguf"), 0.5),
        ("elsewhere.gguf", 1.0),
    ]
    generated = parsed("generate", section=sections["small"])
    assert generated.context == 512
    assert not hasattr(generated, "ttl")
    assert sections["small"]["group"] == "chat"


def test_generate_and_chat_take_a_section_for_a_model(
    path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_DATA", str(path.parent / "data"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    text = TEXT.replace('lora = ["style.gguf=0.5", "elsewhere.gguf"]\n', "").replace("ignore-eos = true\n", "")
    path.write_text(text, encoding="utf-8")
    outcome = run_main(capfdbinary, "generate", "--models", path, "-m", "small", "-p", "Hello!")
    assert outcome.code == 0, outcome.err
    assert "512 tokens of context" in outcome.err
    assert "answer 4 tokens" in outcome.err
    outcome = run_main(capfdbinary, "run", "small", "Hello!", "--models", path, "-n", "3", "--plain")
    assert outcome.code == 0, outcome.err
    assert "512 tokens of context" in outcome.err


def test_models_toml_beside_the_settings_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CONFIG", str(path.parent / "config.toml"))
    assert list(read_presets(None)) == ["small", "org/repo:Q4_0"]
    path.unlink()
    assert read_presets(None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a", "is not valid TOML"),
        ("model = 'demo'", "has 'model' outside of a section"),
    ],
)
def test_a_file_that_cannot_be_read(path: Path, text: str, message: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_presets(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour = 1", r"\[small\] of .* has 'colour', which no model can have: remove it"),
        ("modle = 'a.gguf'", "has 'modle', which no model can have: did you mean model?"),
        ("temprature = 1", "has 'temprature', which no model can have: did you mean temperature?"),
        ("port = 1", "has 'port', which no model"),
        ("verbose = true", "has 'verbose', which no model"),
        ("model = 5", r"\[small\] of .* has model = 5: write the name of a file in quotes"),
        ("group = ['b']", r"\[small\] of .* has group = \['b'\]: write the name of a group in quotes"),
        ("system = 1", "write the system message in quotes"),
        ("context = 'many'", "argument -c/--ctx-size/--context"),
        ("top_k = 'many'", "argument --top-k"),
    ],
)
def test_a_faulty_section_affects_no_other(path: Path, text: str, message: str) -> None:
    path.write_text(f"[good]\nmodel = 'demo'\n[small]\n{text}\n", encoding="utf-8")
    sections = read_presets(path)
    parsed("serve", section=sections["good"])
    with pytest.raises(UsageError, match=message):
        parsed("serve", section=sections["small"])


FILES = ("model", "mmproj", "mm", "md", "draft-model", "model_draft", "chat_template_file", "jf", "grammar-file")


@pytest.mark.parametrize("key", FILES)
def test_files_are_those_of_the_folder_of_the_presets(path: Path, key: str) -> None:
    names = {"style.gguf": path.parent / "style.gguf", "a=b": path.parent / "a=b", "elsewhere.gguf": "elsewhere.gguf"}
    (path.parent / "a=b").touch()
    for name, expected in names.items():
        path.write_text(f'[a]\n{key} = "{name}"\n', encoding="utf-8")
        assert read_presets(path) == {"a": {"model": "a"} | {key: str(expected)}}


def test_a_name_that_no_file_can_have_stays_as_it_is(path: Path) -> None:
    for name in ("a" * 4000, "a\0b"):
        path.write_text(f"[a]\nmodel = {json.dumps(name)}\n", encoding="utf-8")
        assert read_presets(path) == {"a": {"model": name}}


def test_a_missing_file(path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_presets(path.with_name("missing.toml"))


def test_presets_are_listed_with_the_models(
    path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("localllm.cli.presets.settings_path", lambda: path.parent / "settings.toml")
    lines = run_main(capfdbinary, "models").out.splitlines()
    names = [line.split("\t")[0] for line in lines[1:]]
    assert names[:2] == ["small", "org/repo:Q4_0"]
    assert "llama" in lines[1]
    assert lines[2].endswith("cannot be read")
    path.write_text("[good]\nmodel = 'demo'\ngroup = 'chat'\n[bad]\nmodel = 'demo'\ncolour = 1\n", encoding="utf-8")
    outcome = run_main(capfdbinary, "models")
    good, bad = outcome.out.splitlines()[1:3]
    assert good.startswith("good\t")
    assert not good.endswith("cannot be read")
    assert bad.startswith("bad\t")
    assert bad.endswith("cannot be read")
    assert "bad: [bad] of the file of models has 'colour'" in outcome.err


#: Values in TOML's syntax.
HOSTILE = (
    "0x" + "f" * 6000, "9" * 100, "1979-05-27", "07:32:00", "{a = 1979-05-27}", "inf", "nan", "-1", "true", "false",
    '""', '"\\u0000"', '"\\u202e"', "'''a\nb'''", '"=0.5"', '"x=nan"', '"a=b"', f'"{"a" * 5000}"', '"../a"',
    "[]", "[[]]", "[nan]", '[1, "a"]', "{}", "{a = [{b = 1}]}", '"-m"', '"--help"', '["--version"]', "0o777",
)  # fmt: skip


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_hostile_values_are_errors_in_a_sentence(path: Path, command: str) -> None:
    parser, messages = parser_of(command), list[str]()
    keys = {*_actions_of_serve(), "model", "group", "system", "port", "", "--context", "__class__", "help"}
    for number, key in enumerate(sorted(keys)):
        for value in HOSTILE[number % 3 :: 3]:
            path.write_text(f'[a]\n"{key}" = {value}\n', encoding="utf-8")
            arguments, _ = parser.parse_known_args([])
            try:
                apply_preset(parser, arguments, read_presets(path)["a"], "a")
            except UsageError as error:
                messages.append(str(error))
    assert len(messages) > 300
    assert all(map(str.isprintable, messages))
