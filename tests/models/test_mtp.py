"""The block that predicts further tokens: against transformers' own layers, and what it drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.engine.drafting import mtp
from localllm.engine.drafting.cost import StepCost
from localllm.errors import ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import HostOutput
from localllm.kernels.reference import ReferenceBackend
from localllm.models.registry import read_model
from localllm.quant.types import GGMLType
from tests.helpers import tiny_models
from tests.helpers.engines import in_engine
from tests.models.tiny import TINY, make_model, write

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]
PROMPT = [1, *np.random.default_rng(0).integers(3, 300, 40).tolist()]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


def with_block(path: Path, name: str, *, copied: bool = False, **changes: Array | None) -> tuple[Path, Any]:
    """A tiny random model with a block behind it, whose layer is the same as the model's last.

    With ``copied``, no layer changes anything, and the block knows the token that follows: it predicts what the model
    will.  Changes are tensors of the block by their names behind "nextn.", with _ for a point.
    """
    entry = replace(TINY[name], config={**TINY[name].config, "max_position_embeddings": 512})
    model = make_model(entry)
    last, d, rng = model.config.num_hidden_layers - 1, model.config.hidden_size, np.random.default_rng(3)
    if copied:
        for key, parameter in model.state_dict().items():
            if "layers." in key and ("o_proj" in key or "out_proj" in key or "down_proj" in key):
                parameter.zero_()
    write(path, entry, model)
    with GGUFFile.open(path) as file:
        metadata = {key: value for key, value in file.metadata.items() if not key.startswith("general.")}
        metadata = {
            key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()
        }
        metadata["tokenizer.ggml.tokens"] = list(metadata["tokenizer.ggml.tokens"])
        tensors = {n: (np.array(t.data).view(np.float32).reshape(t.shape), t.type) for n, t in file.tensors.items()}
    assert {type for _, type in tensors.values()} == {GGMLType.F32}
    metadata |= {f"{entry.architecture}.block_count": last + 2, f"{entry.architecture}.nextn_predict_layers": 1}
    if (recurrent := f"{entry.architecture}.attention.recurrent_layers") in metadata:
        metadata[recurrent] = [*metadata[recurrent], False]
    block = {n.replace(f"blk.{last}.", f"blk.{last + 1}."): t for n, t in tensors.items() if f"blk.{last}." in n}
    eye = np.eye(d, 2 * d, dtype=np.float32)
    nextn: Mapping[str, Array | None] = {
        "eh_proj": eye if copied else rng.normal(0, 0.1, (d, 2 * d)).astype(np.float32),
        **{x: (np.ones(d) if copied else rng.uniform(0.5, 1.5, d)).astype(np.float32) for x in ("enorm", "hnorm")},
        "shared_head_norm": None if copied else rng.uniform(0.5, 1.5, d).astype(np.float32),
        **changes,
    }
    prefix = f"blk.{last + 1}.nextn."
    block |= {f"{prefix}{x}.weight": (t, GGMLType.F32) for x, t in nextn.items() if t is not None}
    return tiny_models.write_file(path.with_suffix(".mtp.gguf"), entry.architecture, metadata, tensors | block), model


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek-v3"])
def test_the_block_computes_what_transformers_layer_does(name: str, tmp_path: Path) -> None:
    import torch

    path, model = with_block(tmp_path / "model.gguf", name)
    n = len(PROMPT) - 1
    with GGUFFile.open(path) as file, torch.no_grad():
        graph = read_model(file, is_block=True).graph
        prefix = f"blk.{model.config.num_hidden_layers}.nextn."
        own = {
            x: torch.tensor(np.array(file.tensors[f"{prefix}{x}.weight"].data).view(np.float32))
            for x in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
        }
        hidden = model.model(torch.tensor([PROMPT[:-1]]), use_cache=False).last_hidden_state

        def norm(x: Any, weight: Any) -> Any:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps) * weight

        e = model.model.embed_tokens(torch.tensor([PROMPT[1:]]))
        x = torch.cat([norm(e, own["enorm"]), norm(hidden, own["hnorm"])], -1) @ own["eh_proj"].T
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        rotation = model.model.rotary_emb(x, positions)
        y = model.model.layers[-1](x, attention_mask=mask, position_embeddings=rotation, position_ids=positions)
        y = y[0] if isinstance(y, tuple) else y
        expected = model.lm_head(norm(y, own["shared_head_norm"]))[0].numpy()
        step = ReferenceBackend().compile(graph, n_pages=(8,), max_tokens=64, max_outputs=64)
        batch = localllm_batch(PROMPT[1:], step.cache.page_size)
        ours = step.run(batch, HostOutput(hidden[0].numpy())).rows()
    assert np.abs(ours - expected).max() < 5e-3 * np.abs(expected).max()


def localllm_batch(ids: list[int], page_size: int) -> Any:
    from localllm.kernels.backend import Batch

    n = len(ids)
    return Batch(
        ids=np.array(ids, np.int32),
        positions=np.arange(n, dtype=np.int32),
        query_starts=np.array([0, n], np.int32),
        kv_lengths=np.array([n], np.int32),
        block_tables=np.arange(-(-n // page_size), dtype=np.int32)[None, None],
        outputs=np.arange(n, dtype=np.int32),
    )


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts at every step, whether they pay or not."""
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: most)
    monkeypatch.setattr(mtp, "MIN_PROBABILITY", 0.0)


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "glm4moe", "deepseek-v3"])
@pytest.mark.usefixtures("always")
def test_a_text_is_the_same_with_drafts(name: str, tmp_path: Path) -> None:
    path, _ = with_block(tmp_path / "model.gguf", name)
    with localllm.load(path, context=256, threads=1) as llm:
        in_engine(llm, lambda loop: loop._cost.add(1, 1.0))
        chat = PROMPT
        for turn in range(3):  # each begins in the midst of what the cache has
            llm.forget() if turn == 1 else None
            expected = llm.generate(chat, **GREEDY, speculate=None)
            assert expected.drafts is None
            for draft_max in (1, 5):
                done = llm.generate(chat, **GREEDY, draft_max=draft_max)
                assert done.ids == expected.ids
                assert done.drafts is not None
                assert done.drafts.drafted > 10
            chat = [*chat, *expected.ids, 5, 6, 7]


@pytest.mark.usefixtures("always")
def test_a_block_that_copies_the_head_is_always_right(tmp_path: Path) -> None:
    path, _ = with_block(tmp_path / "model.gguf", "qwen35", copied=True)
    with localllm.load(path, context=256, threads=1) as llm:
        in_engine(llm, lambda loop: loop._cost.add(1, 1.0))
        assert llm.info.draft is not None
        assert llm.info.draft.n_layers == 1
        for _ in range(2):
            expected = llm.generate(PROMPT, **GREEDY, speculate=None)
            done = llm.generate(PROMPT, **GREEDY, speculate="mtp", draft_max=4)
            assert done.ids == expected.ids
            assert done.drafts is not None
            assert done.drafts.share == 1
            assert done.drafts.steps <= 9
            sampled = GREEDY | {"temperature": 1.0, "seed": 1}
            expected = llm.generate(PROMPT, **sampled, speculate=None)
            done = llm.generate(PROMPT, **sampled)
            assert done.ids == expected.ids
            assert done.drafts is not None
            assert 0 < done.drafts.share < 1
            many = list(llm.generate_many([PROMPT[:n] for n in (3, 20, 41)], **GREEDY))
            assert all(each.drafts is not None and each.drafts.share == 1 for each in many)


def test_a_block_that_is_always_wrong_is_left_alone(tmp_path: Path) -> None:
    head = -read_head(with_block(tmp_path / "a.gguf", "qwen35", copied=True)[0])
    path, _ = with_block(tmp_path / "b.gguf", "qwen35", copied=True, shared_head_head=head)
    with localllm.load(path, context=512, threads=1) as llm:
        in_engine(llm, lambda loop: loop._cost.add(1, 1.0))
        done = llm.generate(PROMPT, **{**GREEDY, "max_tokens": 300})
        assert done.drafts is not None
        assert done.drafts.accepted == 0
        assert done.drafts.drafted < 60


def read_head(path: Path) -> Array:
    with GGUFFile.open(path) as file:
        tensor = file.tensors["output.weight"]
        return np.array(tensor.data).view(np.float32).reshape(tensor.shape)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    whole, _ = with_block(tmp_path / "a.gguf", "qwen35")
    partly, _ = with_block(tmp_path / "b.gguf", "qwen35", enorm=None)
    without, _ = with_block(tmp_path / "c.gguf", "qwen35", eh_proj=None)
    with pytest.raises(ModelError, match=r"the file has no tensor blk\.4\.nextn\.enorm\.weight"):
        localllm.load(partly)
    with localllm.load(without, threads=1) as llm:  # one without its block, as some are published
        assert llm.generate(PROMPT, **GREEDY).drafts is None
        with pytest.raises(UsageError, match="speculate is 'mtp', but the model has no block"):
            llm.generate(PROMPT, speculate="mtp")
    with localllm.load(whole, threads=1, draft_model=without) as llm, pytest.raises(UsageError, match="draft_model"):
        llm.generate(PROMPT, speculate="mtp")
