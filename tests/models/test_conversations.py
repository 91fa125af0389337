"""Models with recurrent layers and windows keep a conversation: the next turn evaluates only new tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.engine import cache as cache_module
from tests.models.tiny import TINY, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

#: Tokens between two snapshots of a prompt in this test.
INTERVAL = 64


WINDOWED = ["olmo3", "gemma4-e2b", "gpt-oss", "llama4"]
RECURRENT = ["qwen35", "qwen3next", "nemotron-h", "granitehybrid", "lfm2", "kimi-linear", "falcon-h1", "mamba2"]
RECURRENT += ["mamba", "jamba", "glm-5.3", "bailingmoe3", "lfm3", "qwen4exp"]
SPARSE = ["glm-5", "hy-v4", "deepseek-v3.2", "minimax-m3"]


def write_long(folder: Path, name: str) -> Path:
    """Write a tiny model with 512 positions."""
    config, longer = TINY[name].config, {"max_position_embeddings": 512}
    longer = {"text_config": config["text_config"] | longer} if "text_config" in config else longer
    entry = replace(TINY[name], config={**config, **longer})
    return write(folder / "model.gguf", entry, make_model(entry))


@pytest.mark.parametrize("name", [*RECURRENT[:3], WINDOWED[0]])
def test_omitted_reasoning_costs_its_own_turn_only(name: str, tmp_path: Path) -> None:
    """Templates omit earlier reasoning, so that the next prompt differs in the opening of the reply."""
    path = write_long(tmp_path, name)
    rng = np.random.default_rng(0)
    with localllm.load(path, context=512, threads=1) as llm:
        end, opening = min(llm.tokenizer.eog_ids), rng.integers(3, 300, 6).tolist()
        chat = [*rng.integers(3, 300, 40).tolist(), end]
        for _ in range(3):
            llm.generate([*chat, *opening], temperature=0, max_tokens=12, ignore_eos=True)
            added = [*opening[:3], *rng.integers(3, 300, 12).tolist(), end]
            chat += added
            usage = llm.generate([*chat, *opening], max_tokens=1, ignore_eos=True).usage
            assert usage.prompt_tokens - usage.cached_tokens <= len(added) + len(opening)


@pytest.mark.parametrize("name", WINDOWED + RECURRENT + SPARSE)
def test_ten_turns_with_edits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)
    path = write_long(tmp_path, name)
    rng = np.random.default_rng(0)
    options = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
    with localllm.load(path, context=512, threads=1) as llm, localllm.load(path, context=512, threads=1) as fresh:
        chat = rng.integers(3, 300, 70).tolist()
        held = 0
        for turn in range(10):
            if turn == 4:  # the last message is edited
                chat, held = chat[:-20], len(chat) - 20
            if turn == 7:  # a reply is regenerated: the prompt is the same
                chat, held = chat[:-9], len(chat) - 9
            else:
                chat += rng.integers(3, 300, 7).tolist()
            fresh.forget()
            done, expected = llm.generate(chat, **options), fresh.generate(chat, **options)
            assert done.ids == expected.ids
            n_evaluated = done.usage.prompt_tokens - done.usage.cached_tokens
            # The last generated token is not yet evaluated; after a cut, evaluation starts at a snapshot.
            assert n_evaluated <= len(chat) - held + 1 + (INTERVAL if turn in (4, 7) else 0), turn
            chat += done.ids
            held = len(chat)
