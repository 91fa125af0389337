"""The programs of docs/integrations.md, run with the installed libraries and the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.helpers.data import ROOT
from tests.helpers.http_server import Serving, demo, serving

PAGE = (ROOT / "docs" / "integrations.md").read_text("utf-8")
URL = "http://127.0.0.1:8080"

#: Programs by their section and number in it.
PROGRAMS = {
    f"{section.partition(chr(10))[0]} {i}": program
    for section in PAGE.split("\n## ")[1:]
    for i, program in enumerate(re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
}

#: The packages that each program needs, and a regular expression for what it prints.
PRINTED = {
    "LangChain 0": (("langchain-openai",), r".+\nname=.* age=\d+\n"),
    "LangChain 1": (("langchain-core",), r".+name=.* age=\d+\n"),
    "LlamaIndex 0": (("llama-index-llms-openai-like",), r".+\n"),
    "LlamaIndex 1": (("llama-index-core",), r".+\n.+"),
    "DSPy 0": (("dspy",), r"(True|False)\n"),
    "outlines 0": (("outlines", "openai"), r"(good|bad)\n\d{3}\n"),
    "guidance 0": (("guidance", "openai"), r"(good|bad)  \d{3}\n"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(demo()) as started:
        yield started


def test_every_program_is_run() -> None:
    assert PROGRAMS.keys() == PRINTED.keys()


@pytest.mark.parametrize("name", PRINTED)
def test_program(name: str, server: Serving) -> None:
    """Run a program in a new process, because some of the libraries leave sockets open and change settings."""
    packages, printed = PRINTED[name]
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    settings = {"LANGSMITH_TRACING": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no network
    result = subprocess.run(
        [sys.executable, "-c", PROGRAMS[name].replace(URL, server.url)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | settings,
    )
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(printed, result.stdout, re.DOTALL), result.stdout
