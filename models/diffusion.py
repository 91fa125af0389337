"""Settings of language models that write by diffusion: they replace mask tokens.

All tokens of prompt and reply see each other. The reply starts as mask tokens, and each step replaces some masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from localllm.errors import ModelError
from localllm.models.config import read_architecture

#: Texts of mask tokens, for files without ``tokenizer.ggml.mask_token_id``.
_MASKS = ("<|mdm_mask|>", "<|mask|>")


@dataclass(frozen=True)
class Diffusion:
    """How a model writes by default, from its release, and the keys of its file."""

    n_tokens: int  # tokens of a reply
    block_length: int  # tokens of a block: the blocks are written in order; 0 writes the whole reply at once
    algorithm: str  # which tokens a step keeps: see `localllm.engine.canvas`
    tempers: bool  # whether temperature and truncation change the confidence in a token
    sampling: Mapping[str, Any] = field(default_factory=dict)  # changes to greedy sampling
    shifts: bool = True  # whether the logits of a token are computed at the position before the token
    mask_id: int = -1  # mask token; -1 before `read`

    def read(self, metadata: Mapping[str, Any], n_vocab: int) -> Self:
        """Return the settings with a file's keys. Raises ModelError if the file has no valid mask token."""
        shifts = metadata.get("diffusion.shift_logits", self.shifts)
        if not isinstance(shifts, bool):
            raise ModelError("diffusion.shift_logits must be true or false: the file is broken")
        mask = metadata.get("tokenizer.ggml.mask_token_id")
        if mask is None:
            tokens = list(metadata.get("tokenizer.ggml.tokens", ()))
            mask = next((tokens.index(text) for text in _MASKS if text in tokens), None)
        if mask is None:
            raise ModelError(
                f"the file has no tokenizer.ggml.mask_token_id, which a {read_architecture(metadata)} model needs: "
                "convert the checkpoint again"
            )
        if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < n_vocab:
            raise ModelError(f"tokenizer.ggml.mask_token_id is not one of the {n_vocab:,} tokens: the file is broken")
        return replace(self, shifts=shifts, mask_id=mask)


#: LLaDA (``generate.py`` and ``chat.py`` of its release) and LLaDA-MoE.
LLADA = Diffusion(128, 32, "confidence", tempers=False, shifts=False)
#: Dream 7B (its model card).
DREAM = Diffusion(512, 0, "entropy", tempers=True, sampling={"temperature": 0.2, "top_p": 0.95})
#: RND1 (``sampling.py`` of its release).
RND1 = Diffusion(256, 256, "entropy", tempers=True)
