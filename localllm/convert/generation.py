"""``generation_config.json``: recommended sampling parameters and suppressed tokens as GGUF's keys.

Settings that are not listed here change nothing in the converted file: beams, truncations and lengths that requests
choose, and settings of training and memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert.settings import read_json
from localllm.errors import ModelError, quoted

#: GGUF's keys after "general.sampling." and their types, by names in generation_config.json.
_SAMPLING: dict[str, tuple[str, type]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", np.int32),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
    "penalty_last_n": ("penalty_last_n", np.int32),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "mirostat": ("mirostat", np.int32),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}

#: Settings that change every reply and have no key in GGUF files, with the values that change nothing.
_MEANT: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "guidance_scale": (1.0,),
    "sequence_bias": ({}, []),
    "stop_strings": ("", []),
    "watermarking_config": ({},),
}


def generation_keys(folder: Path, n_vocab: int) -> dict[str, Any]:
    """Return the keys of recommended sampling parameters and of tokens that replies never contain.

    Raises:
        ModelError: a setting changes every reply, but has no key in GGUF files.
    """
    values = read_json(folder / "generation_config.json")
    for name, harmless in _MEANT.items():
        value = values.get(name)
        if value is not None and value not in harmless:
            raise ModelError(
                f"generation_config.json has {name} = {quoted(value)}, for which GGUF files have no key: remove it "
                "from generation_config.json, and choose the setting in each request"
            )
    keys: dict[str, Any] = {}
    for name, (key, type_) in _SAMPLING.items():
        value = values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 31:
            keys[f"general.sampling.{key}"] = type_(value)
    tokens = values.get("suppress_tokens")
    tokens = tokens if isinstance(tokens, list) else []
    suppressed = [token for token in tokens if type(token) is int and 0 <= token < n_vocab]
    return keys | ({"tokenizer.ggml.suppress_tokens": suppressed} if suppressed else {})
