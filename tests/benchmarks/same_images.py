"""Features of pictures, and the ids decoded after them, beside llama.cpp's mtmd on the same files, family by family.

    python -m tests.benchmarks.same_images             # the table of docs/images.md: minutes
    python -m tests.benchmarks.same_images gemma3      # one family

The files are tiny random models of transformers, which this converts; the picture has the size that the encoder
wants, so that llama.cpp's own way to resize takes no part.  Distances are relative norms.  Each family runs in a
process of its own, for llama.cpp ends the process where it finds something odd.
"""

from __future__ import annotations

import ctypes
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
from tests.benchmarks.theirs import LlamaCpp
from tests.models.encoders.families import FAMILIES, make, picture
from tests.models.encoders.test_seeing import logits
from tests.models.encoders.test_transformers import encoded, features

Floats = npt.NDArray[np.float32]
#: Tokens to decode, and what is asked.
N = 8
BEFORE, BEHIND = "one", "what is it"

#: Budgets of tokens as published processors have them, where llama.cpp reads none in the file.
BUDGETS: dict[str, dict[str, int]] = {
    "gemma4v": {"max_soft_tokens": 280},
    "gemma4uv": {"max_soft_tokens": 280},
    "lfm2": {"min_image_tokens": 64, "max_image_tokens": 256},
}
#: The size of the table of positions that llama.cpp expects of MiniCPM-V, in pixels.
MINICPM_SIZE = 980


class Mtmd:
    """llama.cpp with a model and its encoder."""

    def __init__(self, folder: Path) -> None:
        import llama_cpp.mtmd_cpp as api

        self.api, self.model = api, LlamaCpp(folder / "model.gguf", repack=False)
        parameters = api.mtmd_context_params_default()
        parameters.use_gpu = parameters.print_timings = parameters.warmup = False
        parameters.n_threads = 2
        self.context = api.mtmd_init_from_file(str(folder / "mmproj.gguf").encode(), self.model._model, parameters)
        if not self.context:
            raise SystemExit("llama.cpp cannot load the encoder")

    def chunks(self, pixels: npt.NDArray[np.uint8]) -> list[Any]:
        """The chunks of a prompt with a picture."""
        api, height, width = self.api, *pixels.shape[:2]
        data = (ctypes.c_uint8 * pixels.size).from_buffer_copy(pixels.tobytes())
        bitmap, chunks = api.mtmd_bitmap_init(width, height, data), api.mtmd_input_chunks_init()
        words = BEFORE.encode() + api.mtmd_default_marker() + BEHIND.encode()
        text = api.mtmd_input_text(words, len(words), False, True)
        if api.mtmd_tokenize(self.context, chunks, ctypes.byref(text), (api.mtmd_bitmap_p_ctypes * 1)(bitmap), 1):
            raise SystemExit("llama.cpp cannot prepare the picture")
        return [api.mtmd_input_chunks_get(chunks, i) for i in range(api.mtmd_input_chunks_size(chunks))]

    def tokens(self, chunk: Any) -> list[int] | None:
        """Those of a text; None of a picture."""
        if self.api.mtmd_input_chunk_get_type(chunk) == self.api.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            return None
        n = ctypes.c_size_t()
        ids = self.api.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(n))
        return [int(ids[i]) for i in range(n.value)]

    def encode(self, chunk: Any) -> Floats:
        if self.api.mtmd_encode_chunk(self.context, chunk):
            raise SystemExit("llama.cpp cannot encode the picture")
        n = self.api.mtmd_input_chunk_get_n_tokens(chunk)
        width = int(self.model._api.llama_model_n_embd_inp(self.model._model))
        return np.ctypeslib.as_array(self.api.mtmd_get_output_embd(self.context), (n, width)).copy()

    def decode(self, chunks: list[Any]) -> list[int]:
        """The ids that follow."""
        context = self.model.context(2, 1024, flash=False)
        n_past = ctypes.c_int32(0)
        for chunk in chunks:
            failed = self.api.mtmd_helper_eval_chunk_single(
                self.context, context._handle, chunk, n_past, 0, 512, True, ctypes.byref(n_past)
            )
            if failed:
                raise SystemExit("llama.cpp cannot evaluate the prompt")
        return context.generate(N)[1]


def apart(ours: Floats, theirs: Floats) -> float | None:
    if ours.shape != theirs.shape:
        return None
    return float(f"{np.linalg.norm(ours - theirs) / np.linalg.norm(theirs):.1g}")


def compare(name: str, folder: Path) -> dict[str, Any]:
    FAMILIES[name] = replace(FAMILIES[name], options=FAMILIES[name].options | BUDGETS.get(name, {}))
    if name.startswith(("minicpm", "resampler")):
        FAMILIES[name].settings["vision_config"]["image_size"] = MINICPM_SIZE
    if name == "qwen3vl_merger":  # llama.cpp takes no fewer layers than have rows added
        FAMILIES[name].settings["text_config"]["num_hidden_layers"] = 3
    model = make(name, folder)
    found: dict[str, Any] = {"family": name}
    with localllm.load(folder / "model.gguf", device="cpu", context=1024, threads=2) as llm:
        encoder = llm._encoder
        assert encoder is not None
        is_fixed = encoder.model.image_size <= 112 and not encoder.model.has_grid
        side = encoder.model.image_size if is_fixed else 128
        image = picture(side, side)
        for _ in range(3):  # until it has the size that the encoder wants
            prepared = encoder.prepare(image)
            if prepared.frames[0].shape == np.asarray(image).shape:
                break
            image = picture(*prepared.frames[0].shape[:2])
        (ours,) = encoded(encoder, [prepared])
        flat = np.asarray(ours).reshape(len(ours), -1)
        theirs = features(model, name, image)[1]
        found["transformers"] = apart(flat, theirs.reshape(len(theirs), -1))
        print(json.dumps(found), flush=True)
        mtmd = Mtmd(folder)
        chunks = mtmd.chunks(np.asarray(image))
        texts = [mtmd.tokens(chunk) for chunk in chunks]
        seen = [chunk for chunk, text in zip(chunks, texts, strict=True) if text is None]
        rows = np.concatenate([mtmd.encode(chunk) for chunk in seen])
        found["mtmd"], found["tokens"] = apart(flat, rows), [len(flat), len(rows)]
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
            expected = mtmd.decode(chunks)
            for _ in range(N):
                ids.append(int(logits(llm, ids, PromptMedia(placed), len(ids) - 1)[0][-1].argmax()))
            found["same ids"] = ids[-N:] == expected
    return found


def run_each(module: str, names: list[str]) -> None:
    """Runs a module for one family after the other, and prints what each found last."""
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
