"""Stand in for the binary ``llama-server`` in llama.cpp's tests: start ``localllm serve`` with the same flags.

Tests name models on the hub.  Files in the folder of the environment variable ``MODELS`` replace them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Files by ``--hf-repo``, or ``--hf-repo/--hf-file``.
MODELS = {
    "ggml-org/test-model-stories260K": "stories260K.gguf",
    "ggml-org/models/tinyllamas/stories260K.gguf": "stories260K.gguf",
    "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": "embeds.gguf",
    "ggml-org/tinygemma3-GGUF:Q8_0": "tinygemma3.gguf",
}

#: Error for other models; tests that end with it are counted separately.
NO_MODEL = "needs a model that is not available"


def arguments(given: list[str]) -> list[str]:
    """Return the command line of ``localllm serve``."""
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
