"""Stands in for the binary ``llama-server`` in llama.cpp's tests: starts ``localllm serve`` with its flags.

Models are named on the hub, where tests do not look: those that are here in the folder of the environment variable
``MODELS`` take their places.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Files by what tests ask the hub for: ``--hf-repo``, or ``--hf-repo/--hf-file``.
MODELS = {
    "ggml-org/test-model-stories260K": "stories260K.gguf",
    "ggml-org/models/tinyllamas/stories260K.gguf": "stories260K.gguf",
    "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": "embeds.gguf",
    "ggml-org/tinygemma3-GGUF:Q8_0": "tinygemma3.gguf",
}

#: What is said of the others; `localllm.tests` counts tests that end so apart.
NO_MODEL = "needs a model that is not here"


def arguments(given: list[str]) -> list[str]:
    """The command line of ``localllm serve``."""
    names: dict[str, str] = {}
    rest: list[str] = []
    words = iter(given)
    for word in words:
        if word in ("--hf-repo", "--hf-file"):
            names[word] = next(words)
        elif word in ("--temp", "--seed") or word not in ("--offline",):
            rest.append(word)
    if "--hf-repo" in names:
        name = "/".join(names[key] for key in ("--hf-repo", "--hf-file") if key in names)
        path = Path(os.environ["MODELS"]) / MODELS.get(name, "none")
        if not path.is_file():
            sys.exit(f"{NO_MODEL}: {name}")
        rest = ["-m", str(path), *rest]
    return ["-m", "localllm", "serve", *rest]


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, *arguments(sys.argv[1:])])
