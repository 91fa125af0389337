"""The worked examples of the docs match the source and work."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest

from localllm.cli import commands
from localllm.models.registry import ARCHITECTURES
from tests.helpers.command_line import run_main
from tests.models.tiny import DIFFUSION, ENCODER_DECODERS, ENCODERS, TINY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text("utf-8"), re.DOTALL)


def apply(diff: str, root: Path) -> None:
    """Apply a diff whose first line names the file, and whose other lines start with a space, - or +."""
    header, *lines = diff.splitlines()
    path = root / header.removeprefix("--- ")
    before, after = ("".join(f"{x[1:]}\n" for x in lines if not x or x[0] in kinds) for kinds in (" -", " +"))
    text = path.read_text("utf-8")
    assert text.count(before) == 1, f"{header}: the replaced text must occur exactly once:\n{before}"
    path.write_text(text.replace(before, after), "utf-8")


def copy_source(root: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "benchmarks")
    for folder in ("localllm", "quant", "kernels", "models", "tui", "tests"):
        shutil.copytree(ROOT / folder, root / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)


@pytest.mark.parametrize(
    ("page", "n_edits", "name", "cases"),
    [
        ("add-an-operation.md", 7, "hard_swish", ("gated-activation=hard_swish", "activation-activation=hard_swish")),
        ("add-a-kernel.md", 8, "l1_norm", ("l1_norm-width=5", "l1_norm-width=100")),
    ],
)
def test_the_new_operations_of_the_docs_pass_their_tests(
    page: str, n_edits: int, name: str, cases: Sequence[str], tmp_path: Path
) -> None:
    copy_source(tmp_path)
    edits = blocks(page, "diff")
    assert len(edits) == n_edits
    for edit in edits:
        apply(edit, tmp_path)
    command = [sys.executable, "-m", "pytest", "-v", "tests/kernels/test_operation_formulas.py", "-k", name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for case in cases:
        for backend in ("reference", "cpu"):
            assert re.search(rf"{backend}[\w-]*-{re.escape(case)}\] PASSED", done.stdout), done.stdout


#: Uses the example's option in every front end: with such a high bound only the likeliest token is left.
OPTION = """
import json, os, subprocess, sys
import httpx
import localllm
from tests.helpers.http_server import demo, serving

value = {"epsilon_cutoff": 0.999}
with localllm.load(device="reference") as llm:
    greedy = llm.generate("Once", temperature=0, max_tokens=6).text
    assert llm.generate("Once", seed=1, temperature=9, max_tokens=6).text != greedy
    assert llm.generate("Once", seed=1, temperature=9, max_tokens=6, **value).text == greedy
with serving(demo(device="reference")) as server:
    body = {"prompt": "Once", "temperature": 9, "n_predict": 6, **value}
    assert httpx.post(server.url + "/completion", json=body, timeout=300).json()["content"] == greedy
    refusal = httpx.post(server.url + "/completion", json={**body, "epsilon_cutoff": -1}, timeout=300)
    assert refusal.status_code == 400 and "epsilon_cutoff is -1" in refusal.text, refusal.text
    props = httpx.get(server.url + "/props", timeout=300).json()
    assert props["default_generation_settings"]["params"]["epsilon_cutoff"] == 0
flags = ["-m", "demo", "--no-chat", "-p", "Once", "-n", "6", "--temp", "9", "--device", "reference", "--json", "-q"]


def generated(*more, **environment):
    command = [sys.executable, "-m", "localllm", "generate", *flags, *more]
    return json.loads(subprocess.check_output(command, env=os.environ | environment))["text"]


assert generated("--epsilon-cutoff", "0.999") == greedy
with open("settings.toml", "w") as file:
    file.write("[sampling]\\nepsilon_cutoff = 0.999\\n")
assert generated(LOCALLLM_CONFIG="settings.toml") == greedy
print("done")
"""


def test_the_new_option_of_the_docs_works_in_every_front_end(tmp_path: Path) -> None:
    copy_source(tmp_path)
    edits = blocks("add-an-option.md", "diff")
    assert len({edit.splitlines()[0] for edit in edits}) == 2
    for edit in edits:
        apply(edit, tmp_path)
    done = subprocess.run([sys.executable, "-c", OPTION], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stdout + done.stderr


def test_the_new_architecture_of_the_docs_is_the_one_in_the_source() -> None:
    whole_file, line, entry = blocks("add-an-architecture.md", "python")
    assert whole_file == (ROOT / "models/olmo2.py").read_text("utf-8")
    assert line in (ROOT / "models/registry.py").read_text("utf-8")
    assert entry in (ROOT / "tests/models/tiny.py").read_text("utf-8")


def test_the_new_command_of_the_docs_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (source,) = blocks("add-a-command.md", "python")
    (tmp_path / "tokenize.py").write_text(source, "utf-8")
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    assert "show the tokens of a text" in run_main(capfdbinary, "--help").out
    assert "did you mean tokenize?" in run_main(capfdbinary, "tokenise").error()
    assert "write localllm tokenize [-m FILE] TEXT" in run_main(capfdbinary, "tokenize").error()
    ids = json.loads(run_main(capfdbinary, "llama-tokenize", "-m", "demo", "a dog", "--json", "--no-bos").out)
    lines = run_main(capfdbinary, "tokenize", "a dog", "--no-bos").out.splitlines()
    assert [int(line.split()[0]) for line in lines] == ids
    assert "".join(line.split(maxsplit=1)[1] for line in lines).replace("▁", " ").strip() == "a dog"
    del sys.modules["localllm.cli.commands.tokenize"]


#: Entries of the tests' tables that the page of weight formats names, without showing them: file, text, replacement.
FORMAT_TABLES = [
    ("tests/quant/test_types.py", "NEWER = [", 'NEWER = [("Q6_0", 133, (32, 26)), '),
    ("tests/quant/test_repack.py", "EXACT = {", "EXACT = {T.Q6_0, "),
    ("tests/quant/test_repack.py", "BITS = {", "BITS = {T.Q6_0: 8.5, "),
    ("tests/quant/test_repack.py", "elif type in (T.TQ1_0,", "elif type in (T.Q6_0, T.TQ1_0,"),
    ("tests/quant/test_encode.py", "RELATIVE_RMS = {", "RELATIVE_RMS = {T.Q6_0: (0.0210, 0.0180), "),
]

#: Quantises the demo model to the example's format, and compares its logits with the original's.
FORMAT = """
import numpy as np
import localllm
from localllm.cli.main import main
from localllm.gguf import GGUFFile

original = "tests/data/demo-f16.gguf"
assert main(["quantize", original, "six.gguf", "Q8_0", "--tensor-type", ".=q6_0"]) == 0
with GGUFFile.open("six.gguf") as file:
    assert {tensor.type.name for tensor in file.tensors.values()} == {"F32", "Q6_0"}


def logits(path, device):
    with localllm.load(path, device=device, context=64, threads=1) as llm:
        return llm.logits(llm.tokenize("Once upon a time there was a dog"))


expected = logits(original, "reference")
for device in ("reference", "cpu"):
    error = np.linalg.norm(logits("six.gguf", device) - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.1, (device, error)
print("done")
"""


def test_the_new_weight_format_of_the_docs_is_tested_written_and_run(tmp_path: Path) -> None:
    copy_source(tmp_path)
    for edit in blocks("add-a-weight-format.md", "diff"):
        apply(edit, tmp_path)
    for name, before, after in FORMAT_TABLES:
        text = (tmp_path / name).read_text("utf-8")
        assert text.count(before) == 1, (name, before)
        (tmp_path / name).write_text(text.replace(before, after), "utf-8")
    selected = "Q6_0 or test_types or test_every"
    command = [sys.executable, "-m", "pytest", "-v", "tests/quant", "-k", selected]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in ("blocks_decode_as_in_gguf", "pack_inverts_unpack", "repacking_loses_nothing_measurable"):
        assert re.search(rf"test_{test}\[Q6_0\] PASSED", done.stdout), done.stdout
    done = subprocess.run([sys.executable, "-c", FORMAT], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


def test_the_new_api_field_of_the_docs_passes_its_test(tmp_path: Path) -> None:
    copy_source(tmp_path)
    (source,) = blocks("add-an-api-field.md", "python")
    test = tmp_path / "tests" / "localllm" / "server" / "test_echo.py"
    test.write_text(source, "utf-8")
    command = [sys.executable, "-m", "pytest", "-q", str(test)]
    before = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed" in before.stdout, before.stdout + before.stderr
    for edit in blocks("add-an-api-field.md", "diff"):
        apply(edit, tmp_path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_of_the_docs_names_the_layer_with_a_fault(tmp_path: Path) -> None:
    copy_source(tmp_path)
    (fault,) = blocks("debug-a-wrong-reply.md", "diff")
    apply(fault, tmp_path)
    shutil.copy(ROOT / "localllm" / "data" / "demo.gguf", tmp_path / "model.gguf")
    (line,) = blocks("debug-a-wrong-reply.md", "sh")  # tests/test_docs.py runs it without the fault
    command = [sys.executable, "-m", *shlex.split(line), "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "\nlayers.0.mlp is the first value that jumps: " in done.stdout, done.stdout + done.stderr


def definitions(path: Path) -> set[str]:
    """Return the names of the classes, functions and methods that a file defines."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = set[str]()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, functions | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, functions)}
    return names


def test_the_files_and_functions_in_the_life_of_a_request_exist() -> None:
    page = (DOCS / "life-of-a-request.md").read_text("utf-8")
    assert re.findall(r"^## (\d)\. ", page, re.MULTILINE) == list("12345678")
    rows = re.findall(r"^\| `([\w/.]+)` \| (.+?) \|", page, re.MULTILINE)
    assert len(rows) > 30
    for path, names in rows:
        missing = set(re.findall(r"`([\w.]+)`", names)) - definitions(ROOT / path)
        assert not missing, f"{path} does not define {missing}"


def test_docs_stay_short() -> None:
    pages = [*DOCS.glob("add-*.md"), DOCS / "life-of-a-request.md", DOCS / "debug-a-wrong-reply.md"]
    assert [path.name for path in pages if len(path.read_text("utf-8").splitlines()) >= 120] == []


def test_the_page_of_models_has_the_architectures_of_the_registry() -> None:
    table = (DOCS / "models.md").read_text("utf-8").split("|---|---|---|---|---|\n")[1].split("\n\n")[0]
    for (name, architecture), row in zip(sorted(ARCHITECTURES.items()), table.splitlines(), strict=True):
        named = re.escape(f"| `{name}` | {architecture.models} |")
        numbers = r"\de-0[4-9] \| \de-0[3-9]"
        assert re.fullmatch(rf"{named} {numbers} \| (yes|–) \|", row), f"replace {row} (see above the table)"
    entries = (TINY | DIFFUSION).values(), ENCODERS.values(), ENCODER_DECODERS.values()
    assert {tiny.architecture for tiny in chain(*entries)} == set(ARCHITECTURES), "tests/models/tiny.py"
    assert f"[{len(ARCHITECTURES)} architectures](docs/models.md)" in (ROOT / "README.md").read_text("utf-8")
