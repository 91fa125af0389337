"""DeepSeek V4's DSpark drafter: comparison with transformers' layers, and drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.convert import Checkpoint
from localllm.convert.safetensors import read_folder
from localllm.engine.drafting.block import BlockDrafter
from localllm.engine.runner import BatchItem
from localllm.errors import UsageError
from localllm.gguf import GGUFFile
from localllm.loading.load import LoadOptions, plan_file
from localllm.quantize import plan, run
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.drafting import GREEDY, PROMPT, check_texts, recorded
from tests.models.test_deepseek4_mtp import ENTRY
from tests.models.tiny import make_model, write

torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

Array = NDArray[np.float32]

RANK, BLOCK, MASK = 16, 5, 4
#: Layers of the model that the drafter copies.
COPIED = (3, 4)
TARGET = replace(
    ENTRY,
    config=ENTRY.config
    | {
        "num_hidden_layers": 5,
        "layer_types": [*ENTRY.config["layer_types"], "sliding_attention"],
        "mlp_layer_types": [*ENTRY.config["mlp_layer_types"], "moe"],
    },
)


@dataclass
class Context:
    """A cache for transformers' attention that contains the keys of the text."""

    keys: Any

    def update(self, keys: Any, values: Any, layer: int, **_: Any) -> tuple[Any, Any]:
        both = torch.cat([self.keys, keys], dim=2)
        return both, both


@dataclass
class Drafter:
    """The drafter, computed with transformers' modules."""

    model: Any
    tensors: dict[str, Any]

    def rows(self, tokens: list[int]) -> Any:
        """Return the rows that the drafter's keys are computed from [T, d], for a text."""
        found: list[Any] = []
        hooks = [
            self.model.model.layers[i].register_forward_hook(lambda module, inputs, output: found.append(output))
            for i in range(3)
        ]
        with torch.no_grad():
            self.model(torch.tensor([tokens]), use_cache=False)
            for hook in hooks:
                hook.remove()
            read = torch.cat([streams[0].mean(dim=1) for streams in found], dim=-1)
            return self.norm(read @ self.tensors["mtp.0.main_proj.weight"].T, self.tensors["mtp.0.main_norm.weight"])

    def norm(self, x: Any, weight: Any) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps)
        return x * scale * weight

    def drafts(self, rows: Array, last: int, n: int) -> tuple[list[int], list[float], Array]:
        """Return n drafts after the token ``last``, their confidences and their logits without the bias.

        ``rows``: rows of the tokens before it.
        """
        of, model, n_before, read = self.tensors, self.model, len(rows), torch.from_numpy(rows)
        with torch.no_grad():
            x = model.model.embed_tokens(torch.tensor([last, *[MASK] * (n - 1)]))[:, None]
            x = x.expand(-1, model.config.hc_mult, -1).contiguous()
            positions = torch.arange(n_before + n)[None]
            rotate = model.model.rotary_emb
            kinds = ("main", "compress")
            before, block = (
                {kind: rotate(read[None], position_ids=part, layer_type=kind) for kind in kinds}
                for part in (positions[:, :n_before], positions[:, n_before:])
            )
            is_far = positions[:, n_before:].T - positions >= model.config.sliding_window
            mask = torch.zeros(is_far.shape).masked_fill(is_far, float("-inf"))[None, None]
            for i in COPIED:
                layer = model.model.layers[i]
                keys = layer.self_attn.kv_norm(layer.self_attn.kv_proj(read))[None, None]
                context = Context(modeling.apply_rotary_pos_emb(keys, *before["main"]))
                x = layer(
                    x[None],
                    position_embeddings=block,
                    position_ids=positions[:, n_before:],
                    attention_mask=mask,
                    input_ids=None,
                    cache=context,
                )[0]
            flat = self.norm(x.flatten(1), 1)
            mixing = flat @ of["mtp.1.hc_head_fn"].T * of["mtp.1.hc_head_scale"] + of["mtp.1.hc_head_base"]
            states = ((torch.sigmoid(mixing) + model.config.hc_eps)[..., None] * x).sum(1)
            logits = model.lm_head(self.norm(states, of["mtp.1.norm.weight"]))
            ids, chances = list[int](), list[float]()
            for state, row in zip(states, logits, strict=True):
                embedding = of["mtp.1.markov_head.markov_w1.weight"][last]
                last = int((row + of["mtp.1.markov_head.markov_w2.weight"] @ embedding).argmax())
                feature = torch.cat([state, embedding])
                chances.append(float(torch.sigmoid(of["mtp.1.confidence_head.proj.weight"][0] @ feature)))
                ids.append(last)
        return ids, chances, logits.numpy()


def with_drafter(folder: Path) -> tuple[Path, Path, Drafter]:
    """Write a tiny random model and a drafter to files; return them and the drafter in transformers."""
    model = make_model(TARGET)
    path = write(folder / "model.gguf", TARGET, model)
    tensors = {name: tensor.read() for name, tensor in read_folder(folder / "model.hf").items()}
    rng, d, n, n_vocab = np.random.default_rng(4), model.config.hidden_size, model.config.hc_mult, 300
    own = {
        "mtp.0.main_proj.weight": rng.normal(0, (3 * d) ** -0.5, (d, 3 * d)),
        "mtp.0.main_norm.weight": rng.uniform(0.5, 1.5, d),
        "mtp.1.norm.weight": rng.uniform(0.5, 1.5, d),
        "mtp.1.hc_head_fn": rng.normal(0, (n * d) ** -0.5, (n, n * d)),
        "mtp.1.hc_head_base": rng.normal(0, 0.2, n),
        "mtp.1.hc_head_scale": rng.uniform(0.5, 1.5, 1),
        "mtp.1.markov_head.markov_w1.weight": rng.normal(0, 1, (n_vocab, RANK)),
        "mtp.1.markov_head.markov_w2.weight": rng.normal(0, RANK**-0.5, (n_vocab, RANK)),
        "mtp.1.confidence_head.proj.weight": rng.normal(0, 2 * (d + RANK) ** -0.5, (1, d + RANK)),
    }
    floats = {name: array.astype(np.float32) for name, array in own.items()}
    stages = {
        name.replace(f"layers.{i}.", f"mtp.{stage}."): array
        for stage, i in enumerate(COPIED)
        for name, array in tensors.items()
        if f"layers.{i}." in name
    }
    table = {name: ("I64", array) for name, array in tensors.items() if array.dtype == np.int64}
    release = folder / "model.hf"
    write_safetensors(release / "model.safetensors", tensors | table | stages | floats)
    settings = {"dspark_block_size": BLOCK, "dspark_noise_token_id": MASK, "dspark_target_layer_ids": [0, 1, 2]}
    config = json.loads((release / "config.json").read_text())
    (release / "config.json").write_text(json.dumps(config | settings))
    with GGUFFile.open(path) as target:
        list(run(plan(Checkpoint(release, target=target, only_block=True), folder / "drafter.gguf", "F32")))
    return path, folder / "drafter.gguf", Drafter(model, {x: torch.from_numpy(y) for x, y in floats.items()})


def test_drafts_equal_those_of_transformers_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, drafts, drafter = with_drafter(tmp_path)
    rows, observe = dict[int, Array](), BlockDrafter.observe

    def keep(self: BlockDrafter, step: BatchItem, hidden: Array, tokens: Sequence[int]) -> None:
        rows.update(enumerate(hidden.copy(), start=step.start))
        observe(self, step, hidden, tokens)

    monkeypatch.setattr(BlockDrafter, "observe", keep)
    seen = recorded(monkeypatch, BlockDrafter, "at_once")
    kept, draft = list[Array](), BlockDrafter._draft

    def keep_rows(self: BlockDrafter, tokens: Sequence[int], n: int) -> list[int]:
        kept.append(np.array([rows[i] for i in range(len(tokens) - 1)]))
        return draft(self, tokens, n)

    monkeypatch.setattr(BlockDrafter, "_draft", keep_rows)
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY | {"max_tokens": 20}, draft_always=True)
    assert len(seen) == len(kept) > 5
    # Rounding in a float16 cache changes close choices of the target model.
    expected_rows = drafter.rows(PROMPT).numpy()
    errors = np.abs(kept[0] - expected_rows).max(axis=1) / np.abs(expected_rows).max()
    assert np.median(errors) < 5e-3
    n_equal, all_errors = 0, list[float]()
    for (tokens, ids, (logits,)), read in zip(seen, kept, strict=True):
        expected, _, expected_logits = drafter.drafts(read, tokens[-1], len(ids))
        errors = np.abs(logits - expected_logits).max(axis=1) / np.abs(expected_logits).max()
        all_errors += errors.tolist()
        n_equal += ids == expected
    # Rounding changes close choices between experts in a few rows.
    assert np.quantile(all_errors, 0.9) < 5e-3
    assert n_equal >= 0.9 * len(seen)
    assert max(len(ids) for _, ids, _ in seen) == BLOCK


def test_a_text_is_the_same_with_its_drafts(tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path)
    with localllm.load(path, draft_model=drafts, context=256, threads=1) as llm:
        check_texts(llm, (1, 7))


def test_the_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path)
    with GGUFFile.open(drafts) as file:
        values = {name.removeprefix("dflash."): value for name, value in file.metadata.items()}
        assert (values["general.architecture"], values["block_count"], values["block_size"]) == ("dflash", 2, BLOCK)
        assert (list(values["target_layers"]), values["tokenizer.ggml.mask_token_id"]) == ([1, 2, 3], MASK)
        assert list(values["attention.compress_ratios"]) == [0, 0]
        assert (values["hash_layer_count"], values["hyper_connection.count"]) == (0, 4)
        others = {name for name in file.tensors if not name.startswith("blk.")}
        assert others == {
            *(f"{name}.weight" for name in ("fc", "enc.output_norm", "output_norm", "conf_proj")),
            *(f"{name}.weight" for name in ("markov_w1", "markov_w2", "output_hc_fn", "output_hc_base")),
            "output_hc_scale.weight",
        }
        in_layer = {name.removeprefix("blk.1.") for name in file.tensors if name.startswith("blk.1.")}
        assert {"attn_kv.weight", "attn_sinks.weight", "exp_probs_b.bias", "ffn_gate_exps.weight"} <= in_layer
    planned = plan_file(LoadOptions(path, draft_model=drafts, context=64, threads=1))
    with localllm.load(path, draft_model=drafts, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert (llm.info.placement, llm.info.draft.placement) == planned.placements


def test_a_conversion_needs_the_target(tmp_path: Path) -> None:
    with_drafter(tmp_path)
    with pytest.raises(UsageError, match="is a drafter, which has no tokenizer: name the model that it drafts for"):
        Checkpoint(tmp_path / "model.hf", only_block=True)
