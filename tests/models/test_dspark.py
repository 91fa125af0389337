"""DSpark drafters: comparison with transformers' layers and a separate computation of the heads, and drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="needs the extra 'reference'")

import localllm
from localllm.convert.safetensors import read_folder
from localllm.engine.drafting.block import BlockDrafter
from localllm.engine.drafting.cost import StepCost
from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.loading.load import LoadOptions, plan_file
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.drafting import GREEDY, PROMPT, check_texts, recorded
from tests.models import test_dflash as dflash
from tests.models.test_dflash import BLOCK, LIKELY, MASK
from tests.models.tiny import write_draft

Array = NDArray[np.float32]

RANK = 24
#: Ids of the tokens of a small vocabulary of drafts.
IDS = np.array([*LIKELY, *range(10, 300, 7)])
#: Names in published checkpoints, by transformers' names.
NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass
class Heads:
    """The heads of a drafter, computed with numpy."""

    model: Any
    layers: Any
    from_last: bool
    tensors: dict[str, Array]
    ids: NDArray[np.int64]

    def drafts(self, tokens: list[int], n: int) -> tuple[list[int], list[float]]:
        """Return n drafts after a text, and the confidence of each; nothing without a confidence head."""
        states = dflash.expected_states(self.model, self.layers, tokens, n - self.from_last)
        states = states if self.from_last else states[1:]
        head = self.model.get_output_embeddings().weight.detach().numpy()
        head = self.tensors.get("lm_head.weight", head)
        last, ids, chances = tokens[-1], list[int](), list[float]()
        for state in states:
            embedding = self.tensors["markov_head.markov_w1.weight"][last]
            logits = head @ state + self.tensors["markov_head.markov_w2.weight"] @ embedding
            if "confidence_head.proj.weight" in self.tensors:
                weight, bias = (self.tensors[f"confidence_head.proj.{x}"] for x in ("weight", "bias"))
                chances.append(float(1 / (1 + np.exp(-(weight @ np.concatenate([state, embedding]) + bias)[0]))))
            last = int(self.ids[logits.argmax()])
            ids.append(last)
        return ids, chances


def with_drafter(
    folder: Path, name: str = "llama", *, few: bool = True, is_small: bool = False, **changes: Any
) -> tuple[Path, Path, Heads]:
    """Create a tiny random model and a drafter for it; return their files, and the drafter's heads.

    With ``is_small``, the drafter has a small vocabulary, no confidence head, and the format of another library.
    """
    path, drafts, model, layers = dflash.with_drafter(folder, name, few=few)
    width, n_vocab, rng = layers.config.hidden_size, model.config.vocab_size, np.random.default_rng(8)
    n_drafted = len(IDS) if is_small else n_vocab
    shapes = {"markov_head.markov_w1.weight": (n_vocab, RANK), "markov_head.markov_w2.weight": (n_drafted, RANK)}
    if is_small:
        shapes["lm_head.weight"] = (n_drafted, width)
    else:
        shapes |= {"confidence_head.proj.weight": (1, width + RANK), "confidence_head.proj.bias": (1,)}
    heads = {x: (rng.normal(0, 1.5 * shape[-1] ** -0.5, shape)).astype(np.float32) for x, shape in shapes.items()}
    if few:
        heads["markov_head.markov_w2.weight"][[i for i in range(n_drafted) if i not in LIKELY]] = 0
    if few and is_small:
        heads["lm_head.weight"][len(LIKELY) :] = 0
    tensors = {NAMES.get(x, x): tensor.read() for x, tensor in read_folder(folder / "drafter").items()}
    tensors |= heads
    if is_small:
        tensors["d2t"] = "I64", (IDS - np.arange(len(IDS))).astype(np.int64)
        tensors["t2d"] = "BOOL", np.isin(np.arange(n_vocab), IDS).astype(np.uint8)
    write_safetensors(folder / "drafter/model.safetensors", tensors)
    config = json.loads((folder / "drafter/config.json").read_text())
    config |= {"model_type": "qwen3", "use_sliding_window": True, "vocab_size": n_vocab}
    if is_small:
        layer_ids = [i + 1 for i in config.pop("target_layer_ids")]
        outer = {"block_size": config.pop("block_size"), "mask_token_id": config.pop("mask_token_id")}
        outer |= {"aux_hidden_state_layer_ids": layer_ids, "draft_vocab_size": n_drafted, "markov_rank": RANK}
        del config["architectures"]
        config = {"architectures": ["DSparkDraftModel"], "transformer_layer_config": config, **outer}
    else:
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "markov_head_type": "vanilla"}
    (folder / "drafter/config.json").write_text(json.dumps(config | changes))
    ids = IDS if is_small else np.arange(n_vocab)
    drafts.unlink()
    return path, write_draft(folder), Heads(model, layers, not is_small, heads, ids)


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_drafts_equal_a_separate_computation(
    name: str, is_small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drafts, heads = with_drafter(tmp_path, name, few=False, is_small=is_small)
    seen = recorded(monkeypatch, BlockDrafter, "at_once")
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY, draft_always=True)
    assert len(seen) > 10
    assert max(len(ids) for _, ids, _ in seen) == BLOCK - is_small
    for tokens, ids, _ in seen:
        assert ids == heads.drafts(tokens, len(ids))[0]


def test_drafts_end_if_the_confidence_is_low(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, drafts, heads = with_drafter(tmp_path, few=False)
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: most)
    seen = recorded(monkeypatch, BlockDrafter, "at_once")
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY)
    lengths = set()
    for tokens, ids, (logits,) in seen:
        expected, chances = heads.drafts(tokens, len(logits))
        assert all(abs(chance - 0.4) > 1e-3 for chance in chances), "too close to call"
        n = next((i for i, chance in enumerate(chances) if chance < 0.4), len(chances))
        assert ids == expected[:n]
        lengths.add(n)
    assert len(lengths) > 2


@pytest.mark.parametrize(
    ("name", "is_small", "cache_type"),
    [("llama", False, "f16"), ("llama", True, "q8_0"), ("gemma2", False, "f16"), ("qwen35", True, "f16")],
)
def test_a_text_is_the_same_with_its_drafts(name: str, is_small: bool, cache_type: str, tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path, name, is_small=is_small)
    with localllm.load(path, draft_model=drafts, context=256, threads=1, cache_type=cache_type) as llm:
        n_accepted = check_texts(llm, (1, 7))
    assert n_accepted > 3 or name == "gemma2"


def test_the_plan_includes_the_heads(tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path)
    planned = plan_file(LoadOptions(path, draft_model=drafts, context=64, threads=1))
    with localllm.load(path, draft_model=drafts, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert (llm.info.placement, llm.info.draft.placement) == planned.placements
        names = {weight.name for group in llm.info.draft.placement.groups for weight in group.packed}
        assert {"markov_w1.weight", "markov_w2.weight"} <= names


@pytest.mark.parametrize("is_small", [False, True])
def test_the_file_is_as_llama_cpp_reads_it(is_small: bool, tmp_path: Path) -> None:
    _, drafts, _ = with_drafter(tmp_path, is_small=is_small)
    with GGUFFile.open(drafts) as file:
        values = file.metadata
        assert values["general.architecture"] == "dflash"
        assert list(values["dflash.target_layers"]) == [1, 2, 3]
        assert (values["dflash.block_size"], values["tokenizer.ggml.mask_token_id"]) == (BLOCK, MASK)
        assert values["dflash.sample_from_anchor"] is not is_small
        assert values["dflash.has_confidence_head"] is not is_small
        others = {name for name in file.tensors if not name.startswith("blk.")}
        of_heads = {"d2t", "output.weight"} if is_small else {"conf_proj.weight", "conf_proj.bias"}
        of_heads |= {"markov_w1.weight", "markov_w2.weight"}
        assert others == {"fc.weight", "enc.output_norm.weight", "output_norm.weight"} | of_heads


def test_pairs_of_neighbours_are_reordered(tmp_path: Path) -> None:
    plain, swapped = tmp_path / "plain", tmp_path / "swapped"
    for folder in (plain, swapped):
        folder.mkdir()
        with_drafter(folder, **({"rope_is_neox_style": False} if folder is swapped else {}))
    with GGUFFile.open(plain / "drafter.gguf") as a, GGUFFile.open(swapped / "drafter.gguf") as b:
        for name in ("attn_q.weight", "attn_k_norm.weight", "attn_v.weight"):
            x, y = (np.array(file.tensors[f"blk.0.{name}"].data).view(np.float32) for file in (a, b))
            dim = a.tensors["blk.0.attn_k_norm.weight"].shape[0]
            rows = x.reshape(-1, dim, x.shape[-1]) if x.ndim > 1 else x[None, :, None]
            rows = rows if "_v" in name else np.concatenate([rows[:, ::2], rows[:, 1::2]], axis=1)
            assert np.array_equal(rows.reshape(x.shape), y)


def test_another_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="markov_head_type = 'gated', but GGUF files mean vanilla"):
        with_drafter(tmp_path, markov_head_type="gated")
