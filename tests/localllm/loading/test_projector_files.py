"""The projector file that belongs to a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.errors import UnsupportedArchitectureError
from localllm.loading.projector_files import find_projectors, projector_names
from localllm.models.encoders.registry import projectors_of

ALPHA = ["alpha-7b-it-Q8_0.gguf", "mmproj-alpha-7b-it-f16.gguf", "mmproj-alpha-7b-it-Q8_0.gguf"]
BETA = ["beta-7b-it-Q8_0.gguf", "mmproj-beta-7b-it-f16.gguf"]


@pytest.mark.parametrize(
    ("model", "others", "projectors"),
    [
        # several models
        ("alpha-7b-it-Q8_0.gguf", ALPHA + BETA, ["mmproj-alpha-7b-it-f16.gguf", "mmproj-alpha-7b-it-Q8_0.gguf"]),
        ("beta-7b-it-Q8_0.gguf", ALPHA + BETA, ["mmproj-beta-7b-it-f16.gguf"]),
        ("alpha-7b-it-UD-Q4_K_XL.gguf", [*ALPHA[1:2], *BETA], ["mmproj-alpha-7b-it-f16.gguf"]),
        ("gamma-1b-Q8_0.gguf", ALPHA, []),
        ("gamma-1b.gguf", ["beta.gguf", "mmproj-F16.gguf"], []),
        ("Alpha.Q4_K_M.gguf", ["Alpha.mmproj-f16.gguf", "Beta.Q8_0.gguf"], ["Alpha.mmproj-f16.gguf"]),
        (
            "nano-text-model-f16.gguf",
            ["nano-mmproj-f16.gguf", "other-Q8_0.gguf", "other-mmproj.gguf"],
            ["nano-mmproj-f16.gguf"],
        ),
        ("qwen2.5-vl-7b-q8_0.gguf", ["mmproj-qwen2.5-vl-72b-f16.gguf", "qwen2.5-vl-72b-q4_0.gguf"], []),
        ("g-4b-it.gguf", ["mmproj-g-4b-it.gguf", "mmproj-g-12b-it.gguf", "g-12b-it.gguf"], ["mmproj-g-4b-it.gguf"]),
        # the longer name first, and a name with a suffix
        (
            "g-4b-it-qat-q4_0.gguf",
            ["mmproj-g-4b-it.gguf", "mmproj-g-4b-it-qat.gguf", "x.gguf"],
            ["mmproj-g-4b-it-qat.gguf", "mmproj-g-4b-it.gguf"],
        ),
        ("g-4b.gguf", ["mmproj-g-4b-it.gguf", "x.gguf"], ["mmproj-g-4b-it.gguf"]),
        ("g.gguf", ["mmproj-g-4b-it.gguf", "g-4b.gguf"], []),
        ("g.gguf", ["mmproj-F16.gguf", "g-eagle3.gguf"], ["mmproj-F16.gguf"]),
        # one model in several types, split, and next to its statistics
        (
            "m-Q4_K_M-00001-of-00002.gguf",
            ["m-Q4_K_M-00002-of-00002.gguf", "m-BF16.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "imatrix.gguf"],
            ["mmproj-F16.gguf", "mmproj-BF16.gguf"],
        ),
        ("ggml-model-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], ["mmproj-model-f16.gguf"]),
        ("Llama-1B-Q4_K_M.gguf", ["mmproj-ultravox-llama-1b-f16.gguf"], ["mmproj-ultravox-llama-1b-f16.gguf"]),
    ],
)
def test_projectors_belong_to_models_by_name(model: str, others: list[str], projectors: list[str]) -> None:
    assert projector_names(model, [model, *others]) == projectors
    assert projector_names(model, [*reversed(others), model]) == projectors


def test_projectors_of_a_folder(tmp_path: Path) -> None:
    for name in ALPHA + BETA:
        (tmp_path / name).touch()
    own, others = find_projectors(tmp_path / BETA[0])
    assert (own, others) == ([tmp_path / BETA[1]], [tmp_path / ALPHA[2], tmp_path / ALPHA[1]])


@pytest.mark.parametrize("value", [np.zeros(3, np.int32), 7, ["mlp"], np.zeros(3, bool)])
def test_projectors_of_the_wrong_type(value: object) -> None:
    metadata = {"general.architecture": "clip", "clip.projector_type": value, "clip.has_audio_encoder": value}
    with pytest.raises(UnsupportedArchitectureError, match="of the mmproj file is not supported"):
        projectors_of(metadata)
