"""Random drafters for any model of a GGUF file, with the sizes of published drafters, to measure their cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert import Checkpoint
from localllm.gguf import GGUFFile
from localllm.models.config import ModelMetadata, read_general
from localllm.quant.floats import bfloat16
from localllm.quantize import plan, run
from tests.helpers.checkpoints import write_safetensors

#: Kinds of `made_drafter`.
KINDS = ("eagle3", "dflash", "dflash2", "dspark")
#: Layers of DFlash drafters, tokens per block, and width of the small matrices of DSpark and DFlash 2.
N_LAYERS, BLOCK, RANK = 5, 8, 256


def made_drafter(kind: str, model: Path, folder: Path, type: str = "Q4_0") -> Path:
    """Return a random drafter for a model in a folder; writes it if it is missing."""
    path, source = folder / f"{model.stem}-{kind}.gguf", folder / kind
    if path.exists():
        return path
    source.mkdir(parents=True, exist_ok=True)
    with GGUFFile.open(model) as target:
        architecture = str(target.metadata["general.architecture"])
        config = read_general(ModelMetadata(target.metadata, architecture), target.tensors)
        d, n_vocab, n_target = config.n_embd, config.n_vocab, config.n_layers
        settings: dict[str, Any] = {"hidden_size": d, "intermediate_size": 3 * d // 32 * 32, "vocab_size": n_vocab}
        settings |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6}
        settings |= {"max_position_embeddings": config.context_length, "rope_theta": 10_000.0, "hidden_act": "silu"}
        layers = [n_target // 4, n_target // 2, 3 * n_target // 4]
        is_eagle = kind == "eagle3"
        n_layers, width = (1, 2 * d) if is_eagle else (N_LAYERS, d)
        n_ff = settings["intermediate_size"]
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, 3 * d),
            "norm.weight": (d,),
            "hidden_norm.weight": (d,),
        }
        for i in range(n_layers):
            at = f"layers.{i}."
            shapes |= {f"{at}{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
            for name, n_heads in (("q", 8), ("k", 2), ("v", 2)):
                shapes[f"{at}self_attn.{name}_proj.weight"] = (64 * n_heads, width)
            shapes |= {f"{at}mlp.{name}_proj.weight": (n_ff, d) for name in ("gate", "up")}
            shapes |= {f"{at}self_attn.o_proj.weight": (d, 64 * 8), f"{at}mlp.down_proj.weight": (d, n_ff)}
            if not is_eagle:
                shapes |= {f"{at}self_attn.{name}_norm.weight": (64,) for name in "qk"}
        more: dict[str, Any] = {}
        if is_eagle:
            n_drafted = n_vocab // 5
            shapes["lm_head.weight"] = (n_drafted, d)
            shapes["layers.0.hidden_norm.weight"] = shapes.pop("hidden_norm.weight")
            more["d2t"] = "I64", np.zeros(n_drafted, np.int64)
            settings |= {"draft_vocab_size": n_drafted, "eagle_aux_hidden_state_layer_ids": layers}
        inner = {"block_size": BLOCK, "mask_token_id": 0, "target_layer_ids": layers}
        if kind == "dspark":
            shapes |= {f"markov_head.markov_w{x}.weight": (n_vocab, RANK) for x in (1, 2)}
            shapes["confidence_head.proj.weight"] = 1, d + RANK
        if kind == "dflash2":
            names = ("predecessor_codebook", "successor_codebook")
            shapes |= {f"candidate_selector.{name}": (n_vocab, RANK) for name in names}
            shapes["candidate_selector.hidden_projection.weight"] = RANK, d
            group = 16
            for i in range(n_layers):
                for name in (f"layers.{i}.attention_conv", f"layers.{i}.mlp_conv"):
                    shapes |= {
                        f"{name}.base_kernel": (2, 2, d),
                        f"{name}.kernel_projection.weight": (4 * d // group, d),
                    }
            inner |= {"conv_kernel_size": 2, "conv_group_size": group, "selector_rank": RANK, "selector_top_k": 16}
        settings |= {} if is_eagle else {"dflash_config": inner}
        classes = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
        settings |= {"architectures": [classes.get(kind, "Qwen3DSparkModel")], "num_hidden_layers": n_layers}
        settings |= {"model_type": "llama" if is_eagle else "qwen3", "tie_word_embeddings": False}
        rng = np.random.default_rng(0)
        values = {name: rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in shapes.items()}
        values |= {name: np.ones(shape, np.float32) for name, shape in shapes.items() if len(shape) == 1}
        (source / "config.json").write_text(json.dumps(settings))
        write_safetensors(source / "model.safetensors", {x: bfloat16(y) for x, y in values.items()} | more)
        list(run(plan(Checkpoint(source, target=target), path, type)))
    return path
