"""Multi-token prediction blocks: comparison with transformers' layers, and drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localllm
from localllm.bench.model_speed import measure
from localllm.bench.workload import make_tests
from localllm.convert import Checkpoint
from localllm.convert.safetensors import read_folder
from localllm.engine.drafting.cost import StepCost
from localllm.errors import ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.kernels.backend import HostOutput
from localllm.kernels.cpu.weights import CPUWeightLoader
from localllm.kernels.reference import ReferenceBackend
from localllm.loading.load import LoadOptions, plan_file
from localllm.models.registry import read_model
from localllm.quantize import plan as quantization_plan, run
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.drafting import GREEDY, PROMPT, check_texts
from tests.helpers.engines import in_engine
from tests.helpers.run_model import make_batch
from tests.models.tiny import TINY, make_model, save

pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]


#: Qwen's names of DeepSeek's tensors.
QWEN = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
    "shared_head.head": "shared_head.head",
}


def with_block(path: Path, name: str, *, copied: bool = False, **changes: Array | None) -> tuple[Path, Any]:
    """Convert a tiny random model with an additional block, whose layer equals the model's last layer.

    With ``copied``, all layers are identities and the block knows the following token, so it predicts the model's
    output.  ``changes`` are tensors of the block with DeepSeek's names and __ instead of a point.
    """
    entry = replace(TINY[name], config={**TINY[name].config, "max_position_embeddings": 512})
    model, is_qwen = make_model(entry), name.startswith("qwen")
    last, d, rng = model.config.num_hidden_layers - 1, model.config.hidden_size, np.random.default_rng(3)
    if copied:
        for key, parameter in model.state_dict().items():
            if "layers." in key and ("o_proj" in key or "out_proj" in key or "down_proj" in key):
                parameter.zero_()
    folder = save(path.with_suffix(".hf"), model)
    eye = np.eye(d, 2 * d, dtype=np.float32)
    of_ones = {x: (np.ones(d) if copied else rng.uniform(0.5, 1.5, d)) - is_qwen for x in ("enorm", "hnorm")}
    own: dict[str, Array | None] = {
        "eh_proj": eye if copied else rng.normal(0, 0.1, (d, 2 * d)).astype(np.float32),
        **{x: values.astype(np.float32) for x, values in of_ones.items()},
        "shared_head.norm": None if copied else (rng.uniform(0.5, 1.5, d) - is_qwen).astype(np.float32),
        **{x.replace("__", "."): array for x, array in changes.items()},
    }
    of_layers, of_own = ("mtp.layers.0.", "mtp.") if is_qwen else (f"model.layers.{last + 1}.",) * 2
    tensors = {n: tensor.read() for n, tensor in read_folder(folder).items()}
    block = {n.replace(f"model.layers.{last}.", of_layers): t for n, t in tensors.items() if f"layers.{last}." in n}
    block |= {f"{of_own}{QWEN[x] if is_qwen else x}.weight": t for x, t in own.items() if t is not None}
    write_safetensors(folder / "model.safetensors", tensors | block)
    list(run(quantization_plan(Checkpoint(folder), path, "F32")))
    return path, model


@pytest.mark.parametrize(
    "name", ["qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek-v3", "deepseek-v3.2", "hy-v3"]
)
def test_the_block_matches_transformers_layer(name: str, tmp_path: Path) -> None:
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
        batch = make_batch([(PROMPT[1:], 0, range(8))])
        ours = step.run(batch, HostOutput(hidden[0].numpy())).rows()
    assert np.abs(ours - expected).max() < 5e-3 * np.abs(expected).max()


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft at every step, regardless of the cost."""
    monkeypatch.setattr(StepCost, "best", lambda self, rate, most, draft_s=0.0: most)
    monkeypatch.setattr("localllm.engine.drafting.model.MIN_PROBABILITY", 0.0)


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "glm4moe", "deepseek-v3", "deepseek-v3.2", "glm-5", "hy-v3"])
def test_a_text_is_the_same_with_drafts(name: str, tmp_path: Path) -> None:
    path, _ = with_block(tmp_path / "model.gguf", name)
    with localllm.load(path, context=256, threads=1) as llm:
        check_texts(llm, (1, 5))


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
            sampled = GREEDY | {"temperature": 0.5, "seed": 1}
            expected = llm.generate(PROMPT, **sampled, speculate=None)
            done = llm.generate(PROMPT, **sampled)
            assert done.ids == expected.ids
            assert done.drafts is not None
            assert 0 < done.drafts.share < 1
            many = list(llm.generate_many([PROMPT[:n] for n in (3, 20, 41)], **GREEDY))
            assert all(each.drafts is not None and each.drafts.share == 1 for each in many)


def test_a_block_that_is_always_wrong_is_not_used(tmp_path: Path) -> None:
    head = -read_head(with_block(tmp_path / "a.gguf", "qwen35", copied=True)[0])
    path, _ = with_block(tmp_path / "b.gguf", "qwen35", copied=True, shared_head__head=head)
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


@pytest.mark.parametrize("has_own", [False, True])
def test_the_block_shares_the_models_head_and_embedding(
    has_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    pack = CPUWeightLoader.pack
    monkeypatch.setattr(
        CPUWeightLoader, "pack", lambda self, weight: packed.append(weight.name) or pack(self, weight)
    )
    own: dict[str, Array | None] = {}
    if has_own:
        own = {x: np.zeros((300, 64), np.float32) for x in ("shared_head__head", "embed_tokens")}
    path, _ = with_block(tmp_path / "model.gguf", "glm4moe", **own)
    plan = plan_file(LoadOptions(path, context=64, threads=1))
    with localllm.load(path, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert (llm.info.placement, llm.info.draft.placement) == plan.placements
        weights = [weight for group in llm.info.draft.placement.groups for weight in group.packed]
    assert len(packed) == len(set(packed))
    shared = {weight.name for weight in weights if weight.is_shared}
    assert shared == (set() if has_own else {"token_embd.weight", "output.weight"})
    assert sum(w.own_bytes for w in weights) == sum(w.n_bytes for w in weights if w.name not in shared)
    assert llm.info.draft.placement.multiplied >= next(w.n_bytes for w in weights if w.layer == "output")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    whole, _ = with_block(tmp_path / "a.gguf", "qwen35")
    without, _ = with_block(tmp_path / "c.gguf", "qwen35", eh_proj=None)
    with pytest.raises(ModelError, match=r"the file has no tensor blk\.4\.nextn\.enorm\.weight"):
        with_block(tmp_path / "b.gguf", "qwen35", enorm=None)
    with localllm.load(without, threads=1) as llm:  # a file without its block, like some published files
        assert llm.generate(PROMPT, **GREEDY).drafts is None
        with pytest.raises(UsageError, match="speculate is 'mtp', but the model cannot predict several tokens"):
            llm.generate(PROMPT, speculate="mtp")
    with localllm.load(whole, threads=1, draft_model=without) as llm, pytest.raises(UsageError, match="draft_model"):
        llm.generate(PROMPT, speculate="mtp")


@pytest.mark.usefixtures("always")
def test_bench_counts_the_drafts(tmp_path: Path) -> None:
    path, _ = with_block(tmp_path / "model.gguf", "deepseek-v3", copied=True)
    with localllm.load(path, context=128, threads=1) as llm:
        in_engine(llm, lambda loop: loop._cost.add(1, 1.0))
        (test,) = make_tests([0], [20], [0], [])
        drafts = measure(llm, test, 2).drafts
        assert drafts is not None
        assert drafts.share > 0.5  # the block knows the following token
        assert 20 < drafts.drafted < 100  # of both runs
