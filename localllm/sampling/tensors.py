"""Logits processors of Hugging Face transformers, which take and return torch tensors."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def takes_tensors(processor: object) -> bool:
    """Return whether a function is a LogitsProcessor or a LogitsProcessorList of transformers."""
    # Without an import of transformers, there is no instance of its classes.
    module: Any = sys.modules.get("transformers.generation.logits_process")
    return module is not None and isinstance(processor, module.LogitsProcessor | module.LogitsProcessorList)


def call_with_tensors(processor: Any, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> Any:
    """Call a processor with tensors int64 [1, n] and float32 [1, n_vocab].

    Return its tensor as a float32 array, or another result unchanged.
    """
    import torch

    result = processor(torch.from_numpy(ids.astype(np.int64))[None], torch.from_numpy(logits.copy())[None])
    return result.detach().to("cpu", torch.float32).numpy() if isinstance(result, torch.Tensor) else result
