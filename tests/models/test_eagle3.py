"""EAGLE-3 drafters: comparison with a numpy implementation of the paper (arXiv:2503.01840), and drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.convert import Checkpoint
from localllm.convert.checkpoint import CheckpointTensor
from localllm.engine.drafting.mtp import MTPDrafter
from localllm.errors import ModelError, UnsupportedArchitectureError, UsageError
from localllm.gguf import GGUFFile
from localllm.gguf.writer import read_back
from localllm.loading import load
from localllm.loading.load import LoadOptions, plan_file
from localllm.quant.types import GGMLType
from localllm.quantize import plan, run
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.command_line import run_main
from tests.helpers.drafting import GREEDY, PROMPT, Round, check_texts, recorded
from tests.helpers.engines import in_engine
from tests.helpers.gpus import have_gpus
from tests.kernels.cuda.watched import KernellessDriver
from tests.models.tiny import CONFIG, LLAMA3, TINY, make_model, write, write_draft, write_target

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: The drafter's vocabulary as ids of the model; these models write only the first few.
LIKELY = [5, 6, 7]
IDS = np.array([*LIKELY, *range(20, 80, 2)])

#: Drafter variants: keys in config.json, and optional tensors.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "of other layers": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "norm_before_residual": True},
    "normed": {"norm_before_fc": True, "rope_scaling": LLAMA3, "layer": "layers.0."},
    "wider": {"hidden_size": 96, "head_dim": 32, "has_embedding": True},
    "of the model's vocabulary": {"draft_vocab_size": CONFIG["vocab_size"], "has_head": False},
}


@dataclass
class Drafter:
    """A drafter's configuration and weights, with the forward pass of the paper."""

    config: dict[str, Any]
    weights: dict[str, Array]
    model: Any  # transformers model to draft for
    layers: list[int]

    def rows(self, ids: list[int]) -> Array:
        """Return the model's hidden states that the drafter reads, [T, d]."""
        import torch

        with torch.no_grad():
            states = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        x = np.concatenate([states[layer][0].numpy() for layer in self.layers], axis=1)
        if "input_norm.weight" in self.weights:
            x = self.norm(x, "input_norm")
        return x @ self.weights["fc.weight"].T

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * self.weights[f"{name}.weight"]

    def forward(self, rows: Array, ids: list[int]) -> tuple[Array, Array]:
        """Return hidden states [T, d] and logits for rows [T, d] and the ids of the following tokens."""
        w, c = self.weights, self.config
        table = w.get("embed_tokens.weight")
        table = self.model.get_input_embeddings().weight.detach().numpy() if table is None else table
        normed = self.norm(rows, "hidden_norm")
        x = np.concatenate([self.norm(table[ids], "input_layernorm"), normed], axis=1)
        q, k, v = (
            (x @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(ids), -1, c["head_dim"]).swapaxes(0, 1)
            for name in "qkv"
        )
        cos, sin = self.rotation(len(ids))
        q, k = (y * cos + np.concatenate(np.split(y, 2, axis=-1)[::-1], axis=-1) * sin for y in (q, k))
        k, v = (np.repeat(y, len(q) // len(y), axis=0) for y in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(c["head_dim"]) + np.triu(np.full((len(ids),) * 2, -np.inf), 1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        y = (scores / scores.sum(axis=-1, keepdims=True)) @ v
        y = y.swapaxes(0, 1).reshape(len(ids), -1) @ w["self_attn.o_proj.weight"].T
        x = y + (normed if c.get("norm_before_residual") else rows)
        y = self.norm(x, "post_attention_layernorm")
        gate, up = (y @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down_proj.weight"].T
        head = w.get("lm_head.weight")
        head = self.model.get_output_embeddings().weight.detach().numpy() if head is None else head
        return x, self.norm(x, "norm") @ head.T

    def rotation(self, n: int) -> tuple[Array, Array]:
        """Return cosines and sines [n, head_dim], the sines with the sign for swapped halves."""
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rope = self.config.get("rope_scaling") or {"rope_type": "default", "rope_theta": self.config["rope_theta"]}
        keys = {name: self.config[name] for name in ("head_dim", "hidden_size", "max_position_embeddings")}
        of = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=rope, **keys))
        cos, sin = (x[0].numpy() for x in of(torch.zeros(1), torch.arange(n)[None]))
        half = self.config["head_dim"] // 2
        return cos, sin * np.repeat(np.array([-1, 1], np.float32), half)

    def drafts(self, ids: list[int], n: int) -> tuple[list[Array], list[int]]:
        """Return the logits of n drafts after a text, and the drafts."""
        rows, tokens, found = self.rows(ids[:-1]), ids[1:], []
        for _ in range(n):
            hidden, logits = self.forward(rows, tokens)
            found.append(logits[-1])
            rows = np.concatenate([rows, hidden[-1:]])
            number = int(logits[-1].argmax())
            tokens = [*tokens, int(IDS[number]) if len(logits[-1]) == len(IDS) else number]
        return found, tokens[len(ids) - 1 :]


def with_drafter(
    folder: Path, name: str = "llama", kind: str = "plain", type: str = "F32", few: bool = True
) -> tuple[Path, Path, Drafter]:
    """Create a tiny random model and a drafter for it; return their files.  ``few``: writes few tokens only."""
    path, model = write_target(folder, name, LIKELY if few else None)
    drafter = write_drafter(folder / "drafter", model, KINDS[kind], few=few)
    return path, write_draft(folder, type), drafter


def write_drafter(folder: Path, model: Any, kind: dict[str, Any], *, few: bool = True) -> Drafter:
    """Write a random drafter's checkpoint in the published format, without a tokenizer."""
    width, n_layers = model.config.hidden_size, model.config.num_hidden_layers
    config = {name: CONFIG[name] for name in ("vocab_size", "rms_norm_eps", "num_attention_heads", "head_dim")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"hidden_size": width, "intermediate_size": 160, "num_key_value_heads": 2, "rope_theta": 10_000.0}
    config |= {"max_position_embeddings": 512, "draft_vocab_size": len(IDS), "tie_word_embeddings": False} | kind
    layer, has_head, has_embedding = (config.pop(x, y) for x, y in (
        ("layer", "midlayer."), ("has_head", True), ("has_embedding", False)
    ))  # fmt: skip
    d, dim, n_ff, rng = (
        config["hidden_size"],
        config["head_dim"],
        config["intermediate_size"],
        np.random.default_rng(7),
    )
    shapes = {f"self_attn.{name}_proj.weight": (n * dim, 2 * d) for name, n in (("q", 4), ("k", 2), ("v", 2))} | {
        "self_attn.o_proj.weight": (d, 4 * dim),
        "mlp.gate_proj.weight": (n_ff, d),
        "mlp.up_proj.weight": (n_ff, d),
    }
    shapes |= {"mlp.down_proj.weight": (d, n_ff), "fc.weight": (d, 3 * width)}
    shapes |= {"lm_head.weight": (config["draft_vocab_size"], d)} if has_head else {}
    weights = {name: rng.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
    weights |= {"embed_tokens.weight": rng.normal(0, 1, (config["vocab_size"], d))} if has_embedding else {}
    norms = ["norm", "hidden_norm", "input_layernorm", "post_attention_layernorm"]
    weights |= {f"{name}.weight": rng.uniform(0.5, 1.5, d) for name in norms}
    if config.get("norm_before_fc"):
        weights["input_norm.weight"] = rng.uniform(0.5, 1.5, 3 * width)
    if few and has_head:
        weights["lm_head.weight"][len(LIKELY) :] = 0
    floats = {name: array.astype(np.float32) for name, array in weights.items()}
    in_layer = ("self_attn.", "mlp.", "hidden_norm", "input_layernorm", "post_attention_layernorm")
    tensors: dict[str, Any] = {layer * name.startswith(in_layer) + name: array for name, array in floats.items()}
    if config["draft_vocab_size"] == len(IDS):
        tensors["d2t"] = "I64", (IDS - np.arange(len(IDS))).astype(np.int64)
        tensors["t2d"] = "BOOL", np.isin(np.arange(config["vocab_size"]), IDS).astype(np.uint8)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    layers = config.get("eagle_aux_hidden_state_layer_ids") or [2, n_layers // 2, n_layers - 3]
    return Drafter(config, floats, model, layers)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    return recorded(monkeypatch, MTPDrafter, "continued")


@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen3", "plain"), ("gemma2", "plain")]
)
def test_drafts_match_the_paper(name: str, kind: str, tmp_path: Path, seen: list[Round]) -> None:
    path, drafts, drafter = with_drafter(tmp_path, name, kind, few=False)
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        llm.generate(PROMPT, **GREEDY, draft_always=True, draft_max=3)
    assert len(seen) > 10
    for tokens, ids, logits in seen:
        expected, expected_ids = drafter.drafts(tokens, len(ids))
        for ours, theirs in zip(logits, expected, strict=True):
            assert np.abs(ours[-1] - theirs).max() < 5e-3 * np.abs(theirs).max()
        assert ids == expected_ids


def test_accepted_drafts_equal_the_text(tmp_path: Path, seen: list[Round]) -> None:
    path, drafts, drafter = with_drafter(tmp_path)
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        done = llm.generate(PROMPT, **GREEDY, draft_always=True, draft_max=2)
        text, n_right = [*PROMPT, *done.ids], 0
        for tokens, ids, _ in seen:
            _, expected = drafter.drafts(tokens, len(ids))
            assert ids == expected
            came = text[len(tokens) :]
            n_right += next((i for i, pair in enumerate(zip(ids, came, strict=False)) if len({*pair}) > 1), len(ids))
        assert done.drafts is not None
        assert done.drafts.drafted == sum(len(ids) for _, ids, _ in seen)
        assert done.drafts.accepted == n_right > 5
        assert done.drafts.steps == 39 - n_right


@pytest.mark.parametrize(
    ("name", "kind", "type", "cache_type"),
    [
        ("llama", "plain", "F32", "f16"),
        ("llama", "wider", "Q8_0", "q8_0"),
        ("gemma2", "plain", "F32", "f16"),
        ("qwen35", "normed", "F32", "f16"),
    ],
)
def test_a_text_is_the_same_with_its_drafts(name: str, kind: str, type: str, cache_type: str, tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path, name, kind, type)
    with localllm.load(path, draft_model=drafts, context=256, threads=1, cache_type=cache_type) as llm:
        check_texts(llm, (1, 5))


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the embedding is also the head
def test_only_the_target_model_computes_extra_outputs(name: str, tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path, name)

    def names(placement: Any) -> set[str]:
        return {weight.name for group in placement.groups for weight in group.packed}

    planned = plan_file(LoadOptions(path, draft_model=drafts, context=64, threads=1))
    with localllm.load(path, draft_model=drafts, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert llm.info.draft.architecture == "eagle3"
        assert (llm.info.placement, llm.info.draft.placement) == planned.placements
        packed = [weight for group in llm.info.draft.placement.groups for weight in group.packed]
        assert {weight.name for weight in packed if weight.is_shared} == {"token_embd.weight"}
        with_it = names(llm.info.placement)
    with localllm.load(path, context=64, threads=1) as llm:
        assert with_it - names(llm.info.placement) == {"fc.weight"}
        assert in_engine(llm, lambda loop: loop.runner.hidden) is None


def test_a_model_that_is_read_again_is_still_drafted_for(tmp_path: Path) -> None:
    """A model with LongRoPE whose loaded context differs from the one in its file."""
    path, drafts, _ = with_drafter(tmp_path)
    options = LoadOptions(path, draft_model=drafts)
    with GGUFFile.open(path) as file, GGUFFile.open(drafts) as draft:
        source = load._read(file, options, "the model")
        load._read_draft(draft, source, options)
        n_nodes = len(source.model.graph.nodes)
        graph = source.read_again(64).graph
        assert len(graph.nodes) == n_nodes
        assert graph.watched == {source.hidden}


def test_the_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path, drafts, _ = with_drafter(tmp_path)
    with GGUFFile.open(drafts) as file, GGUFFile.open(path) as model:
        keys = {name.removeprefix("eagle3."): value for name, value in file.metadata.items()}
        assert keys["general.architecture"] == "eagle3"
        assert list(keys["target_layers"]) == [2, 2, 1]
        assert (keys["target_hidden_size"], keys["block_count"], keys["vocab_size"]) == (64, 1, 300)
        assert (keys["norm_before_residual"], keys["norm_before_fc"]) == (False, False)
        assert list(file.metadata["tokenizer.ggml.tokens"]) == list(model.metadata["tokenizer.ggml.tokens"])
        assert file.tensors["d2t"].type is GGMLType.I64
        assert np.array_equal(np.array(file.tensors["d2t"].data).view(np.int64), IDS)
        parts = "attn_norm attn_norm_2 attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
        assert set(file.tensors) == {"d2t", "fc.weight", "output.weight", "output_norm.weight"} | {
            f"blk.0.{part}.weight" for part in parts.split()
        }
        by_file = Checkpoint(tmp_path / "drafter", target=model)
    with GGUFFile.open(drafts) as file:
        for key in file.metadata:
            if not key.startswith("general."):
                np.testing.assert_array_equal(by_file.metadata[key], file.metadata[key], err_msg=key)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path, drafts, _ = with_drafter(tmp_path_factory.mktemp("eagle3"))
    return path, drafts


def test_the_drafter_is_named(files: tuple[Path, Path], capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    path, drafts = files
    outcome = run_main(capfdbinary, "inspect", drafts)
    assert "eagle3, which drafts for another model (--draft-model)" in outcome.out
    outcome = run_main(capfdbinary, "inspect", path, "--plan", "--draft-model", drafts, "-c", 64)
    assert outcome.code == 0
    assert f"draft model: {drafts}" in outcome.out
    outcome = run_main(capfdbinary, "inspect", path, "--plan", "--json", "--draft-model", drafts, "-c", 64)
    shown = json.loads(outcome.out)["plan"]
    assert 0 < shown["draft"]["total"] < shown["total"]
    flags = "--draft", "always", "--temp", 0, "-n", 8, "-c", 64, "--device", "cpu", "-v"
    outcome = run_main(capfdbinary, "generate", "-m", path, "-p", "a", "--draft-model", drafts, *flags)
    assert outcome.code == 0
    assert " accepted (" in outcome.err


def other_model(folder: Path, **changes: Any) -> Path:
    entry = replace(TINY["llama"], config={**TINY["llama"].config, **changes})
    return write(folder / "other.gguf", entry, make_model(entry))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden_size": 96}, ModelError, "reads hidden states of 64 values, but this model's have 96: choose"),
        ({"num_hidden_layers": 1}, ModelError, "reads layer 2, but this model has 1 layers: choose"),
        ({"vocab_size": 310}, UsageError, "has another vocabulary than the model: it has 300 tokens instead of 310"),
    ],
)
def test_another_model_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        localllm.load(other_model(tmp_path, **changes), draft_model=files[1], context=64)


def test_a_drafter_cannot_run_alone_or_on_gpus(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path, drafts = files
    with pytest.raises(UnsupportedArchitectureError, match="which cannot run alone"):
        localllm.load(drafts)
    have_gpus(monkeypatch, KernellessDriver(memory=1 << 29))
    with pytest.raises(UsageError, match=r"drafter\.gguf drafts on the CPU alone: load the model with device='cpu'"):
        localllm.load(path, draft_model=drafts, device="cuda", context=64)


def broken(path: Path, out: Path, change: Callable[[Checkpoint], object]) -> Path:
    checkpoint = Checkpoint(path.parent / "drafter", target=Checkpoint(path.parent / "model.hf"))
    change(checkpoint)
    list(run(plan(checkpoint, out, None)))
    return out


def with_ids(made: Any, ids: NDArray[Any], type: GGMLType) -> None:
    made.tensors["d2t"] = CheckpointTensor("d2t", ids.shape, type, lambda: iter([ids]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.metadata.update({"eagle3.target_layers": 3}), "must be a list of layer numbers"),
        (lambda made: made.tensors.pop("output.weight"), r"\(d2t\), but no tensor output\.weight"),
        (lambda made: made.tensors.pop("fc.weight"), r"the file has no tensor fc\.weight"),
        (lambda made: with_ids(made, IDS.astype(np.int32), GGMLType.I32), "tensor d2t must contain ids"),
        (lambda made: with_ids(made, IDS[:32].astype(np.float32), GGMLType.F32), "tensor d2t must contain ids"),
        (lambda made: with_ids(made, IDS + 300, GGMLType.I64), "tensor d2t must contain ids"),
    ],
)
def test_a_broken_file(change: Any, words: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    def changed(checkpoint: Checkpoint) -> None:
        made = SimpleNamespace(metadata=dict(checkpoint.metadata), tensors=dict(checkpoint.tensors))
        change(made)
        checkpoint.metadata, checkpoint.tensors = read_back(tmp_path, made.metadata, ()), made.tensors

    drafts = broken(files[0], tmp_path / "broken.gguf", changed)
    with pytest.raises(ModelError, match=words):
        localllm.load(files[0], draft_model=drafts, context=64)


def test_conversion_needs_the_target_model(files: tuple[Path, Path], tmp_path: Path) -> None:
    folder = files[0].parent
    with pytest.raises(UsageError, match=r"name the model that it drafts for \(--target\)"):
        Checkpoint(folder / "drafter")
    with pytest.raises(UsageError, match="leave --target out"):
        Checkpoint(folder / "model.hf", target=Checkpoint(folder / "model.hf"))
    wider = Checkpoint(other_model(tmp_path, hidden_size=96).with_suffix(".hf"))
    with pytest.raises(ModelError, match=r"reads hidden states of 64 values, but .* hidden states of 96"):
        Checkpoint(folder / "drafter", target=wider)


def test_the_command_converts(
    files: tuple[Path, Path], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = files[0].parent
    for target in (folder / "model.hf", files[0]):
        out = tmp_path / f"{target.suffix}.gguf"
        outcome = run_main(capfdbinary, "convert", folder / "drafter", out, "--target", target, "--type", "F32", "-q")
        assert outcome.code == 0
        with GGUFFile.open(out) as ours, GGUFFile.open(files[1]) as other:
            assert all(np.array_equal(ours.tensors[name].data, t.data) for name, t in other.tensors.items())
