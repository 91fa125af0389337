"""``localllm config``, and the effect of settings on other commands."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.kernels.cuda import installation
from localllm.options.settings import KEYS
from tests.helpers.command_line import Outcome, environment, run_main
from tests.helpers.data import ROOT

Capture = pytest.CaptureFixture[bytes]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config" / "c.toml"
    monkeypatch.setenv("LOCALLLM_CONFIG", str(file))
    return file


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")


def lines(outcome: Outcome) -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in map(str.split, outcome.out.splitlines()) if words}


def test_the_path(path: Path, capfdbinary: Capture) -> None:
    assert run_main(capfdbinary, "config", "path") == Outcome(0, f"{path}\n", "")


def test_defaults_are_shown_without_a_file(path: Path, capfdbinary: Capture) -> None:
    outcome = run_main(capfdbinary, "config")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{path} (does not exist: all settings have their defaults)\n")
    shown = lines(outcome)
    assert set(KEYS) <= set(shown)
    assert shown["model"] == ["default", "the", "demo", "model"]
    assert shown["device"] == ["default", "auto"]
    assert shown["sampling.temperature"] == ["default", "0.8"]
    assert shown["LOCALLLM_CONFIG"] == ["variable", str(path)]
    assert not path.exists()


def test_what_is_in_force_and_why(path: Path, capfdbinary: Capture) -> None:
    write(path, 'context = 512\nmodel_folders = "m"\nstop = "\\u001b"\n[sampling]\ntop_k = 3\n')
    outcome = run_main(capfdbinary, "config")
    shown = lines(outcome)
    assert shown["context"] == ["file", "512"]
    assert shown["sampling.top_k"] == ["file", "3"]
    assert shown["threads"][:2] == ["default", "one"]
    assert "\x1b" not in outcome.out
    data = json.loads(run_main(capfdbinary, "config", "--json").out)
    assert (data["path"], data["exists"], data["problems"]) == (str(path), True, [])
    assert data["settings"]["context"] == {"value": 512, "source": "file"}
    assert data["settings"]["model_folders"] == {"value": [str(path.parent / "m")], "source": "file"}
    assert data["settings"]["cache_type"] == {"value": "f16", "source": "default"}


def test_a_broken_file_is_shown_with_all_that_is_wrong(path: Path, capfdbinary: Capture) -> None:
    write(path, "context = 0\nthreads = 2\nxyzzy = 1\n")
    outcome = run_main(capfdbinary, "config")
    assert outcome.code == 1
    assert lines(outcome)["threads"] == ["file", "2"]
    start = f"localllm: error: the settings file {path}: "
    assert [line.removeprefix(start)[:12] for line in outcome.err.splitlines()] == ["context is 0", "there is no "]
    write(path, "context = ")
    outcome = run_main(capfdbinary, "config")
    assert outcome.code == 1
    assert lines(outcome)["context"][:2] == ["default", "the"]
    assert f"the settings file {path} is not valid TOML" in outcome.err
    refused = run_main(capfdbinary, "generate", "-p", "x")
    assert refused.code == 1
    assert f"the settings file {path} is not valid TOML" in refused.error()


def test_set_and_unset_keep_the_rest_as_it_is(path: Path, capfdbinary: Capture) -> None:
    write(path, "# mine\ncontext = 512 # small\n\n[sampling]\n# cold\ntemperature = 0.1\n")
    path.chmod(0o600)
    for key, value in (
        ("context", "1024"),
        ("model", "org/repo:Q4_K_M"),
        ("stop", '["a", "b"]'),
        ("system_prompt", "7"),
        ("sampling.repeat_last_n", "-1"),
        ("sampling.seed", "3"),
    ):
        outcome = run_main(capfdbinary, "config", "set", key, value)
        assert (outcome.code, outcome.out) == (0, f"{key} is set in {path}\n")
        assert ("pull it first" in outcome.err) == (key == "model")
    assert run_main(capfdbinary, "config", "unset", "sampling.seed").code == 0
    text = path.read_text(encoding="utf-8")
    assert tomllib.loads(text) == {
        "context": 1024,
        "model": "org/repo:Q4_K_M",
        "stop": ["a", "b"],
        "system_prompt": "7",
        "sampling": {"temperature": 0.1, "repeat_last_n": -1},
    }
    assert text.startswith("# mine\ncontext = 1024 # small\n")
    assert "# cold\ntemperature = 0.1\n" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_set_makes_the_file_and_follows_a_link(path: Path, tmp_path: Path, capfdbinary: Capture) -> None:
    assert run_main(capfdbinary, "config", "set", "sampling.top_k", "5").code == 0
    assert tomllib.loads(path.read_text(encoding="utf-8")) == {"sampling": {"top_k": 5}}
    target = tmp_path / "target.toml"
    path.replace(target)
    path.symlink_to(target)
    assert run_main(capfdbinary, "config", "set", "threads", "2").code == 0
    assert path.is_symlink()
    assert tomllib.loads(target.read_text()) == {"sampling": {"top_k": 5}, "threads": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["set", "contxt", "1"], "there is no setting 'contxt': did you mean context?"),
        (["set", "context", "0"], "context is 0, but must be a whole number from 1 to 2^63 - 1"),
        (["set", "context", "many"], "context is 'many', but must be a whole number"),
        (["set", "sampling.top_k", "-1"], "sampling.top_k is -1, but must be"),
        (["set", "sampling.x", "1"], "there is no setting 'x' in [sampling]"),
        (["set", "sampling", "1"], "sampling is 1, but must be a table"),
        (["set", "device", "tpu"], "device is 'tpu', but must be 'auto', "),
        (["set", "context"], "write localllm config set KEY VALUE"),
        (["set", "system_prompt", "Be", "brief"], "'brief'"),
        (["unset"], "write localllm config unset KEY"),
        (["unset", "context"], "does not contain 'context': its keys are: none"),
        (["path", "x"], "write localllm config path"),
        (["set", "context", "1", "--json"], "--json cannot be combined with set"),
        (["get"], "write localllm config get KEY"),
        (["get", "contxt"], "there is no setting 'contxt': did you mean context?"),
        (
            ["get", "xyzzy"],
            "there is no setting 'xyzzy': did you mean one of the settings that localllm config lists?",
        ),
        (["set", "theme", "drak"], "theme is 'drak' but must be one of dark, light, "),
    ],
)
def test_what_cannot_be_set(path: Path, capfdbinary: Capture, words: list[str], message: str) -> None:
    outcome = run_main(capfdbinary, "config", *words)
    assert outcome.code == 2
    assert message in outcome.error()
    assert words[0] != "set" or "was not changed" not in outcome.err or str(path) in outcome.err
    assert not path.exists()


def test_one_value_can_be_asked_for(path: Path, capfdbinary: Capture) -> None:
    write(path, "context = 512\n[sampling]\ntop_k = 3\n")
    for key, value in (("context", "512"), ("sampling.top_k", "3"), ("device", "auto"), ("model", "the demo model")):
        assert run_main(capfdbinary, "config", "get", key) == Outcome(0, f"{value}\n", "")


def test_what_is_set_and_not_there_is_told(path: Path, capfdbinary: Capture, tmp_path: Path) -> None:
    for key, value, message in (
        ("model", "xyzzy", "there is no file or model 'xyzzy' here: localllm models lists the names"),
        ("model", str(tmp_path / "m.gguf"), "m.gguf does not exist yet: check the path"),
        ("model_folders", "nowhere", f"{path.parent / 'nowhere'} cannot be found: check the path"),
    ):
        outcome = run_main(capfdbinary, "config", "set", key, value)
        assert (outcome.code, outcome.out) == (0, f"{key} is set in {path}\n")
        assert message in outcome.err
    for key, value in (("model", "demo"), ("model_folders", str(tmp_path)), ("theme", "nord")):
        assert run_main(capfdbinary, "config", "set", key, value).err == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a named pipe")
def test_a_pipe_in_place_of_the_file_does_not_hang(path: Path, capfdbinary: Capture) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    outcome = run_main(capfdbinary, "generate", "-p", "x")
    assert f"the settings file {path} cannot be read (it is a named pipe)" in outcome.error()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('device = "cuda"', "(from the setting device in {path})"),
        ('device = "reference"\ncontext = 999999999', "(from the setting context in {path})"),
        ('model = "llama3"', "(from the setting model in {path})"),
    ],
)
def test_an_error_names_the_setting_that_it_comes_from(
    path: Path, capfdbinary: Capture, monkeypatch: pytest.MonkeyPatch, setting: str, message: str
) -> None:
    monkeypatch.setattr(installation, "driver_cuda", lambda: None)
    write(path, setting + "\n")
    assert run_main(capfdbinary, "generate", "-p", "x").error().endswith(message.format(path=path))
    given = ["-m", "demo", "--device", "reference", "-c", "64", "-n", "0"]
    assert run_main(capfdbinary, "generate", "-q", "-p", "x", *given) == Outcome(0, "", "")


def test_a_key_that_means_nothing_can_be_removed(path: Path, capfdbinary: Capture) -> None:
    write(path, "xyzzy = 1\nthreads = 2\n")
    assert "did you mean xyzzy?" in run_main(capfdbinary, "config", "unset", "xyzy").error()
    assert run_main(capfdbinary, "config", "unset", "xyzzy").code == 0
    assert path.read_text(encoding="utf-8") == "threads = 2\n"


def test_a_place_that_cannot_be_written(path: Path, tmp_path: Path, capfdbinary: Capture) -> None:
    path.parent.write_text("no folder")
    outcome = run_main(capfdbinary, "config", "set", "threads", "2")
    assert outcome.code == 1
    assert f"the settings file {path} cannot be read" in outcome.error()


def test_a_device_file_is_not_replaced(monkeypatch: pytest.MonkeyPatch, capfdbinary: Capture) -> None:
    monkeypatch.setenv("LOCALLLM_CONFIG", os.devnull)
    outcome = run_main(capfdbinary, "config", "set", "threads", "2")
    assert outcome.code == 1
    assert "is not a file" in outcome.error()
    assert not Path(os.devnull).is_file()


# -- In force ------------------------------------------------------------------------------------------------------


def generated(capfdbinary: Capture, *arguments: object) -> dict[str, object]:
    outcome = run_main(capfdbinary, "generate", "-q", "--json", "-n", "8", *arguments)
    assert outcome.code == 0, outcome.err
    result: dict[str, object] = json.loads(outcome.out)
    return result


def test_settings_hold_for_generate_and_flags_override_them(path: Path, capfdbinary: Capture) -> None:
    cold = ["--device", "reference", "--temp", "0"]
    plain = generated(capfdbinary, *cold, "-p", "What is localllm?", "-sys", "")
    text = str(plain["text"])
    assert len(text.split()) > 2
    stop = text.split()[1]
    write(
        path,
        f'device = "reference"\nstop = {json.dumps(stop)}\nsystem_prompt = "Be brief."\n'
        "[sampling]\ntemperature = 0\n",
    )
    settled = generated(capfdbinary, "-p", "What is localllm?", "-sys", "")
    assert settled["device"] == "reference"
    assert stop not in str(settled["text"])
    assert settled["finish_reason"] == "stop"
    other = generated(capfdbinary, "-p", "What is localllm?", "--stop", "\x00")
    with_system = other["usage"]
    flagged = generated(capfdbinary, "-p", "What is localllm?", "--stop", "\x00", "-sys", "Be brief.")
    assert flagged["usage"] == with_system != plain["usage"]
    assert flagged["text"] == other["text"]
    assert generated(capfdbinary, "-p", "x", "--device", "cpu", "-t", "1")["device"] == "cpu"


def test_settings_of_layers_hold_for_their_device_alone(path: Path, capfdbinary: Capture) -> None:
    write(path, 'device = "reference"\nn_gpu_layers = 3\n')
    outcome = run_main(capfdbinary, "inspect", ROOT / "localllm/data/demo.gguf", "--plan")
    assert outcome.code == 0
    said = f"the setting n_gpu_layers in {path} has no effect, because no GPU can be used"
    assert outcome.err.startswith(f"localllm: warning: {said}")
    outcome = run_main(capfdbinary, "inspect", ROOT / "localllm/data/demo.gguf", "--plan", "--device", "reference")
    assert (outcome.code, outcome.err) == (0, "")


def test_the_default_model_and_demo(path: Path, tmp_path: Path, capfdbinary: Capture) -> None:
    write(path, f'model = "{tmp_path}/missing.gguf"\n')
    outcome = run_main(capfdbinary, "generate", "-p", "x", "-n", "0")
    assert "missing.gguf does not exist" in outcome.error()
    shown = generated(capfdbinary, "-m", "demo", "--device", "reference", "-p", "x")
    assert str(shown["model"]).endswith("demo.gguf")


def test_generating_imports_nothing_of_settings_or_the_hub() -> None:
    code = (
        "import sys; from localllm.cli.main import main; code = main(['generate', '-q', '--device', 'reference', "
        "'-p', 'x', '-n', '0']); print(code, *sorted({'tomllib', 'tomlkit', 'platformdirs', 'huggingface_hub', "
        "'filelock', 'localllm.catalog'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0"]


def test_settings_hold_for_bench(path: Path, capfdbinary: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, 'device = "cpu"\nthreads = 1\ncache_type = "q8_0"\n')
    asked: dict[str, object] = {}

    def load(path: object, **options: object) -> None:
        asked.update(options)
        raise UsageError("that will do")

    monkeypatch.setattr("localllm.llm.load", load)
    assert run_main(capfdbinary, "bench", "-q", "-p", "8", "-n", "2", "-r", "1").error() == "that will do"
    assert (asked["device"], asked["threads"], asked["cache_type"]) == ("cpu", 1, "q8_0")
