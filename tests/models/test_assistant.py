"""Gemma 4's assistants: comparison with transformers, and drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.convert import Checkpoint
from localllm.engine.drafting.assistant import AssistantDrafter
from localllm.errors import ModelError, UnsupportedArchitectureError, UsageError
from localllm.quantize import plan, run
from tests.helpers.drafting import GREEDY, PROMPT, check_texts, recorded
from tests.models.tiny import CONFIG, TINY, make_model, random_values, save, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

NAMES = ("gemma4-dense", "gemma4-e2b")


def with_assistant(folder: Path, name: str) -> tuple[Path, Path, Any, Any]:
    """Create a tiny random Gemma 4 and an assistant for it; return their files and transformers models."""
    import torch
    import transformers

    entry = TINY[name]
    model = make_model(entry)
    path = write(folder / "model.gguf", entry, model)
    own = {"hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp", "vocab_size_per_layer_input"}
    text = {key: v for key, v in (CONFIG | dict(entry.config)).items() if key not in own and v is not None}
    text |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "hidden_size_per_layer_input": 0}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 0}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.AutoConfig.for_model("gemma4_text", **text),
        backbone_hidden_size=model.config.hidden_size,
    )
    assistant = transformers.Gemma4AssistantForCausalLM._from_config(config, attn_implementation="eager").eval()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for key, parameter in assistant.state_dict().items():
            values = torch.from_numpy(random_values(rng, key, tuple(parameter.shape), shifted=False))
            parameter.copy_(values.to(torch.bfloat16))
    assistant.release, assistant.config.vocab_size = None, 300
    drafts = folder / "assistant.gguf"
    for _ in run(plan(Checkpoint(save(folder / "assistant", assistant)), drafts, "F32")):
        pass
    return path, drafts, model, assistant.float()


def expected_drafts(
    model: Any, assistant: Any, ids: list[int], n: int
) -> tuple[list[NDArray[np.float32]], list[int]]:
    """Return the logits of n drafts after a text, and the drafts, computed by transformers' modules."""
    import torch

    with torch.no_grad():
        done = model(
            torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        shared = dict(done.shared_kv_states)
        window = model.config.sliding_window
        keys, values = shared["sliding_attention"]
        shared["sliding_attention"] = keys[:, :, 1 - window :], values[:, :, 1 - window :]
        hidden, last = done.hidden_states[-1][:, -1:], torch.tensor([ids[-1:]])
        found, drafts = [], []
        for _ in range(n):
            out = assistant(
                inputs_embeds=torch.cat([model.get_input_embeddings()(last), hidden], -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=shared,
                use_cache=False,
            )
            found.append(out.logits[0, -1].numpy())
            last, hidden = out.logits.argmax(-1), out.last_hidden_state
            drafts.append(int(last))
    return found, drafts


@pytest.mark.parametrize("name", NAMES)
def test_drafts_equal_those_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, drafts, model, assistant = with_assistant(tmp_path, name)
    seen = recorded(monkeypatch, AssistantDrafter, "continued")
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY, draft_always=True, draft_max=3)
    assert len(seen) > 10
    for tokens, ids, logits in seen:
        expected, expected_ids = expected_drafts(model, assistant, tokens, len(ids))
        assert ids == expected_ids
        for ours, theirs in zip(logits, expected, strict=True):
            assert np.abs(ours[-1] - theirs).max() < 5e-3 * np.abs(theirs).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_a_text_is_the_same_with_its_drafts(name: str, cache_type: str, tmp_path: Path) -> None:
    path, drafts, *_ = with_assistant(tmp_path, name)
    with localllm.load(path, draft_model=drafts, context=128, threads=1, cache_type=cache_type) as llm:
        check_texts(llm, (1, 5))


def test_the_assistant_needs_no_cache(tmp_path: Path) -> None:
    path, drafts, *_ = with_assistant(tmp_path, NAMES[0])
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        assert llm.info.draft is not None
        assert llm.info.draft.architecture == "gemma4-assistant"
        assert llm.info.draft.placement.kv_cache == 0
        assert llm.info.placement.kv_cache > 0


def test_what_it_does_not_draft_for_is_refused(tmp_path: Path) -> None:
    _, drafts, *_ = with_assistant(tmp_path, NAMES[0])
    with pytest.raises(UnsupportedArchitectureError, match="draft model"):
        localllm.load(drafts)
    other = write(tmp_path / "llama.gguf", TINY["llama"], make_model(TINY["llama"]))
    with pytest.raises(UsageError, match="Gemma 4 alone"):
        localllm.load(other, draft_model=drafts)
    wider = replace(TINY[NAMES[0]], config={**TINY[NAMES[0]].config, "hidden_size": 96})
    write(tmp_path / "wider.gguf", wider, make_model(wider))
    with pytest.raises(ModelError, match="the assistant of this model"):
        localllm.load(tmp_path / "wider.gguf", draft_model=drafts)
