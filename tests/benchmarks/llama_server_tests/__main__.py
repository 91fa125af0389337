"""Run llama.cpp's tests of its server against ``localllm serve``; count passes, and list the reasons of failures.

    python -m tests.benchmarks.llama_server_tests llama.cpp/tools/server/tests --models FOLDER

The tests are in the source of llama-cpp-python, under vendor.  FOLDER contains stories260K.gguf, and embeds.gguf, any
model that returns vectors of 384 values.  A model with random weights replaces tinygemma3, and data URLs of made-up
images replace the images on the hub.  The text of its replies is not compared.  Needs the packages requests,
filelock, torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.benchmarks.llama_server_tests import server
from tests.benchmarks.llama_server_tests.reasons import NOT_HERE, reason_of
from tests.helpers.data import ROOT
from tests.models.encoders.families import make, picture
from tests.models.encoders.test_seeing import TEMPLATE

#: Replaces the conftest of the tests, which downloads all models.
CONFTEST = """
import base64
import os
import pytest
from utils import server_instances

if (worker := os.environ.get("PYTEST_XDIST_WORKER", "")):
    os.environ["PORT"] = str(8080 + 10 * int(worker.removeprefix("gw")))

@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(server_instances):
        server.stop()

@pytest.fixture(autouse=True)
def stand_in_for_the_hub(request, monkeypatch):
    if request.module.__name__.endswith("test_vision_api"):
        def picture(name):
            kind, _, number = name.rpartition("_")
            if not kind.startswith("IMG_"):
                return name
            with open(os.path.join(os.environ["MODELS"], number + ".png"), "rb") as file:
                data = base64.b64encode(file.read()).decode()
            return data if kind == "IMG_BASE64" else "data:image/png;base64," + data
        monkeypatch.setattr(request.module, "get_img_url", picture)
        monkeypatch.setattr(request.module, "match_regex", lambda *_: True)
"""


def write_models(folder: Path, given: Path) -> None:
    """Write links to the given models, and a model with random weights that reads images, with images for it."""
    for path in given.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARKER", "<start_of_image>"))
    make("gemma3", folder)
    (folder / "model.gguf").rename(folder / "tinygemma3.gguf")
    for number in range(2):
        picture(32, 32 + number).save(folder / f"{number}.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("-k", default="", help="only tests whose names match")
    parser.add_argument("--keep", type=Path, help="write the output of the tests to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tools", "server", "tests")
        shutil.copytree(given.folder, folder)
        Path(scratch, "models").symlink_to(given.folder.resolve().parents[2] / "models")  # chat templates
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "wget.py").write_text("")  # only downloads need it
        binary = Path(scratch) / "llama-server"
        binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m {server.__name__} "$@"\n')
        binary.chmod(0o755)
        report = Path(scratch) / "report.xml"
        models = Path(scratch, "made")
        models.mkdir()
        write_models(models, given.models)
        environment = os.environ | {
            "LLAMA_SERVER_BIN_PATH": str(binary),
            "MODELS": str(models),
            "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", "-n", "2"]
        command += [
            "--junitxml",
            str(report),
            "-o",
            "junit_logging=all",
            *(["-k", given.k] if given.k else []),
            "unit",
        ]
        subprocess.run(command, cwd=folder, env=environment, check=False)
        if given.keep is not None:
            shutil.copy(report, given.keep)
        return told(report)


def told(report: Path) -> int:
    """Print the outcomes of the tests; return 0 if each failure has a known reason."""
    outcomes: Counter[str] = Counter()
    unknown: list[str] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"
        problem = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if case.find("skipped") is not None:
            outcomes["skipped by llama.cpp's own marks"] += 1
        elif problem is None:
            outcomes["passed"] += 1
        else:
            text = "".join(case.itertext()) + str(problem.get("message"))
            reason = reason_of(name, text)
            outcomes[reason or "failed without a known reason"] += 1
            if reason is None:
                said = re.findall(r"^(?:E  |localllm: error: |localllm serve: error: ).*", text, re.MULTILINE)
                unknown.append(f"{name}: {' | '.join(said[-2:])}")
    for outcome, n in outcomes.most_common():
        print(f"{n:4} {outcome}")
    n_failed = sum(n for outcome, n in outcomes.items() if outcome != "passed" and outcome not in NOT_HERE)
    n_failed -= outcomes["skipped by llama.cpp's own marks"]
    print(f"passed, of tests that can pass: {outcomes['passed'] / max(1, outcomes['passed'] + n_failed):.1%}")
    print(*unknown, sep="\n")
    return bool(unknown)


if __name__ == "__main__":
    sys.exit(main())
