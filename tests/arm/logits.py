"""Prints a greedy text and a digest of the logits' bits, of the demo model and of SmolLM2, where it is installed.

Two processors print the same.
"""

from __future__ import annotations

import hashlib

import numpy as np

import localllm
from localllm.library.demo import demo_path
from tests.real.models import smollm2

#: Longer than a tile of tokens, so that prompts are multiplied by slabs.
PROMPT = (
    "The quick brown fox jumps over the lazy dog. A local model runs on the machine that you have: Hello, who are"
)
N_TOKENS = 12


def main() -> None:
    for path in filter(None, (demo_path(), smollm2())):
        with localllm.load(path, device="cpu", context=256, threads=2) as llm:
            ids = llm.tokenize(PROMPT)
            done = llm.generate(ids, max_tokens=N_TOKENS, temperature=0.0)
            logits = np.ascontiguousarray(llm.logits([*ids, *done.ids]))
            print(path.name, len(ids), done.text, hashlib.sha256(logits).hexdigest(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
