"""DeepSeek V4's block for multi-token prediction: comparison with transformers' layer, and drafts."""

from __future__ import annotations

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
from localllm.engine.runner import BatchItem, ModelRunner
from localllm.errors import ModelError, UsageError
from localllm.gguf import GGUFFile
from localllm.loading.load import LoadOptions, plan_file
from localllm.quantize import plan, run
from tests.helpers.checkpoints import write_safetensors
from tests.helpers.drafting import GREEDY, PROMPT, check_texts
from tests.models.tiny import TINY, make_model, write

torch = pytest.importorskip("torch", reason="needs the extra 'reference'")
pytest.importorskip("transformers", reason="needs the extra 'reference'")

Array = NDArray[np.float32]

#: The last layer is like a block: without compression, and with a router.
ENTRY = replace(
    TINY["deepseek-v4"],
    config=TINY["deepseek-v4"].config
    | {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        "mlp_layer_types": ["hash_moe", *["moe"] * 3],
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
    },
)
ENTRY.config["layer_types"] = [*ENTRY.config["layer_types"][:3], "sliding_attention"]


@dataclass
class Block:
    """The block, computed with transformers' modules."""

    model: Any
    tensors: dict[str, Any]

    def forward(self, streams: Any, following: list[int]) -> tuple[Any, Any]:
        """Return the block's streams [T, n, d] and logits [T, n_vocab] for streams and following tokens."""
        of, model, n = self.tensors, self.model, len(following)

        def norm(x: Any, name: str) -> Any:
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
            return x * scale * of[f"mtp.0.{name}.weight"]

        with torch.no_grad():
            e = norm(model.model.embed_tokens(torch.tensor(following)), "enorm")
            x = (e @ of["mtp.0.e_proj.weight"].T)[:, None] + norm(streams, "hnorm") @ of["mtp.0.h_proj.weight"].T
            positions = torch.arange(n)[None]
            rotate = model.model.rotary_emb
            rotations = {
                kind: rotate(e[None], position_ids=positions, layer_type=kind) for kind in ("main", "compress")
            }
            distance = positions.T - positions
            is_hidden = (distance < 0) | (distance >= model.config.sliding_window)
            mask = torch.zeros(n, n).masked_fill(is_hidden, float("-inf"))[None, None]
            x = model.model.layers[-1](
                x[None],
                position_embeddings=rotations,
                position_ids=positions,
                attention_mask=mask,
                input_ids=torch.tensor([following]),
            )[0]
            flat = x.flatten(1)
            flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
            mixing = flat @ of["mtp.0.hc_head_fn"].T * of["mtp.0.hc_head_scale"] + of["mtp.0.hc_head_base"]
            y = ((torch.sigmoid(mixing) + model.config.hc_eps)[..., None] * x).sum(1)
            return x, model.lm_head(norm(y, "norm"))


def with_block(folder: Path) -> tuple[Path, Path, Block]:
    """Write a tiny random model and its block to files; return them and the block in transformers."""
    model = make_model(ENTRY)
    path = write(folder / "model.gguf", ENTRY, model)
    tensors = {name: tensor.read() for name, tensor in read_folder(folder / "model.hf").items()}
    rng, d, n = np.random.default_rng(4), model.config.hidden_size, model.config.hc_mult
    own = {f"{x}_proj.weight": rng.normal(0, (2 * d) ** -0.5, (d, d)) for x in "eh"}
    own |= {f"{x}.weight": rng.uniform(0.5, 1.5, d) for x in ("enorm", "hnorm", "norm")}
    own |= {"hc_head_fn": rng.normal(0, (n * d) ** -0.5, (n, n * d)), "hc_head_base": rng.normal(0, 0.2, n)}
    own["hc_head_scale"] = rng.uniform(0.5, 1.5, 1)
    floats = {f"mtp.0.{name}": array.astype(np.float32) for name, array in own.items()}
    block = {name.replace("layers.3.", "mtp.0."): array for name, array in tensors.items() if "layers.3." in name}
    table = {name: ("I64", array) for name, array in tensors.items() if array.dtype == np.int64}
    write_safetensors(folder / "model.hf" / "model.safetensors", tensors | table | block | floats)
    list(run(plan(Checkpoint(folder / "model.hf", only_block=True), folder / "mtp.gguf", "F32")))
    return path, folder / "mtp.gguf", Block(model, {name: torch.from_numpy(array) for name, array in floats.items()})


def test_drafts_equal_those_of_transformers_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's input is the model's streams, and then the block's own streams."""
    path, drafts, block = with_block(tmp_path)
    run_block, streams, following, rounds = ModelRunner.continued, list[Array](), list[int](), list[int]()

    def check(self: ModelRunner, chunks: Sequence[BatchItem], hidden: Array) -> Array:
        (chunk,) = chunks
        if rounds and chunk.start == len(streams):  # a further draft reads the block's streams
            assert np.array_equal(hidden, self.hidden_rows()[-1:])
        logits = run_block(self, chunks, hidden)
        streams[chunk.start :], following[chunk.start :] = list(hidden.copy()), chunk.ids
        if chunk.n_outputs:
            shape = len(streams), block.model.config.hc_mult, -1
            _, expected = block.forward(torch.from_numpy(np.array(streams)).reshape(shape), following)
            assert np.abs(logits[-1] - expected[-1].numpy()).max() < 5e-3 * expected[-1].abs().max()
            rounds.append(len(streams))
        return logits

    monkeypatch.setattr(ModelRunner, "continued", check)
    with localllm.load(path, draft_model=drafts, context=128, threads=1) as llm:
        done = llm.generate(PROMPT, **GREEDY | {"max_tokens": 20}, draft_always=True, draft_max=3)
    assert done.drafts is not None
    assert len(rounds) >= done.drafts.drafted > 20


def test_a_text_is_the_same_with_its_drafts(tmp_path: Path) -> None:
    path, drafts, _ = with_block(tmp_path)
    with localllm.load(path, draft_model=drafts, context=256, threads=1) as llm:
        check_texts(llm, (1, 5))


def test_the_file_is_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    path, drafts, block = with_block(tmp_path)
    with GGUFFile.open(drafts) as file, GGUFFile.open(path) as model:
        values = file.metadata
        assert (values["deepseek4.block_count"], values["deepseek4.nextn_predict_layers"]) == (5, 1)
        assert len(values["deepseek4.attention.compress_ratios"]) == len(values["deepseek4.swiglu_clamp_exp"]) == 5
        others = {name for name in file.tensors if not name.startswith("blk.4.")}
        assert others == {
            *("token_embd.weight", "output.weight", "output_norm.weight"),
            *(f"output_hc_{x}.weight" for x in ("fn", "base", "scale")),
        }
        nextn = {name.removeprefix("blk.4.nextn.") for name in file.tensors if ".nextn." in name}
        assert nextn == {f"{x}.weight" for x in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
        mixing = np.array(file.tensors["output_hc_fn.weight"].data).view(np.float32)
        assert np.array_equal(mixing, block.tensors["mtp.0.hc_head_fn"].numpy())
        assert not any(".nextn." in name for name in model.tensors)
    # The model's file stays without the block.
    again = Checkpoint(tmp_path / "model.hf")
    with GGUFFile.open(path) as model:
        assert again.tensors.keys() == model.tensors.keys()


def test_the_block_belongs_to_its_model(tmp_path: Path) -> None:
    path, drafts, _ = with_block(tmp_path)
    with pytest.raises(ModelError, match="contains only the block that predicts further tokens: load its model"):
        localllm.load(drafts)
    other = write(tmp_path / "other.gguf", TINY["llama"], make_model(TINY["llama"]))
    with pytest.raises(UsageError, match="drafts for another model"):
        localllm.load(other, draft_model=drafts, context=64)
    with pytest.raises(UsageError, match="has no block for multi-token prediction that localllm supports"):
        Checkpoint(tmp_path / "other.hf", only_block=True)
    planned = plan_file(LoadOptions(path, draft_model=drafts, context=64, threads=1))
    with localllm.load(path, draft_model=drafts, context=64, threads=1) as llm:
        assert llm.info.draft is not None
        assert (llm.info.placement, llm.info.draft.placement) == planned.placements


def test_a_checkpoint_without_tensors_of_its_block_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", TINY["glm4moe"], make_model(TINY["glm4moe"]))
    with pytest.raises(UsageError, match="has no tensors of a block for multi-token prediction"):
        Checkpoint(tmp_path / "model.hf", only_block=True)
