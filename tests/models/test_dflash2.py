"""DFlash 2 drafters: comparison with a separate computation in numpy, and drafts."""

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
from localllm.errors import ModelError
from localllm.gguf import GGUFFile
from localllm.loading.load import LoadOptions, plan_file
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.drafting import GREEDY, PROMPT, check_texts, recorded
from tests.models import test_dflash as dflash
from tests.models.test_dflash import BLOCK, LIKELY, MASK, WINDOW
from tests.models.test_dspark import NAMES
from tests.models.tiny import CONFIG, write_draft

Array = NDArray[np.float64]

KERNEL, GROUP, RANK, CANDIDATES = 3, 16, 24, 5
SETTINGS = {"conv_kernel_size": KERNEL, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": CANDIDATES}
SCALE, SOFTCAP = 0.75, 20.0


def normed(x: Array, weight: Array) -> Array:
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight
    return y


def rotated(x: Array, positions: NDArray[np.int64]) -> Array:
    """Rotate heads [T, H, dim] by their positions; pairs are the first and the second half."""
    half = x.shape[-1] // 2
    angles = (positions[:, None] * 10_000.0 ** (-np.arange(half) / half))[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


@dataclass
class Drafter:
    """The drafter, computed in float64 from the tensors of its checkpoint.

    Without convolutions, it is a DFlash drafter.
    """

    model: Any
    tensors: dict[str, Array]
    kinds: str

    def states(self, tokens: list[int], n: int) -> Array:
        """Return the hidden states of a block of the last token and n masks [1 + n, d]."""
        import torch

        n_before, of, dim = len(tokens) - 1, self.tensors, CONFIG["head_dim"]
        with torch.no_grad():
            states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True, use_cache=False).hidden_states
            table = self.model.get_input_embeddings().weight.double().numpy()
        read = np.concatenate([states[i + 1][0].double().numpy() for i in range(3)], axis=-1)
        context = normed(read @ of["fc.weight"].T, of["hidden_norm.weight"])
        x = table[[tokens[-1], *[MASK] * n]]
        positions = np.arange(n_before + 1 + n)
        for i, kind in enumerate(self.kinds):
            layer = {name.removeprefix(f"layers.{i}."): array for name, array in of.items() if f"layers.{i}." in name}
            y = normed(x, layer["input_layernorm.weight"])
            conv = self.convolutions(layer, "attention_conv", y)
            y = conv(y, 0)

            def heads(name: str, rows: Array, layer: dict[str, Array] = layer) -> Array:
                return (rows @ layer[f"self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, dim)

            q = rotated(normed(heads("q", y), layer["self_attn.q_norm.weight"]), positions[n_before:])
            both = np.concatenate([context, y])
            k = rotated(normed(heads("k", both), layer["self_attn.k_norm.weight"]), positions)
            has_values, group = "self_attn.v_proj.weight" in layer, q.shape[1] // k.shape[1]
            v = heads("v", both) if has_values else normed(heads("k", both), np.ones(dim))
            scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * dim**-0.5
            if kind == "s":
                scores[:, positions[n_before:, None] - positions >= WINDOW] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            y = np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, axis=1)).reshape(len(x), -1)
            x = x + conv(y @ layer["self_attn.o_proj.weight"].T, 1)
            y = normed(x, layer["post_attention_layernorm.weight"])
            conv = self.convolutions(layer, "mlp_conv", y)
            y = conv(y, 0)
            gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            z = y @ gate.T
            x = x + conv((z / (1 + np.exp(-z)) * (y @ up.T)) @ down.T, 1)
        return normed(x, of["norm.weight"])

    def convolutions(self, layer: dict[str, Array], name: str, y: Array) -> Any:
        """Return the function of the convolution before (side 0) or after (side 1) attention or the MLP."""
        if f"{name}.base_kernel" not in layer:
            return lambda x, side: x
        factors = (y @ layer[f"{name}.kernel_projection.weight"].T).reshape(len(y), 2, KERNEL, -1)

        def convolved(x: Array, side: int) -> Array:
            out = np.zeros_like(x)
            for t in range(len(x)):
                for j in range(min(KERNEL, t + 1)):
                    kernel = layer[f"{name}.base_kernel"][side, j] + np.repeat(factors[t, side, j], GROUP)
                    out[t] += kernel * x[t - j]
            return out

        return convolved

    def drafts(self, tokens: list[int], n: int) -> tuple[list[int], list[float]]:
        """Return n drafts after a text, and the probability of each among its candidates."""
        states, head = self.states(tokens, n)[1:], self.model.get_output_embeddings().weight.detach().double().numpy()
        logits = SOFTCAP * np.tanh(SCALE * (states @ head.T) / SOFTCAP)
        before, after, of_state = (
            self.tensors[f"candidate_selector.{name}"]
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        last, ids, chances = tokens[-1], list[int](), list[float]()
        for state, row in zip(states, logits, strict=True):
            candidates = np.argsort(-row, kind="stable")[:CANDIDATES]
            scores = row[candidates] + after[candidates] @ (before[last] * (of_state @ state))
            last = int(candidates[scores.argmax()])
            ids.append(last)
            chances.append(float(1 / np.exp(scores - scores.max()).sum()))
        return ids, chances


def with_drafter(
    folder: Path, name: str = "llama", *, few: bool = True, has_values: bool = True, **changes: Any
) -> tuple[Path, Path, Drafter]:
    """Create a tiny random model and a drafter for it; return their files, and the drafter in numpy.

    Without ``has_values``, values are the keys before their norm, as in Gemma 4's drafters.
    """
    kinds = "sfs"
    path, drafts, model, _ = dflash.with_drafter(folder, name, few=few, kinds=kinds)
    tensors = {NAMES.get(x, x): tensor.read() for x, tensor in read_folder(folder / "drafter").items()}
    config = json.loads((folder / "drafter/config.json").read_text())
    d, n_vocab, rng = config["hidden_size"], model.config.vocab_size, np.random.default_rng(9)
    drafts.unlink()
    if not has_values:
        tensors = {x: array for x, array in tensors.items() if "v_proj" not in x}
    for i in range(len(kinds)):
        for of in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
            base = rng.normal(0, 0.3, (2, KERNEL, d))
            base[:, 0] += 1
            tensors[f"{of}.base_kernel"] = base.astype(np.float32)
            n_factors = 2 * KERNEL * (d // GROUP)
            factors = rng.normal(0, 0.3 * d**-0.5, (n_factors, d)).astype(np.float32)
            tensors[f"{of}.kernel_projection.weight"] = factors
    for x, n_rows, width in (
        ("predecessor_codebook", n_vocab, RANK), ("successor_codebook", n_vocab, RANK),
        ("hidden_projection.weight", RANK, d),
    ):  # fmt: skip
        values = rng.normal(0, 1 if width == RANK else d**-0.5, (n_rows, width))
        tensors[f"candidate_selector.{x}"] = values.astype(np.float32)
    if few:
        for x in ("predecessor", "successor"):
            rows = [i for i in range(n_vocab) if i not in LIKELY]
            tensors[f"candidate_selector.{x}_codebook"][rows] = 0
    write_safetensors(folder / "drafter/model.safetensors", tensors)
    config |= {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "use_sliding_window": True}
    names = ("block_size", "mask_token_id", "target_layer_ids")
    config["dflash_config"] = {x: config.pop(x) for x in names} | SETTINGS | changes
    config["dflash_config"] |= {"output_multiplier": SCALE, "final_logit_softcapping": SOFTCAP}
    (folder / "drafter/config.json").write_text(json.dumps(config))
    drafts = write_draft(folder)
    floats = {x: np.array(array, np.float64) for x, array in tensors.items() if not isinstance(array, tuple)}
    if tensors["fc.weight"].dtype == np.uint16:  # bfloat16
        floats = {
            x: (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64) if a.dtype == np.uint16 else floats[x]
            for x, a in tensors.items()
        }
    return path, drafts, Drafter(model, floats, kinds)


def test_the_computation_in_numpy_equals_transformers_without_convolutions(tmp_path: Path) -> None:
    _, _, model, layers = dflash.with_drafter(tmp_path, "llama", few=False)
    tensors = {NAMES.get(x, x): tensor.read() for x, tensor in read_folder(tmp_path / "drafter").items()}
    drafter = Drafter(model, {x: np.array(array, np.float64) for x, array in tensors.items()}, "sfs")
    expected = dflash.expected_states(model, layers, PROMPT, 4)
    assert np.abs(drafter.states(PROMPT, 4) - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("name", "has_values"), [("llama", True), ("llama", False), ("qwen35", True)])
def test_drafts_equal_the_computation_in_numpy(
    name: str, has_values: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, drafts, drafter = with_drafter(tmp_path, name, few=False, has_values=has_values)
    seen = recorded(monkeypatch, BlockDrafter, "at_once")
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY, draft_always=True)
    assert len(seen) > 10
    assert max(len(ids) for _, ids, _ in seen) == BLOCK - 1
    for tokens, ids, _ in seen:
        assert ids == drafter.drafts(tokens, len(ids))[0]


@pytest.mark.parametrize(("name", "cache_type"), [("llama", "f16"), ("gemma2", "q8_0")])
def test_a_text_is_the_same_with_its_drafts(name: str, cache_type: str, tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path, name)
    with localllm.load(path, draft_model=drafts, context=256, threads=1, cache_type=cache_type) as llm:
        n_accepted = check_texts(llm, (1, 7))
    assert n_accepted > 3 or name == "gemma2"


def test_the_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path)
    with GGUFFile.open(drafts) as file:
        values = file.metadata
        assert values["general.architecture"] == "dflash"
        assert {name: values[f"dflash.{name}"] for name in SETTINGS} == SETTINGS
        assert (values["dflash.logit_scale"], values["dflash.final_logit_softcapping"]) == (SCALE, SOFTCAP)
        assert {name for name in file.tensors if "conv" in name or "selector" in name} == {
            *(f"selector_{name}.weight" for name in ("predecessor", "successor", "hidden")),
            *(f"blk.{i}.{name}" for i in range(3) for name in ("attn_conv_base", "ffn_conv_base")),
            *(f"blk.{i}.{name}.weight" for i in range(3) for name in ("attn_conv_proj", "ffn_conv_proj")),
        }
        assert file.tensors["blk.0.attn_conv_base"].shape == (2, KERNEL, CONFIG["hidden_size"])
    planned = plan_file(LoadOptions(path, draft_model=drafts, context=64, threads=1))
    with localllm.load(path, draft_model=drafts, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert (llm.info.placement, llm.info.draft.placement) == planned.placements


def test_odd_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"conv_group_size is 8, but must be between 16 and"):
        with_drafter(tmp_path, conv_group_size=8)
