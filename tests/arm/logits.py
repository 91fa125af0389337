"""Print a greedy text and a digest of the logits' bits, which are the same on any processor.

python -m tests.arm.logits MODEL      # MODEL: demo or smollm2; prints nothing if smollm2 is not installed
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import localllm
import tests.arm.native_compiler  # noqa: F401  # compiles for emulated processors
from localllm.catalog.demo import demo_path
from tests.real.models import smollm2

#: Longer than a tile of tokens, so that products use slabs.
PROMPT = (
    "The quick brown fox jumps over the lazy dog. A local model runs on the machine that you have: Hello, who are"
)
N_TOKENS = 12


MODELS = {"demo": demo_path, "smollm2": smollm2}


def main(model: str) -> None:
    if not (path := MODELS[model]()):
        return
    with localllm.load(path, device="cpu", context=256, threads=2) as llm:
        ids = llm.tokenize(PROMPT)
        done = llm.generate(ids, max_tokens=N_TOKENS, temperature=0.0)
        logits = np.ascontiguousarray(llm.logits([*ids, *done.ids]))
    print(path.name, len(ids), done.text, hashlib.sha256(logits).hexdigest(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
