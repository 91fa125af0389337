"""Random models with the shapes of current models, made from a checkpoint by conversion and quantisation.

    python -m tests.helpers.real_shapes qwen35-0.8b q4_k_m model.gguf

Needs transformers (the extra ``reference``), whose configurations define the tensors.  Only the first layers are
random, one of each kind in the architecture; the other layers repeat them.  This writes a file in a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from localllm.convert import Checkpoint
from localllm.gguf import GGUFFile
from localllm.gguf.writer import GGUFWriter, TensorSpec, encode_value
from localllm.quantize import plan, run
from tests.helpers.checkpoints import parsed, write_tokenizer
from tests.models.tiny import random_values

#: Number of random values generated at a time; larger tensors repeat them.
_SLAB = 1 << 24


@dataclass(frozen=True)
class RealShape:
    """Shape of a model, named after a real model.

    Attributes:
        model_type: the architecture's name in transformers.
        n_layers: number of layers.
        n_own: number of distinct layers; the other layers repeat them.
        config: settings for transformers.
    """

    model_type: str
    n_layers: int
    n_own: int
    config: Mapping[str, Any] = field(default_factory=dict)


def _qwen35(width: int, n_ff: int, n_heads: int, n_value_heads: int) -> dict[str, Any]:
    rope = parsed("rope_type=default rope_theta=1e7 partial_rotary_factor=0.25 mrope_section=[11,11,10]")
    return parsed(
        f"hidden_size={width} intermediate_size={n_ff} num_attention_heads={n_heads} "
        f"num_key_value_heads={n_heads // 4} head_dim=256 linear_num_key_heads=16 "
        f"linear_num_value_heads={n_value_heads} linear_key_head_dim=128 linear_value_head_dim=128 "
        "vocab_size=248_320 tie_word_embeddings=True"
    ) | {"rope_parameters": rope}


#: DeepSeek's latent attention and experts, reduced to eight narrower layers: 2.6 B parameters, 0.5 B active.
_LATENT_EXPERTS = parsed("""
    hidden_size=2048 intermediate_size=6144 moe_intermediate_size=768 num_attention_heads=16 num_key_value_heads=16
    q_lora_rank=768 kv_lora_rank=512 qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_routed_experts=64
    num_experts_per_tok=8 n_shared_experts=1 first_k_dense_replace=0 mlp_layer_types=["sparse"] n_group=1 topk_group=1
    vocab_size=50_304 max_position_embeddings=65_536 tie_word_embeddings=False
""")
#: Sparse attention for the same shape.
_SPARSE = parsed("index_n_heads=16 index_head_dim=128 index_topk=2048")
_GEMMA3 = parsed("""
    hidden_size=2560 intermediate_size=10_240 num_attention_heads=8 num_key_value_heads=4 head_dim=256
    vocab_size=262_144 sliding_window=1024 tie_word_embeddings=True
""")
#: 6.8 B parameters, 1.1 B active.
_QWEN3_MOE = parsed("""
    hidden_size=2048 moe_intermediate_size=1024 num_attention_heads=16 num_key_value_heads=4 head_dim=128
    num_experts=64 num_experts_per_tok=8 norm_topk_prob=True vocab_size=50_304 tie_word_embeddings=False
""")
_GPT_OSS = parsed("""
    hidden_size=2880 intermediate_size=2880 num_attention_heads=64 num_key_value_heads=8 head_dim=64
    num_local_experts=32 num_experts_per_tok=4 vocab_size=201_088 tie_word_embeddings=False
""")
REAL_SHAPES = {
    "qwen35-0.8b": RealShape("qwen3_5_text", 24, 4, _qwen35(1024, 3584, 8, 16)),
    "qwen35-4b": RealShape("qwen3_5_text", 32, 4, _qwen35(2560, 9216, 16, 32)),
    "gemma3-4b": RealShape("gemma3_text", 34, 6, _GEMMA3),
    "qwen3moe-7b": RealShape("qwen3_moe", 16, 2, _QWEN3_MOE),
    "deepseek32-2.6b": RealShape("deepseek_v32", 8, 1, _LATENT_EXPERTS | _SPARSE),
    "deepseek3-2.6b": RealShape("deepseek_v3", 8, 1, _LATENT_EXPERTS),
    "gpt-oss-2-layers": RealShape("gpt_oss", 2, 2, _GPT_OSS),
}


def real_shape_gguf(path: Path, shape: RealShape, file_type: str) -> Path:
    """Write a random model in a file type of ``localllm quantize``."""
    with TemporaryDirectory(dir=path.parent) as folder:
        short = Path(folder) / "short.gguf"
        for _ in run(plan(Checkpoint(_checkpoint(Path(folder) / "hf", shape)), short, file_type.upper())):
            pass
        return _repeat_layers(short, path, shape.n_layers)


def _checkpoint(folder: Path, shape: RealShape) -> Path:
    """Write a checkpoint of the first layers, in bfloat16."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(
        shape.model_type, **(dict(shape.config) | {"num_hidden_layers": shape.n_own}), bos_token_id=1, eos_token_id=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if shape.model_type in ("qwen3_moe", "deepseek_v3", "deepseek_v32"):  # checkpoints with one matrix per expert
        shapes = dict(_split_experts(shapes))
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    header, at = dict[str, Any](), 0
    for name, size in shapes.items():
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + 2 * prod(size)]}
        at += 2 * prod(size)
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, size in shapes.items():
            for part in _random_bfloat16(rng, name, size, _scale(name, config, shape.n_layers)):
                file.write(part)
    return folder


def _split_experts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, size in shapes.items():
        stem, _, which = name.rpartition(".experts.")
        if not stem:
            yield name, size
            continue
        n_experts, n_out, n_in = size
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        for i in range(n_experts):
            yield from ((f"{stem}.experts.{i}.{part}.weight", (n_out // len(parts), n_in)) for part in parts)


def _scale(name: str, config: Any, n_layers: int) -> float:
    """Return a scale with which all layers together add about as much to the residual stream as the embedding, and
    logits are small.  Rounding errors then stay nearly as small as in trained models.  An embedding that is not also
    the head is large, because Q6_K has no scales for values that are small relative to their neighbours.
    """
    if not config.tie_word_embeddings:
        return float((2 * n_layers) ** 0.5) if "embed_tokens" in name else 1.0
    if "embed_tokens" in name:
        return float(config.hidden_size**-0.5)
    return float((2 * n_layers * config.hidden_size) ** -0.5) if re.search("(o|out|down)_proj", name) else 1.0


def _random_bfloat16(rng: np.random.Generator, name: str, size: tuple[int, ...], scale: float) -> Iterator[bytes]:
    """Yield the bytes of a scaled random tensor."""
    n_rows = max(1, min(prod(size[:-1]), _SLAB // size[-1]))
    values = random_values(rng, name, size if len(size) == 1 else (n_rows, size[-1]), shifted=False)
    data = ((scale * values).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    left = 2 * prod(size)
    while left:
        yield data[:left]
        left -= min(left, len(data))


def _repeat_layers(path: Path, target: Path, n_layers: int) -> Path:
    """Write a model that repeats the layers of another."""
    with GGUFFile.open(path) as file:
        key = f"{file.architecture}.block_count"
        n_own = int(file.metadata[key])
        layers = [[name for name in file.tensors if name.startswith(f"blk.{i}.")] for i in range(n_own)]
        sources = {name: name for name in file.tensors if not name.startswith("blk.")}
        for i in range(n_layers):
            sources |= {re.sub(r"\d+", str(i), name, count=1): name for name in layers[i % n_own]}
        metadata = {each: file.metadata.encoded(each) for each in file.metadata} | {key: encode_value(n_layers)}
        for each, value in file.metadata.items():
            of_layers = each.startswith(f"{file.architecture}.") and ".rope." not in each and np.ndim(value) == 1
            if of_layers and len(value) == n_own:
                metadata[each] = encode_value(np.resize(value, n_layers).tolist())
        specs = [TensorSpec(new, file.tensors[old].shape, file.tensors[old].type) for new, old in sources.items()]
        with GGUFWriter(target, metadata, specs) as writer:
            for old in sources.values():
                writer.write(file.tensors[old].data)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random model in the shape of a current one.")
    parser.add_argument("shape", choices=REAL_SHAPES)
    parser.add_argument("file_type")
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    real_shape_gguf(arguments.path, REAL_SHAPES[arguments.shape], arguments.file_type)
    print(f"{arguments.path}: {arguments.path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
