"""The file of the model that comes with localllm."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from localllm.errors import ModelNotFoundError


def demo_path() -> Path:
    path = Path(str(resources.files("localllm") / "data" / "demo.gguf"))
    if not path.is_file():
        raise ModelNotFoundError("this installation of localllm has no demo model: name a GGUF file")
    return path
