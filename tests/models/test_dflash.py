"""DFlash drafters: comparison with transformers' module, and drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.convert import Checkpoint
from localllm.convert.safetensors import read_folder
from localllm.engine.drafting.block import BlockDrafter
from localllm.errors import PromptCacheError
from localllm.gguf import GGUFFile
from localllm.loading import load
from localllm.loading.load import LoadOptions, plan_file
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.drafting import GREEDY, PROMPT, check_texts, recorded
from tests.helpers.engines import in_engine
from tests.models.tiny import CONFIG, PLAIN_ROPE, random_values, write_draft, write_target

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

#: The only tokens that these models write, so that some drafts are right; and the mask token.
LIKELY, MASK = [5, 6], 4
WINDOW, BLOCK = 9, 6


def with_drafter(
    folder: Path, name: str, *, few: bool = True, kinds: str = "sfs", activation: str = "silu"
) -> tuple[Path, Path, Any, Any]:
    """Create a tiny random model and a drafter for it; return their files and transformers models.

    With ``few`` the model writes only a few tokens.  ``kinds``: drafter layers, with a window (s) or without (f).
    """
    import torch
    import transformers

    path, model = write_target(folder, name, LIKELY if few else None)
    kept = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps"
    config = transformers.MuseGlimmerAssistantConfig(
        **{key: CONFIG[key] for key in kept.split()},
        num_hidden_layers=3,
        hidden_act=activation,
        rope_parameters=PLAIN_ROPE,
        max_position_embeddings=256,
        sliding_window=WINDOW,
        layer_types=[{"s": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds],
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=[0, 1, 2],
    )
    drafter = transformers.MuseGlimmerAssistantModel._from_config(config, attn_implementation="eager").eval()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for key, parameter in drafter.state_dict().items():
            parameter.copy_(torch.from_numpy(random_values(rng, key, tuple(parameter.shape), shifted=False)))
    drafter.save_pretrained(folder / "drafter")
    return path, write_draft(folder), model, drafter.float()


def expected_drafts(model: Any, drafter: Any, tokens: list[int], n: int) -> NDArray[np.float32]:
    """Return the logits of n drafts after a text [n, n_vocab], computed by transformers' modules."""
    import torch

    with torch.no_grad():
        hidden = torch.from_numpy(expected_states(model, drafter, tokens, n))
        logits: NDArray[np.float32] = model.get_output_embeddings()(hidden[1:]).numpy()
    return logits


def expected_states(model: Any, drafter: Any, tokens: list[int], n: int) -> NDArray[np.float32]:
    """Return the hidden states of a block of the last token and n masks [1 + n, d].

    Windows are llama.cpp's: a token attends to the previous tokens of its window, itself, and the whole block.
    """
    import torch

    n_before = len(tokens) - 1
    with torch.no_grad():
        states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
        context = torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
        table = model.get_input_embeddings().weight
        queries, keys = torch.arange(n_before, n_before + n + 1)[:, None], torch.arange(n_before + n + 1)[None]
        is_far = queries - keys >= WINDOW
        mask = torch.zeros(is_far.shape).masked_fill(is_far, float("-inf"))[None, None]
        hidden: NDArray[np.float32] = (
            drafter(
                noise_embeds=table[[tokens[-1], *[MASK] * n]][None],
                context_hidden_states=context,
                attention_mask={"full_attention": None, "sliding_attention": mask},
                use_cache=False,
            )
            .last_hidden_state[0]
            .numpy()
        )
    return hidden


@pytest.mark.parametrize(
    ("name", "activation"), [("llama", "silu"), ("llama", "gelu"), ("qwen3", "silu"), ("qwen35", "silu")]
)
def test_drafts_equal_those_of_transformers(
    name: str, activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drafts, model, drafter = with_drafter(tmp_path, name, few=False, activation=activation)
    seen = recorded(monkeypatch, BlockDrafter, "at_once")
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY, draft_always=True)
    assert len(seen) > 10
    assert max(len(ids) for _, ids, _ in seen) == BLOCK - 1
    for tokens, ids, (logits,) in seen:
        expected = expected_drafts(model, drafter, tokens, len(ids))
        assert np.abs(logits - expected).max() < 5e-3 * np.abs(expected).max()
        assert ids == expected.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("name", "cache_type"), [("llama", "f16"), ("llama", "q8_0"), ("gemma2", "f16"), ("qwen35", "f16")]
)
def test_a_text_is_the_same_with_its_drafts(name: str, cache_type: str, tmp_path: Path) -> None:
    path, drafts, *_ = with_drafter(tmp_path, name)
    with localllm.load(path, draft_model=drafts, context=256, threads=1, cache_type=cache_type) as llm:
        n_accepted = check_texts(llm, (1, 7))
    assert n_accepted > 5 or name == "gemma2"


def test_texts_that_lose_their_pages_to_others(tmp_path: Path) -> None:
    path, drafts, *_ = with_drafter(tmp_path, "llama", kinds="fff")
    prompts, options = [PROMPT[n : n + 4] for n in range(5)], GREEDY | {"max_tokens": 90}
    with localllm.load(path, draft_model=drafts, context=160, parallel=1, threads=1) as llm:
        alone = [llm.generate(prompt, **options, speculate=None).ids for prompt in prompts]
        llm.forget()
        many = list(llm.generate_many(prompts, **options, draft_always=True))
        assert [each.ids for each in many] == alone
        assert in_engine(llm, lambda loop: loop.counts.preempted) > 0


def test_keys_and_values_are_separate_from_the_models(tmp_path: Path) -> None:
    path, drafts, *_ = with_drafter(tmp_path, "llama")
    planned = plan_file(LoadOptions(path, draft_model=drafts, context=64, threads=1))
    with localllm.load(path, draft_model=drafts, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert llm.info.draft.architecture == "dflash"
        assert (llm.info.placement, llm.info.draft.placement) == planned.placements
        assert llm.info.draft.placement.kv_cache == 0
        kept = llm.info.placement.kv_cache
        llm.generate(PROMPT, max_tokens=1)
        llm.save_prompts(tmp_path / "prompts")
        llm.forget()
        llm.load_prompts(tmp_path / "prompts")
        done = llm.generate([*PROMPT, 5], **GREEDY | {"max_tokens": 10}, draft_always=True)
        assert done.usage.cached_tokens >= 32
        assert done.drafts is not None
        assert done.drafts.drafted > 5
    with localllm.load(path, context=64, threads=1) as llm:
        assert llm.info.placement.kv_cache < kept
        with pytest.raises(PromptCacheError, match="saved with a different model"):
            llm.load_prompts(tmp_path / "prompts")


def test_the_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    _, drafts, *_ = with_drafter(tmp_path, "llama")
    with GGUFFile.open(drafts) as file:
        values = file.metadata
        assert values["general.architecture"] == "dflash"
        assert list(values["dflash.target_layers"]) == [1, 2, 3]
        assert (values["dflash.block_size"], values["tokenizer.ggml.mask_token_id"]) == (BLOCK, MASK)
        assert values["dflash.attention.sliding_window"] == WINDOW
        assert list(values["dflash.attention.sliding_window_pattern"]) == [True, False, True]
        others = {name for name in file.tensors if not name.startswith("blk.")}
        assert others == {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}


def test_a_checkpoint_with_other_names(tmp_path: Path) -> None:
    """Checkpoints of z-lab use other names than transformers."""
    _, drafts, *_ = with_drafter(tmp_path, "llama")
    folder, other = tmp_path / "drafter", tmp_path / "other"
    other.mkdir()
    names = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    tensors = {names.get(name, name): tensor.read() for name, tensor in read_folder(folder).items()}
    write_safetensors(other / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "use_sliding_window": True}
    config["dflash_config"] = {name: config.pop(name) for name in ("mask_token_id", "target_layer_ids")}
    (other / "config.json").write_text(json.dumps(config))
    made = Checkpoint(other, target=Checkpoint(tmp_path / "model.hf"))
    with GGUFFile.open(drafts) as file:
        assert made.tensors.keys() == file.tensors.keys()
        for key in file.metadata:
            if not key.startswith("general."):
                np.testing.assert_array_equal(made.metadata[key], file.metadata[key], err_msg=key)


def test_a_model_that_is_read_again_is_still_drafted_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with LongRoPE whose loaded context is shorter than the one in its file."""
    path, drafts, *_ = with_drafter(tmp_path, "phi3-longrope", few=False)
    fit = load.fit
    monkeypatch.setattr(load, "fit", lambda planners, available, context, more: fit(planners, available, 16, more))
    read_again, contexts = load._ModelSource.read_again, list[int]()
    monkeypatch.setattr(load._ModelSource, "read_again", lambda *args: contexts.append(args[1]) or read_again(*args))
    with localllm.load(path, draft_model=drafts, threads=1, parallel=1) as llm:
        assert contexts == [16, 16]
        prompt, options = PROMPT[:5], GREEDY | {"max_tokens": 10}
        done = llm.generate(prompt, **options, draft_always=True)
        assert done.ids == llm.generate(prompt, **options, speculate=None).ids
        assert done.drafts is not None
        assert done.drafts.drafted > 5
