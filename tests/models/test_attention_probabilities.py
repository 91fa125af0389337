"""Attention probabilities of every architecture, compared with the attentions that transformers returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm import UsageError
from localllm.inspection import tools
from tests.models.test_transformers import IDS, model_of
from tests.models.tiny import TINY, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")


#: Models with different operations: windows and soft-caps, sinks, norms of heads, ALiBi, latents, chunks, shared
#: keys, rotation of some values, and recurrent layers. Only CI runs the others.
QUICK = (
    *("llama", "gemma2", "gemma3", "gpt-oss", "qwen3", "bloom", "deepseek-v3", "llama4", "gemma4-e2b"),
    *("gptneox", "mistral3", "qwen35", "mamba2", "glm-5"),
)
#: Models without softmax attention, and models with layers whose tokens attend to selected or compressed positions.
RECURRENT = ("falcon-mamba", "mamba", "mamba2")
SELECTING = (
    "axk2",
    "deepseek-v3.2",
    "deepseek-v4",
    "dots3note",
    "glm-5",
    "glm-5.3",
    "hy-v4",
    "minimax-m3",
    "qwen4exp",
)
#: Models whose probabilities in transformers are not yet reduced by the sinks.
WITHOUT_SINKS = ("granite-swa", "granite-swa-moe")
#: Largest error, and the larger one of a model with large scores, whose keys the cache rounds to float16.
LIMIT, LIMITS = 5e-3, {"muse-glimmer": 1e-2}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.ci) for name in TINY if not TINY[name].written],
)
def test_probabilities_equal_transformers(name: str, tmp_path: Path) -> None:
    import torch

    path = write(tmp_path / "model.gguf", TINY[name], model_of(name))
    with localllm.load(path, device="reference", context=64) as llm:
        layers = [int(value.split(".")[1]) for value in llm.graph if value.endswith(".queries")]
        if name in RECURRENT:
            with pytest.raises(UsageError, match=r"^layer 0 has no softmax attention: .* \(none\)$"):
                tools.attention(llm, IDS, [(0, 0)])
            return
        if name in SELECTING:
            with pytest.raises(UsageError, match=r"attends to selected or compressed positions"):
                tools.attention(llm, IDS, [(layer, 0) for layer in layers])
            return
        with torch.no_grad():
            attentions = model_of(name)(torch.tensor([IDS]), use_cache=False, output_attentions=True).attentions
        expected = [layer[0].numpy() for layer in attentions if layer is not None]
        if name == "minimax-01":  # transformers returns something else for linear attention, too
            expected = [expected[i] for i in layers]
        heads = [(i, head) for i, layer in zip(layers, expected, strict=True) for head in range(len(layer))]
        probabilities = tools.attention(llm, IDS, heads)
    if name in WITHOUT_SINKS:
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(probabilities, np.concatenate(expected), atol=LIMITS.get(name, LIMIT))
