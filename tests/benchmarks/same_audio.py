"""Compare audio features with llama.cpp's mtmd on the same files, as `same_images` does for images.

python -m tests.benchmarks.same_audio             # the table of docs/audio.md: minutes
python -m tests.benchmarks.same_audio voxtral     # one family
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from localllm.loading.devices import open_devices
from localllm.loading.media_encoder import MediaEncoder
from tests.benchmarks.same_images import BEFORE, BEHIND, apart, run_each
from tests.benchmarks.theirs import Mtmd
from tests.models.encoders import test_hearing as hearing
from tests.models.encoders.test_transformers import encoded

#: Positions of Whisper's encoder: llama.cpp supports only 30 seconds of audio.
POSITIONS = 1500
SECONDS = 30.0


def compare(name: str, folder: Path) -> None:
    hearing.N_POSITIONS = hearing.WHISPER["max_source_positions"] = POSITIONS
    family = hearing.made(name, folder)
    samples = hearing.sound(SECONDS)
    encoder, (host, *_) = MediaEncoder.open(folder / "mmproj.gguf"), open_devices("cpu", threads=2)
    encoder.backend = host.backend
    (ours,) = encoded(encoder, [encoder.prepare(samples, kind="audio")])
    flat = np.asarray(ours).reshape(len(ours), -1)
    theirs = family.features(samples).numpy()
    theirs = theirs.reshape(-1, theirs.shape[-1])[: len(flat)]
    found: dict[str, Any] = {"family": name, "transformers": apart(flat, theirs)}
    print(json.dumps(found), flush=True)
    mtmd = Mtmd(folder / "model.gguf", folder / "mmproj.gguf")
    chunks = mtmd.chunks(mtmd.audio(samples), BEFORE, BEHIND)
    rows = np.concatenate([mtmd.encode(chunk) for chunk in chunks if mtmd.tokens(chunk) is None])
    n = min(len(flat), len(rows))
    found |= {"mtmd": apart(flat[:n], rows[:n]), "tokens": [len(flat), len(rows)]}
    print(json.dumps(found), flush=True)


def main() -> None:
    names = sys.argv[1:] or list(hearing.FAMILIES)
    if len(names) > 1:
        run_each("tests.benchmarks.same_audio", names)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(names[0], Path(folder))


if __name__ == "__main__":
    main()
