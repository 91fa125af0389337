"""Features of sounds beside llama.cpp's mtmd on the same files, family by family: `same_images` for what hears.

python -m tests.benchmarks.same_sounds             # the table of docs/audio.md: minutes
python -m tests.benchmarks.same_sounds voxtral     # one family
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from localllm.loading.devices import open_devices
from localllm.loading.media_encoder import MediaEncoder
from tests.benchmarks.same_images import BEFORE, BEHIND, Mtmd, apart, run_each
from tests.models.encoders import test_hearing as hearing
from tests.models.encoders.test_transformers import encoded

#: Of Whisper's encoder: llama.cpp takes no other than its 30 seconds.
POSITIONS = 1500
SECONDS = 30.0


def chunks_of(mtmd: Mtmd, samples: hearing.Samples) -> list[Any]:
    """The chunks of a prompt with a sound."""
    api = mtmd.api
    data = (ctypes.c_float * len(samples)).from_buffer_copy(samples.tobytes())
    bitmap, chunks = api.mtmd_bitmap_init_from_audio(len(samples), data), api.mtmd_input_chunks_init()
    words = BEFORE.encode() + api.mtmd_default_marker() + BEHIND.encode()
    text = api.mtmd_input_text(words, len(words), False, True)
    if api.mtmd_tokenize(mtmd.context, chunks, ctypes.byref(text), (api.mtmd_bitmap_p_ctypes * 1)(bitmap), 1):
        raise SystemExit("llama.cpp cannot prepare the sound")
    found = [api.mtmd_input_chunks_get(chunks, i) for i in range(api.mtmd_input_chunks_size(chunks))]
    kind = api.MTMD_INPUT_CHUNK_TYPE_AUDIO
    return [chunk for chunk in found if api.mtmd_input_chunk_get_type(chunk) == kind]


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
    mtmd = Mtmd(folder)
    rows = np.concatenate([mtmd.encode(chunk) for chunk in chunks_of(mtmd, samples)])
    n = min(len(flat), len(rows))
    found |= {"mtmd": apart(flat[:n], rows[:n]), "tokens": [len(flat), len(rows)]}
    print(json.dumps(found), flush=True)


def main() -> None:
    names = sys.argv[1:] or list(hearing.FAMILIES)
    if len(names) > 1:
        run_each("tests.benchmarks.same_sounds", names)
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(names[0], Path(folder))


if __name__ == "__main__":
    main()
