"""Settings of generation_config.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.convert import Checkpoint
from localllm.errors import LocalLLMError
from tests.helpers.checkpoints import write_checkpoint


def converted(folder: Path, file: str, values: dict[str, Any]) -> Checkpoint:
    write_checkpoint(folder)
    (folder / file).write_text(json.dumps(values))
    return Checkpoint(folder)


def test_recommended_sampling_has_llama_cpps_keys(tmp_path: Path) -> None:
    values = {"temperature": 1, "top_k": 20, "repetition_penalty": 1.05, "xtc_threshold": 0.2, "mirostat": 2}
    metadata = converted(tmp_path, "generation_config.json", values | {"top_p": None, "min_p": True}).metadata
    found = {key.removeprefix("general.sampling."): value for key, value in metadata.items() if "sampling" in key}
    expected = {"temp": 1.0, "top_k": 20, "penalty_repeat": np.float32(1.05), "xtc_threshold": np.float32(0.2)}
    assert found == expected | {"mirostat": 2}
    assert isinstance(found["temp"], float)
    assert type(found["top_k"]) is int


def test_tokens_that_replies_never_contain_are_written(tmp_path: Path) -> None:
    metadata = converted(tmp_path, "generation_config.json", {"suppress_tokens": [7, 299, 300, -1, "a"]}).metadata
    assert np.asarray(metadata["tokenizer.ggml.suppress_tokens"]).tolist() == [7, 299]


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("generation_config.json", "bad_words_ids", [[7]]),
        ("generation_config.json", "begin_suppress_tokens", [7]),
        ("generation_config.json", "forced_bos_token_id", 7),
        ("generation_config.json", "guidance_scale", 1.5),
        ("generation_config.json", "sequence_bias", [[[7], 1.0]]),
        ("generation_config.json", "stop_strings", ["###"]),
        ("tokenizer_config.json", "split_special_tokens", True),
        ("tokenizer_config.json", "sp_model_kwargs", {"enable_sampling": True}),
    ],
)
def test_settings_that_change_every_text_are_refused(file: str, name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(LocalLLMError, match=f"{file} has {name} = .*, for which GGUF files have no key: remove it"):
        converted(tmp_path, file, {name: value})


def test_settings_that_requests_choose_are_not_refused(tmp_path: Path) -> None:
    values = {"num_beams": 4, "early_stopping": True, "no_repeat_ngram_size": 3, "length_penalty": 2.0}
    values |= {"bad_words_ids": None, "stop_strings": [], "max_new_tokens": 100, "anything": 1}
    converted(tmp_path, "generation_config.json", values)
