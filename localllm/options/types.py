"""Types of options, and limits that several modules use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # the command line's help should not wait for numpy
    from typing import Any

    import numpy as np
    import numpy.typing as npt

#: Treatment of a prompt that is too long: reject it, or drop its oldest part.
Overflow = Literal["error", "truncate"]

#: Source of draft tokens: earlier text ("lookup"), the draft model, a block of the model's file ("mtp"), or the
#: available one of the last two ("auto").
Speculate = Literal["auto", "lookup", "draft", "mtp"]

#: Measure that selects the tokens which a step of diffusion keeps: see `localllm.engine.canvas`.
DiffusionAlgorithm = Literal["origin", "entropy", "margin", "random", "confidence"]

#: How GPUs share a model: whole layers per GPU, or a part of every layer.
SplitMode = Literal["layer", "row"]

#: Requests that share evaluated prompts: all requests, or requests with the same API key.
CacheScope = Literal["all", "key"]

#: Priority of requests: "background" requests wait for "normal" requests.
Priority = Literal["normal", "background"]

#: Called while a long prompt is evaluated, with the number of evaluated tokens and of all tokens.
Progress = Callable[[int, int], object]

#: Called with the token ids of prompt and reply (int32 ``[n]``, read-only) and the logits (float32 ``[n_vocab]``,
#: which may be changed in place).  Returns the new logits (float32 ``[n_vocab]``).
LogitsProcessor: TypeAlias = "Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], npt.NDArray[np.float32]]"

#: Changes rows of a value inside the model.  Arguments: rows (float32 ``[n_tokens, width]``) and their positions
#: (int64 ``[n_tokens]``).  Returns the new rows, or None to keep them.
Hook: TypeAlias = "Callable[[npt.NDArray[np.float32], npt.NDArray[np.int64]], npt.ArrayLike | None]"

#: Receives values inside the model: positions of tokens (int64 ``[n_tokens]``), and rows by the value's name.
OnValues: TypeAlias = "Callable[[npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]], object]"

#: Called while a model is loaded: "weights" with packed and total bytes, or "kernels" with the numbers of compiled
#: and of all kernels.  Kernels are compiled at the first start on a machine.
LoadProgress = Callable[[str, int, int], object]

#: Default maximum of drafts per step.  With the preceding token, the CPU kernels multiply them in one tile.
DEFAULT_DRAFTS = 7

#: Upper limit of drafts per step.
MAX_DRAFTS = 64
