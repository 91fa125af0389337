"""Check the README and docs/: commands and programs run, links are valid, cli.md matches the parser."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm import Steering
from localllm.cli.parser import command_aliases, parser_of
from localllm.inspection import tools
from localllm.kernels.cuda import installation
from localllm.models.encoders.registry import PROJECTORS
from tests import cli_reference
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.command_line import run_main
from tests.helpers.data import ROOT
from tests.helpers.hub_server import Repo, hub_server
from tests.helpers.tiny_models import tiny_gguf

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
DEMO = ROOT / "localllm" / "data" / "demo.gguf"
ORIGINAL = ROOT / "tests" / "data" / "demo-f16.gguf"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: Name of the README's model, its repository on the hub, and its file there.
MODEL, HUB_MODEL, HUB_FILE = "qwen3.5:2b", "unsloth/Qwen3.5-2B-GGUF", "Qwen3.5-2B-Q4_K_M.gguf"

#: Prefixes of command lines that are not run here, and what runs them, or the reason why nothing does.
NOT_RUN = {
    "python3 -m venv": ".ci/run does",
    ".venv/bin/pip": ".ci/run does",
    "pip install": ".ci/run does; it needs a package registry",
    "python -m pytest": "runs this test",
    "python -m tests.": "takes hours, or needs a CUDA compiler: .ci/run and a test below run parts",
    "python tests/benchmarks/gpu/quick.py": "needs a registry: tests/benchmarks/test_gpu_quick.py runs parts",
    "python3 tests/benchmarks/gpu/quick.py": "needs a GPU: tests/benchmarks/test_gpu_quick.py emulates it",
    "localllm chat": "does not end: tests/tui; the README's command runs below",
    "localllm launch": "needs agents: tests/localllm/cli/test_launch.py",
    "localllm merge": "needs an adapter: tests/localllm/loading/test_adapters.py",
    "localllm serve": "does not end: tests/localllm/server/test_serve_command.py",
    'localllm look model.gguf -p "The capital of France': "needs a real model: tests/real/test_tone.py",
    'localllm generate -m model.gguf -p "How was your day?" --temp 0 -n 24 --control-vector-scaled happy.gguf:0.5': (
        "needs 16 layers: tests/real/test_tone.py"
    ),
    "cp ": "a fixture has the file",
    "pyinstaller": "tests/localllm/integrations/test_pyinstaller.py, in .ci/run",
    "python -m nuitka": "needs a C compiler: run by hand",
    "ray start": "tests/localllm/integrations/test_ray.py starts a cluster, where Ray is installed",
    "serve run": "tests/localllm/integrations/test_ray.py, where Ray is installed",
    "llm -m": "tests/localllm/integrations/test_llm_plugin.py, in .ci/run",
}

#: Pages whose commands and programs have separate tests, and the files with those tests.
OWN_TESTS = {
    "serve.md": "tests/localllm/server/test_serve_command.py",
    "add-a-command.md": "tests/test_worked_examples.py",
    "agents.md": "tests/localllm/cli/test_launch.py",
    "production.md": "tests/localllm/integrations/test_production.py",
    "integrations.md": "tests/localllm/integrations/test_recipes.py",
    "add-a-weight-format.md": "tests/test_worked_examples.py",
    "add-an-api-field.md": "tests/test_worked_examples.py",
    "add-an-architecture.md": "tests/test_worked_examples.py",
    "add-an-operation.md": "tests/test_worked_examples.py",
    "add-a-kernel.md": "tests/test_worked_examples.py",
}

#: Fences with other content than commands, programs and their output, and what reads them.
OTHER_FENCES = {
    ("add-a-weight-format.md", "diff"): "tests/test_worked_examples.py",
    ("add-an-api-field.md", "diff"): "tests/test_worked_examples.py",
    ("add-an-operation.md", "diff"): "tests/test_worked_examples.py",
    ("add-a-kernel.md", "diff"): "tests/test_worked_examples.py",
    ("add-an-option.md", "diff"): "tests/test_worked_examples.py",
    ("debug-a-wrong-reply.md", "diff"): "tests/test_worked_examples.py",
    ("chat.md", "toml"): "tests/tui/test_terminal.py writes such settings",
    ("monitoring.md", "yaml"): "tests/localllm/server/test_metrics.py",
    ("serve.md", "toml"): "tests/localllm/server/test_serve_command.py",
    ("integrations.md", "py"): "tests/localllm/integrations/test_recipes.py",
    ("library.md", "py"): "needs a model or a program that is not available",
    ("models.md", "py"): "needs a model that writes by diffusion: tests/localllm/generation/test_diffusion.py",
    ("images.md", "py"): "needs a model with image input: tests/models/encoders/test_seeing.py",
    ("audio.md", "py"): "needs a model with audio input: tests/models/encoders/test_hearing.py",
    ("many-machines.md", "haproxy"): "tests/localllm/integrations/test_haproxy.py",
    **dict.fromkeys(
        [("production.md", name) for name in ("caddy", "ini", "nginx", "toml")],
        "tests/localllm/integrations/test_production.py",
    ),
    ("many-machines.md", "py"): "needs a cluster: tests/localllm/integrations/test_ray.py",
}

#: Pages whose commands use the output of earlier ones.
IN_ORDER = ("smaller-models.md",)


def blocks(language: str) -> list[tuple[Path, str]]:
    pages = (page for page in PAGES if page.name not in OWN_TESTS)
    return [(page, text) for page in pages for name, text in FENCE.findall(page.read_text()) if name == language]


def lines_of(pages: list[Path]) -> list[tuple[str, str]]:
    """Return the command lines of pages, each with the name of its page."""
    found = []
    for page in pages:
        for name, text in FENCE.findall(page.read_text("utf-8")):
            if name == "sh":
                found += [(page.name, line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return found


def lines() -> list[tuple[str, str]]:
    """Return the command lines of the pages without separate tests."""
    return lines_of([page for page in PAGES if page.name not in OWN_TESTS])


def test_skipped_commands_exist_and_tests_name_their_pages() -> None:
    every = [line for _, line in lines_of(PAGES)]
    assert not [prefix for prefix in NOT_RUN if not any(line.startswith(prefix) for line in every)]
    for page, path in OWN_TESTS.items():
        assert page in (ROOT / path).read_text()
    for path in re.findall(r"tests/[\w/]+\.py", " ".join([*NOT_RUN.values(), *OTHER_FENCES.values()])):
        assert (ROOT / path).exists(), path
    fences = {(page.name, name) for page in PAGES for name, _ in FENCE.findall(page.read_text("utf-8"))}
    # cli.md has usages in such fences, which the parser writes.
    plain = [
        text
        for page in PAGES
        if page.name != "cli.md"
        for text in re.findall(r"^ {4}(.*\n)", page.read_text("utf-8"), re.MULTILINE)
    ]
    texts = [text for page in PAGES for name, text in FENCE.findall(page.read_text("utf-8")) if name in ("", "text")]
    plain += texts
    assert not re.findall(r"^(?:localllm|pip|python) ", "".join(plain), re.MULTILINE)
    assert {each for each in fences if each[1] not in ("sh", "python", "text", "")} == OTHER_FENCES.keys()
    # `FENCE` does not match a fence in a list or a quotation, nor a program marked as text.
    for page in PAGES:
        text = page.read_text("utf-8")
        assert text.count("```") == 2 * len(FENCE.findall(text)), page.name
    assert not re.findall(r"^(?:llm\.|import |from |curl |\.venv)", "".join(texts), re.MULTILINE)


def test_programs_that_are_not_run_are_python() -> None:
    for page in PAGES:
        for name, text in FENCE.findall(page.read_text("utf-8")):
            if name == "py":
                compile(text, page.name, "exec")


@pytest.mark.parametrize(
    "line", sorted({line for _, line in lines_of(PAGES) if re.match(r"localllm (?:chat|merge|serve)\b", line)})
)
def test_a_command_that_is_not_run_can_be_read(line: str) -> None:
    _, name, *words = shlex.split(line, comments=True)
    parser_of(name).parse_args(words)


def test_programs_of_the_tests_exist_with_their_flags(tmp_path: Path) -> None:
    named = set()
    for page in PAGES:
        text = page.read_text("utf-8").replace("\\\n", " ")
        named |= set(re.findall(r"python -m (tests\.[\w.]+)([^`\n#]*)", text))
    assert named
    for module, rest in named:
        file = ROOT / module.replace(".", "/")
        sources = list(file.glob("*.py")) if file.is_dir() else [file.with_suffix(".py")]
        text = "".join(path.read_text("utf-8") for path in sources)
        assert "__main__" in text or (file / "__main__.py").exists(), module
        flags = re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)
        assert [flag for flag in flags if f'"{flag}"' not in text] == [], module
    page = (ROOT / "docs" / "smaller-models.md").read_text("utf-8")
    seed, number = re.findall(r"python -m tests\.demo_model\.data (\d+) (\d+)", page)[0]
    done = subprocess.run(
        [sys.executable, "-m", "tests.demo_model.data", seed, number], cwd=ROOT, capture_output=True, check=True
    )
    assert len(done.stdout) > 10_000


def test_named_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r"(?:localllm|\.)\[([\w,]+)\]", page.read_text("utf-8")):
            assert set(names.split(",")) <= extras.keys(), f"{page.name}: {names}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "add-a-command.md"], ids=lambda page: page.name
)
def test_commands_in_sentences_exist_with_their_flags(page: Path) -> None:
    for line in re.findall(r"`(?:\w+=\S+ )?localllm ([a-z][^`]*)`", page.read_text("utf-8")):
        name, *words = line.split()
        name = {"help": "doctor"}.get(name, command_aliases().get(name, name))
        known = {*parser_of(name).flags, *(parser_of("serve").flags if name == "service" else ())}
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known, line


def test_all_encoders_are_in_the_table() -> None:
    section = (ROOT / "docs" / "models.md").read_text().partition("## Models with image or audio input")[2]
    for name, projector in PROJECTORS.items():
        assert f"| `{name.removesuffix(' audio')}` | {projector.models} |" in section


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that commands of look-inside.md read: prompts, a control vector, a mixture of experts."""
    path = tmp_path_factory.mktemp("made")
    (path / "happy.txt").write_text("I am happy\nA bright day\n")
    (path / "sad.txt").write_text("I am sad\nA dark day\n")
    vectors = {f"layers.{i}.output": np.full(256, 0.01) for i in (1, 2, 3, 4)}
    tools.save_control_vector(path / "happy.gguf", Steering(vectors), "llama")
    tiny_gguf(path / "mixture.gguf", "qwen3_moe")
    return path


@pytest.fixture
def folder(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the models that the pages name, and a hub with the model that they pull."""
    for name in ("model.gguf", "small.gguf"):
        shutil.copy(DEMO, tmp_path / name)
    shutil.copy(ORIGINAL, tmp_path / "f16.gguf")
    write_checkpoint(tmp_path / "checkpoint")
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("import localllm")
    monkeypatch.chdir(tmp_path)
    with hub_server() as hub:
        hub.repos[HUB_MODEL] = Repo({HUB_FILE: DEMO.read_bytes()})
        for name, value in {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "LOCALLLM_CONFIG": str(tmp_path / "config.toml"),
            "LOCALLLM_DATA": str(tmp_path / "data"),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setattr(installation, "driver_cuda", lambda: None)
        yield tmp_path


def run(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Run a command line of localllm, possibly with a piped ``echo``, or of Python."""
    said, words = b"", shlex.split(line, comments=True)
    if words[0] == "python":
        subprocess.run([sys.executable, *words[1:]], check=True)
        return
    if words[0] == "echo":
        said, words = words[1].encode() + b"\n", words[words.index("|") + 1 :]
    assert words[0] == "localllm", line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said), encoding="utf-8"))
    outcome = run_main(capfdbinary, *words[1:])
    assert (outcome.code, "warning" in outcome.err) == (0, False), (line, outcome.err)


@pytest.mark.filterwarnings("ignore:the model was trained on")  # the demo model stands in for larger ones
@pytest.mark.parametrize(
    "line",
    dict.fromkeys(line for page, line in lines() if page not in IN_ORDER and not line.startswith(tuple(NOT_RUN))),
)
def test_a_command(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, folder: Path, line: str
) -> None:
    monkeypatch.setattr("localllm.cli.commands.bench.disturbance", lambda *_: None)
    if "--png" in line:
        pytest.importorskip("matplotlib", reason="needs the extra 'plot'")
    run(capfdbinary, monkeypatch, line)


@pytest.mark.ci  # quantises a dozen times
@pytest.mark.parametrize("page", IN_ORDER)
def test_the_commands_of_a_page(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, folder: Path, page: str
) -> None:
    for name in ("text.txt", "other.txt"):
        (folder / name).write_text(f"{name} is about a dog that could not sleep. " * 60)
    for _, line in (each for each in lines() if each[0] == page and not each[1].startswith(tuple(NOT_RUN))):
        run(capfdbinary, monkeypatch, line)


def test_a_model_is_pulled_and_used_in_a_chat(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    [(_, pull), (_, chat)] = [each for each in lines() if MODEL in each[1]]
    run(capfdbinary, monkeypatch, pull)
    run(capfdbinary, monkeypatch, chat)


@pytest.mark.parametrize("page", sorted({page for page, _ in blocks("python")}), ids=lambda page: page.name)
def test_the_programs_of_a_page(folder: Path, page: Path) -> None:
    """Run all programs in order, because later ones use the results of earlier ones."""
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the chat template .* does not use tools")  # as the page explains
        for number, (_, program) in enumerate(block for block in blocks("python") if block[0] == page):
            exec(compile(program, f"{page.name}, block {number}", "exec"), names)
    if "llm" in names:
        names["llm"].close()


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_a_target(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        there = page.parent / path if path else page
        assert there.exists(), target
        titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=lambda page: str(page.relative_to(ROOT)))
def test_source_files_that_are_named_exist(page: Path) -> None:
    paths = re.findall(r"`((?:localllm|kernels|models|quant|tui|tests|docs)/[\w/.-]+\.\w+)`", page.read_text("utf-8"))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_command_line_reference_matches_the_parser() -> None:
    assert cli_reference.PATH.read_text("utf-8") == cli_reference.reference(), "run python -m tests.cli_reference"
    assert cli_reference.AGENTS_PAGE.read_text("utf-8") == cli_reference.agents(), "run python -m tests.cli_reference"
    assert cli_reference.KEYWORDS.read_text("utf-8") == cli_reference.keywords(), "run python -m tests.cli_reference"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
