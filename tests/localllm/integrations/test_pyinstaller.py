"""A one-folder PyInstaller program runs, also without a kernel cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.integrations.pyinstaller import hook_folders

PROGRAM = """
import localllm

schema = {"type": "object", "properties": {"is_day": {"type": "boolean"}}, "required": ["is_day"]}
with localllm.load() as llm:
    print(llm.generate("Is it day?", json_schema=schema, temperature=0).text)
"""


def test_a_folder_that_pyinstaller_makes_runs_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("PyInstaller", reason="PyInstaller is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    left_out = [word for name in ("torch", "transformers", "cupy", "pytest") for word in ("--exclude-module", name)]
    hooks = [word for folder in hook_folders() for word in ("--additional-hooks-dir", folder)]
    command = [sys.executable, "-m", "PyInstaller", "--log-level", "ERROR", *left_out, *hooks, "program.py"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = os.environ | {"LOCALLLM_CACHE": str(tmp_path / "kernels"), "PYTHONPATH": ""}
    program = [tmp_path / "dist" / "program" / "program"]
    text = subprocess.run(program, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    assert text.strip() in ('{"is_day": true}', '{"is_day": false}')
    assert list((tmp_path / "kernels").iterdir())
