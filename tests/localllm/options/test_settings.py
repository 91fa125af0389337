"""The settings file: location, valid contents, and errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from localllm.errors import SettingsError
from localllm.options.settings import (
    CONFIG_VARIABLE,
    KEYS,
    SAMPLING,
    SAMPLING_KEYS,
    Settings,
    load_settings,
    settings_path,
)
from localllm.sampling import Sampling
from tests.helpers.other_system import use_folders_of

ALL = """\
model = "org/repo:Q4_K_M"
device = "cuda:0,1"
n_gpu_layers = 20
tensor_split = [3, 1]
split_mode = "row"
context = 8192
threads = 4
cache_type = "q8_0"
system_prompt = "Be brief."
stop = ["###", "\\n\\n"]
theme = "light"
embedding_model = "e.gguf"
model_folders = ["~/models", "here", "/there"]

[sampling]
temperature = 0.5
top_k = 10
seed = 7
dry_sequence_breakers = ["\\n"]
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_all_keys(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path / "c.toml", ALL))
    assert settings == Settings(
        model="org/repo:Q4_K_M",
        device="cuda:0,1",
        n_gpu_layers=20,
        tensor_split=(3.0, 1.0),
        split_mode="row",
        context=8192,
        threads=4,
        cache_type="q8_0",
        system_prompt="Be brief.",
        stop=("###", "\n\n"),
        theme="light",
        embedding_model="e.gguf",
        model_folders=(Path.home() / "models", tmp_path / "here", Path("/there")),
        sampling={"temperature": 0.5, "top_k": 10, "seed": 7, "dry_sequence_breakers": ("\n",)},
        keys_in_file=frozenset(KEYS)
        | {f"sampling.{name}" for name in ("temperature", "top_k", "seed", "dry_sequence_breakers")},
    )
    assert Sampling(**settings.sampling).seed == 7


@pytest.mark.parametrize("text", ["", "# nothing\n", "[sampling]\n"])
def test_without_a_key_all_is_as_by_default(tmp_path: Path, text: str) -> None:
    assert load_settings(write(tmp_path / "c.toml", text)) == Settings()
    assert load_settings(tmp_path / "missing" / "c.toml") == Settings()


def test_one_text_is_a_list_of_one(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path / "c.toml", 'stop = "x"\nmodel_folders = "/m"\n'))
    assert (settings.stop, settings.model_folders) == (("x",), (Path("/m"),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contxt = 1", "there is no setting 'contxt': did you mean context?"),
        ("cache-type = 'f16'", "there is no setting 'cache-type': did you mean cache_type?"),
        ("temprature = 1.0", "there is no setting 'temprature': did you mean sampling.temperature?"),
        ("xyzzy = 1", "there is no setting 'xyzzy': the settings are model, device, "),
        ("[sampling]\ntopk = 1", "there is no setting 'topk' in [sampling]: did you mean top_k?"),
        ("[sampling]\nlogprobs = 1", "there is no setting 'logprobs' in [sampling]"),
        ("[sampling]\ntemperature = -1", "sampling.temperature is -1, but must be a finite number of at least 0"),
        ("[sampling]\ntop_k = 'all'", "sampling.top_k is 'all', but must be a whole number"),
        ("sampling = 1", "sampling is 1, but must be a table: write its settings below a line [sampling]"),
        ("context = 0", "context is 0, but must be a whole number from 1"),
        ("context = 1.5", "context is 1.5, but must be a whole number from 1"),
        ("context = '8k'", "context is '8k', but must be a whole number from 1"),
        ("threads = true", "threads is True, but must be a whole number of at least 1"),
        ("n_gpu_layers = -1", "n_gpu_layers is -1, but must be a whole number of at least 0"),
        ("tensor_split = [0, 0]", "tensor_split is [0, 0], but must be a list of numbers of at least 0"),
        ("device = 'gpu9x'", "device is 'gpu9x', but must be 'auto', 'cpu', 'cuda', 'cuda:0,1' or 'reference'"),
        ("cache_type = 'q4_1'", "cache_type is 'q4_1', but must be one of 'f16', 'q8_0', 'q5_0'"),
        ("stop = ['']", "stop is [''], but must be a non-empty string, or a list of non-empty strings"),
        ("stop = [1]", "stop is [1], but must be a non-empty string, or a list of non-empty strings"),
        ("model = ''", "model is '', but must be a GGUF file's path, or ORG/REPO[:QUANT]"),
        ("model_folders = 3", "model_folders is 3, but must be a folder's path, or a list of folders"),
        ("theme = 1979-05-27", "theme is datetime.date(1979, 5, 27), but must be the name of a theme"),
        ("context = ", "is not valid TOML: "),
        ("a = " + 2000 * "[", "is not valid TOML: "),
    ],
)
def test_invalid_settings(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "c.toml", text)
    with pytest.raises(SettingsError) as raised:
        load_settings(path)
    assert str(raised.value).startswith(f"the settings file {path}")
    assert message in str(raised.value)


def test_several_problems_are_counted(tmp_path: Path) -> None:
    for n_more, more in enumerate(["threads = 0\n", "threads = 0\nx = 1\n"], start=1):
        path = write(tmp_path / "c.toml", "context = 0\n" + more)
        with pytest.raises(
            SettingsError, match=rf"context is 0, .* \(and {n_more} more, which localllm config lists\)"
        ):
            load_settings(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"theme = '\xff'")
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 20 | 1))
    for name, reason in ((".", "directory"), ("bytes.toml", "utf-8"), ("large.toml", "larger than 1,048,576 bytes")):
        with pytest.raises(
            SettingsError, match=rf"cannot be read \(.*{reason}.*\): correct it, .* {CONFIG_VARIABLE}"
        ):
            load_settings(tmp_path / name)


@pytest.mark.linux("platformdirs uses XDG folders there")
def test_the_path_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "x.toml"))
    assert settings_path() == tmp_path / "x.toml"
    monkeypatch.delenv(CONFIG_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, folder in ((str(tmp_path / "config"), tmp_path / "config"), ("", tmp_path / "home" / ".config")):
        monkeypatch.setenv("XDG_CONFIG_HOME", variable)
        assert settings_path() == folder / "localllm" / "config.toml"


@pytest.mark.parametrize(
    ("platform", "folder"), [("win32", "AppData/Local"), ("darwin", "Library/Application Support")]
)
def test_the_path_of_the_file_on_other_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, folder: str
) -> None:
    use_folders_of(platform, monkeypatch.setattr)
    for name in (CONFIG_VARIABLE, "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_path() == tmp_path / folder / "localllm" / "config.toml"


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CONFIG_VARIABLE, "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    if sys.platform.startswith("linux"):
        assert settings_path() is None
        assert load_settings() == Settings()


def test_every_sampling_setting_can_be_given_as_its_default(tmp_path: Path) -> None:
    tomlkit = pytest.importorskip("tomlkit")
    defaults = {name: getattr(Sampling(), name) for name in SAMPLING_KEYS if name != "seed"}
    path = write(tmp_path / "c.toml", tomlkit.dumps({SAMPLING: defaults}))
    assert load_settings(path).sampling == defaults
    assert os.environ[CONFIG_VARIABLE]  # see conftest.py


def test_an_unknown_home_folder_is_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('model_folders = "~nobody-of-this-name/x"')
    assert load_settings(path).model_folders == (tmp_path / "~nobody-of-this-name" / "x",)
    monkeypatch.setenv(CONFIG_VARIABLE, "~nobody-of-this-name/c.toml")
    assert load_settings() == Settings()


@pytest.mark.parametrize("text", ["model = {}", "sampling = {}", "[sampling]\nmin_p = {}"])
def test_a_number_that_python_does_not_print(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text.format("0x" + "f" * 6000))
    with pytest.raises(SettingsError, match="must be"):
        load_settings(path)
