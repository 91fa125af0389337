"""Compare image features, and ids decoded after them, with llama.cpp's mtmd on the same files.

    python -m tests.benchmarks.same_images             # the table of docs/images.md: minutes
    python -m tests.benchmarks.same_images gemma3      # one family

The files are converted from tiny random models of transformers.  Images have the encoder's size, so that llama.cpp's
method of resizing does not matter.  Distances are relative norms.  Each family runs in a separate process, because
llama.cpp aborts the process on unexpected files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import localllm
from localllm.engine.media import MediaTokens, PromptMedia
from tests.benchmarks.theirs import Mtmd
from tests.models.encoders.families import FAMILIES, make, picture
from tests.models.encoders.test_seeing import logits
from tests.models.encoders.test_transformers import encoded, features

Floats = npt.NDArray[np.float32]
#: Tokens to decode, and the texts before and after the image.
N = 8
BEFORE, BEHIND = "one", "what is it"

#: Token budgets of the published processors, for families whose files contain none for llama.cpp.
BUDGETS: dict[str, dict[str, int]] = {
    "gemma4v": {"max_soft_tokens": 280},
    "gemma4uv": {"max_soft_tokens": 280},
    "lfm2": {"min_image_tokens": 64, "max_image_tokens": 256},
}
#: Size in pixels of the position table that llama.cpp expects for MiniCPM-V.
MINICPM_SIZE = 980


def apart(ours: Floats, theirs: Floats) -> float | None:
    if ours.shape != theirs.shape:
        return None
    return float(f"{np.linalg.norm(ours - theirs) / np.linalg.norm(theirs):.1g}")


def compare(name: str, folder: Path) -> dict[str, Any]:
    FAMILIES[name] = replace(FAMILIES[name], options=FAMILIES[name].options | BUDGETS.get(name, {}))
    if name.startswith(("minicpm", "resampler")):
        FAMILIES[name].settings["vision_config"]["image_size"] = MINICPM_SIZE
    if name == "qwen3vl_merger":  # llama.cpp needs at least as many layers as there are added rows
        FAMILIES[name].settings["text_config"]["num_hidden_layers"] = 3
    if name == "gemma3nv":  # sizes that llama.cpp does not read from the file
        FAMILIES[name].settings["text_config"] |= {"hidden_size_per_layer_input": 256, "laurel_rank": 64}
        FAMILIES[name].settings["vision_config"]["hidden_size"] = 64  # the text model's
    model = make(name, folder)
    found: dict[str, Any] = {"family": name}
    with localllm.load(folder / "model.gguf", device="cpu", context=1024, threads=2) as llm:
        encoder = llm._encoder
        assert encoder is not None
        is_fixed = 0 < encoder.model.image_size <= 112 and not encoder.model.has_grid
        side = encoder.model.image_size if is_fixed else 128
        image = picture(side, side)
        for _ in range(3):  # until the image has the encoder's size
            prepared = encoder.prepare(image)
            if prepared.frames[0].shape == np.asarray(image).shape:
                break
            image = picture(*prepared.frames[0].shape[:2])
        prepared = encoder.prepare(image)
        (ours,) = encoded(encoder, [prepared])
        flat = np.asarray(ours).reshape(len(ours), -1)
        theirs = features(model, name, image)[1]
        found["transformers"] = apart(flat, theirs.reshape(len(theirs), -1))
        print(json.dumps(found), flush=True)
        mtmd = Mtmd(folder / "model.gguf", folder / "mmproj.gguf")
        chunks = mtmd.chunks(mtmd.image(np.asarray(image)), BEFORE, BEHIND)
        texts = [mtmd.tokens(chunk) for chunk in chunks]
        seen = [chunk for chunk, text in zip(chunks, texts, strict=True) if text is None]
        rows = np.concatenate([mtmd.encode(chunk) for chunk in seen])
        n_rows = min(len(flat), len(rows))  # localllm's images of Gemma 3n end with one more row
        found["mtmd"], found["tokens"] = apart(flat[:n_rows], rows[:n_rows]), [len(flat), len(rows)]
        print(json.dumps(found), flush=True)
        if len(rows) == len(flat):
            ids: list[int] = []
            placed: list[MediaTokens] = []
            known, first = encoder.as_media(prepared), 0
            for chunk, text in zip(chunks, texts, strict=True):
                if text is None:
                    n = int(mtmd.api.mtmd_input_chunk_get_n_tokens(chunk))
                    placed.append(MediaTokens(len(ids), known, first, n if n < len(flat) else 0))
                    text = known.ids[first : first + n]
                    first += n
                ids += text
            expected = mtmd.decode(chunks, N)
            for _ in range(N):
                ids.append(int(logits(llm, ids, PromptMedia(placed), len(ids) - 1)[0][-1].argmax()))
            found["same ids"] = ids[-N:] == expected
    return found


def run_each(module: str, names: list[str]) -> None:
    """Run a module for one family after another, and print the last result of each."""
    for name in names:
        command = [sys.executable, "-m", module, name]
        environment = os.environ | {"GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        said = [line for line in (done.stderr + done.stdout).splitlines() if line and not line.startswith("{")]
        why = next((line for line in said if "GGML_ASSERT" in line or "GGML_ABORT" in line), "".join(said[-1:]))
        print(lines[-1] if lines else name, why if done.returncode else "", flush=True)


def main() -> None:
    names = sys.argv[1:] or list(FAMILIES)
    if len(names) == 1:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compare(names[0], Path(folder))), flush=True)
        return
    run_each("tests.benchmarks.same_images", names)


if __name__ == "__main__":
    main()
