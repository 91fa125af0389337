"""Advice in loading errors: the user's limit, or a command that creates a loadable file."""

from __future__ import annotations

from pathlib import Path

import pytest

import localllm
from localllm.errors import GGUFError, NotEnoughMemoryError
from tests.helpers.checkpoints import write_checkpoint


def test_a_limit_that_the_user_set_is_named() -> None:
    with pytest.raises(NotEnoughMemoryError) as caught:
        localllm.load(None, max_memory=0.001)
    assert "but 0.00 GB is available: raise max_memory=0.001 or choose a smaller quantisation" in str(caught.value)
    assert "other programs" not in str(caught.value)


def test_a_limit_above_the_memory_is_not_named() -> None:
    with pytest.raises(NotEnoughMemoryError) as caught:
        localllm.load(None, max_memory=1e9, context=1 << 40)
    assert "max_memory" not in str(caught.value)


def test_a_checkpoint_is_to_be_converted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    for path in (folder, next(folder.glob("*.safetensors"))):
        with pytest.raises(GGUFError, match=f"Hugging Face checkpoint: localllm convert {folder} converts"):
            localllm.load(path)
    with pytest.raises(GGUFError, match="is a directory: name a"):
        localllm.load(tmp_path)
