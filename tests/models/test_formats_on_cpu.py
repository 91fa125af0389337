"""Complete tiny models on the CPU backend, in every format with an encoder, and mixtures of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localllm.quant.types import GGMLType
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner
from tests.helpers.tiny_models import tiny_gguf

FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
T = GGMLType
FORMATS = (*FLOATS, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K)
#: Architectures with the formats of their matrices.
MODELS = [("qwen3" if type == T.Q8_0 else "llama", type) for type in FORMATS]
MODELS += [("mixtral", T.Q4_0), ("qwen3_moe", T.Q4_K), ("qwen3_moe", T.F16)]
#: Longer than a page of the cache, and not a multiple of a tile of tokens.
IDS = np.random.default_rng(0).integers(3, 300, 77).tolist()


@pytest.mark.parametrize(("architecture", "type"), MODELS, ids=str)
def test_decode_equals_prefill_and_both_the_reference(tmp_path: Path, architecture: str, type: GGMLType) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", architecture, type=type, head_dim=16)
    runner = Runner(path, CPUOps(threads=2), n_pages=4)
    prefilled = runner.logits(IDS)

    # With another page order, one token at a time after a prompt.
    pages = (3, 1)
    decoded = [runner.run((IDS[:60], 0, pages))]
    decoded += [runner.run(([token], place, pages)) for place, token in enumerate(IDS[60:], 60)]
    # Exactly equal: a token's result does not depend on the batch.
    np.testing.assert_array_equal(np.concatenate(decoded), prefilled)

    exact = Runner(path, ReferenceOps(), n_pages=8).logits(IDS)
    error = np.linalg.norm(prefilled - exact) / np.linalg.norm(exact)
    # The remaining error comes from 8-bit activations and float16 keys and values.
    assert error < (1e-3 if type in FLOATS else 3e-2)
