"""The command that plants mistakes, on a checkout of two files."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.mutations.run import main

LIST = """
[[mutation]]
name = "{name}"
file = "sums.py"
old = "{old}"
new = "{new}"
tests = ["test_sums.py"]
"""
ENTRIES = [
    ("a difference", "a + b", "a - b"),
    ("the other way round", "return a", "return 0 + a"),
    ("gone", "a * b", "a"),
    ("twice", "a", "b"),
]


@pytest.mark.skipif(os.name != "posix" or shutil.which("git") is None, reason="needs git and POSIX sessions")
def test_what_becomes_of_each_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (root / "test_sums.py").write_text("import sums\n\n\ndef test_add():\n    assert sums.add(2, 3) == 5\n")
    path = tmp_path / "list.toml"
    path.write_text("".join(LIST.format(name=name, old=old, new=new) for name, old, new in ENTRIES))
    assert main([str(path), "--jobs", "2"], root) == 1
    assert capsys.readouterr().out.splitlines() == [
        "caught    sums.py: a difference",
        "survived  sums.py: the other way round",
        "stale     sums.py: gone",
        "stale     sums.py: twice",
        "1 caught, 2 stale, 1 survived",
    ]
    assert (root / "sums.py").read_text() == "def add(a, b):\n    return a + b\n"
    path.write_text(path.read_text().replace("test_sums.py", "test_none.py"))
    assert main([str(path)], root) == 2
    path.write_text(LIST.format(name="same", old="return a", new="return 0 + a") + 'survives = "it is the same"\n')
    assert main([str(path)], root) == 0
