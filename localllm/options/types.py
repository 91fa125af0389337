"""The types of options, and bounds that more than one module has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

#: What happens to a prompt that is too long: it is refused, or its oldest part is left out.
Overflow = Literal["error", "truncate"]

#: What drafts tokens for the model to verify: the text itself, the draft model, or ("auto") the draft model if there
#: is one.
Speculate = Literal["auto", "lookup", "draft", "mtp"]

#: How GPUs share a model: each has some of the layers, or a part of every layer.
SplitMode = Literal["layer", "row"]

#: Requests that somebody waits for, and those that can wait for them.
Priority = Literal["normal", "background"]

#: Called while a long prompt is evaluated, with the tokens done so far and those of the whole prompt.
Progress = Callable[[int, int], object]

#: Called while a model is loaded: "weights" with the bytes packed and the bytes of all, and "kernels" with the
#: kernels compiled and those to compile, which the first start on a machine has to do.
LoadProgress = Callable[[str, int, int], object]

#: Drafts a step at most where nobody asks for a number: with the token before them, as many as the CPU's kernels
#: multiply at once.
DEFAULT_DRAFTS = 7

#: Drafts a step that may be asked for at most.
MAX_DRAFTS = 64
