"""Convert tiny models of every architecture with llama.cpp's converter, and compare logits with transformers.

    python -m tests.benchmarks.converted LLAMA_CPP [NAME …] [--fuse] [--binding PYTHON] [--table]

LLAMA_CPP is the folder of its source, as in the sdist of llama-cpp-python; ``--binding`` is a Python with the
binding. With ``--fuse``, query, key and value are one tensor, and so are gate and up of experts.  For each model, the
command prints the largest error of logits relative to the largest logit: of our file (on the reference backend, with
keys and values in float32, and on the CPU, in float16), of the converted file, and of llama.cpp with our file.  It
also prints differences between the two files that are not in `EXCEPTIONS`.  The exit code is 1 if files differ, a
converted file does not load, or an error of our file is above 1e-3, or 5e-3 on the CPU.  ``--table`` writes the
results to docs/models.md; with it, name all models of an architecture, or no models.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from localllm.errors import LocalLLMError
from localllm.gguf import GGUFFile, TensorInfo
from localllm.models.registry import ARCHITECTURES
from localllm.quant.types import GGMLType
from tests.helpers.checkpoints import parsed
from tests.helpers.recorder import CPUOps, ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import DIFFUSION, ENCODERS, TINY, make_model, write

MODELS = TINY | ENCODERS | DIFFUSION
PAGE = Path(__file__).parents[2] / "docs/models.md"

#: Keys that may differ.  Our files contain only the name of the model's origin, and another vocabulary.  llama.cpp's
#: converter omits keys whose defaults its reader knows.  No program reads the other keys.
EXCEPTIONS = re.compile(
    r"general\.(name|size_label|finetune|basename|file_type|version|base_model.*|sampling.*)|tokenizer\..*"
    r"|(gemma2?|gptneox|phi2|stablelm)\.rope\.freq_base|.*\.expert_gating_func|gptneox\.attention\.head_count_kv"
    r"|modern-bert\.attention\.layer_norm_rms_epsilon|nomic-bert(-moe)?\.attention\.(key|value)_length"
    r"|laguna\.attention\.sliding_window_pattern|mimo2\.expert_weights_(norm|scale)"
    r"|eurobert\.classifier\.pooling_type|llama-embed\.pooling_type|minicpm3\.rope\.(freq_base|scaling\..*)|afmoe\.(attention\.sliding_window_pattern|expert_weights_norm)|chatglm\.context_length"
    r"|orion\.tensor_data_layout|gemma3n\.activation_sparsity_scale|xverse\.(vocab_size|tensor_data_layout)|pangu-embedded\.(vocab_size|rope\.dimension_count)"
    r"|minimax-01\.attention\.recurrent_layers|(bailingmoe2|exaone-moe)\.nextn_predict_layers|llama4\.attention\.(chunk_size|temperature_.*)|(deepseek2|kimi-linear)\.expert_weights_norm|(qwen|grok)\.attention\.layer_norm_epsilon"
)

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 41)]

#: Runs the converter with our vocabulary, because random models have no tokenizer.
CONVERT = """
import sys
source, folder, out, *flags = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf, conversion, conversion.base, gguf
def set_vocab(self):
    n = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("llama")
    self.gguf_writer.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"<0x%02X>" % i for i in range(256)]
                                    + [b"t%d" % i for i in range(n - 259)])
    self.gguf_writer.add_token_scores([-1000.0] * n)
    self.gguf_writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (n - 259))
find = conversion.get_model_class
def get_model_class(*arguments, **keywords):
    found = find(*arguments, **keywords)
    for kind in (found, *(inner for inner in vars(found).values() if isinstance(inner, type))):
        kind.set_vocab = set_vocab
        kind._get_suppress_tokens = lambda self: None  # which needs the tokenizer
    found.no_mtp = True
    return found
convert_hf_to_gguf.get_model_class = get_model_class
sys.argv = ["convert", folder, "--outfile", out, "--outtype", "f32", *flags]
convert_hf_to_gguf.main()
"""

#: Writes llama.cpp's logits after each prefix of the tokens, with the first file, to the second file.
COMPUTE = """
import sys
import numpy as np
from pathlib import Path
from tests.benchmarks.theirs import LlamaCpp
path, ids, out = sys.argv[1:]
ids = [int(i) for i in ids.split(",")]
with LlamaCpp(Path(path), repack=False) as model:
    context = model.context(2, 128, flash=False)
    np.save(out, np.stack([context.logits(ids[: i + 1]) for i in range(len(ids))]))
"""


def largest_error(ours: Any, theirs: Any) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def is_same(one: TensorInfo, other: TensorInfo) -> bool:
    """Compare tensors, with the tolerance of float32."""
    return one.data.tobytes() == other.data.tobytes() or (
        one.type == GGMLType.F32 and np.allclose(one.data.view(np.float32), other.data.view(np.float32), rtol=1e-6)
    )


def differences(ours: Path, theirs: Path) -> list[str]:
    """Return the differences between the keys, values and tensors of two files."""
    with GGUFFile.open(ours) as one, GGUFFile.open(theirs) as other:
        keys = [
            f"{key}: {one.metadata.get(key)} / {other.metadata.get(key)}"
            for key in sorted({*one.metadata, *other.metadata})
            if not EXCEPTIONS.fullmatch(key) and not np.array_equal(one.metadata.get(key), other.metadata.get(key))
        ]
        tensors = [
            f"{name}: {mine and (mine.shape, mine.type.name)} / {its and (its.shape, its.type.name)}"
            for name in sorted({*one.tensors, *other.tensors})
            for mine, its in [(one.tensors.get(name), other.tensors.get(name))]
            if not (mine and its and mine.shape == its.shape and mine.type == its.type and is_same(mine, its))
        ]
    return keys + tensors


#: Models whose files differ on purpose: latents as before 2025, gates of Qwen 3 Next as in 2025, Llama 4 with numbers
#: other than llama.cpp's defaults, CogVLM with the matrices for images that llama.cpp requires, and Granite 4
#: with another architecture's name.
OTHERWISE = {
    "cogvlm",
    "cogvlm-2",
    "deepseek-v3-old",
    "granite-4",
    "granite-4-moe",
    "llama4",
    "qwen3next-old",
}
#: Models with settings that llama.cpp's converter loses.
LOSSY = {"plamo2-window"}


def as_released(settings: str) -> dict[str, Any]:
    return {"model_type": "released", **parsed(settings)}


UNSET = dict.fromkeys(("num_key_value_heads", "rms_norm_eps", "rope_parameters"))
#: Settings of released models that differ from what transformers writes today.
RELEASED: dict[str, dict[str, Any]] = {
    "bailingmoe2": as_released("architectures=['BailingMoeV2ForCausalLM'] num_experts=8 num_shared_experts=1"),
    "bailingmoe3": as_released("""
        architectures=['BailingMoeV3ForCausalLM'] no_kda_lora=True n_group=4 norm_topk_prob=True num_experts=8
        gated_attention_proj_granularity_type=head_wise num_shared_experts=2 moe_shared_expert_intermediate_size=96
    """),
    "bert": UNSET,
    "xlm-roberta": UNSET,
    "cogvlm": {"num_key_value_heads": 4},
    "cogvlm-2": {"num_key_value_heads": 2},
    "cohere2": {"rotary_pct": 1.0},
    "command-r": {"head_dim": None},
    "command-r-plus": {"head_dim": None},
    "deepseek": {"first_k_dense_replace": 1},
    "deepseek-ocr": as_released("""
        architectures=['DeepseekOCRForCausalLM'] first_k_dense_replace=1 qk_rope_head_dim=16 qk_nope_head_dim=0
    """),
    "eurobert": {"classifier_pooling": "mean"},
    "falcon": {"num_kv_heads": 1},
    "glm-5.3": as_released("mla_use_nope=True first_k_dense_replace=1")
    | {"linear_attn_config": parsed("head_dim=16 num_heads=4 short_conv_kernel_size=4 gate_lower_bound=-5.0")},
    "gpt2": {"n_ctx": 128},
    "gptneox": as_released("rotary_pct=0.5"),
    "gptneox-serial": as_released("rotary_pct=0.5"),
    "granite-swa": {"no_rope_layers": [0, 1, 1, 1]},
    "granite-4": {"layer_types": ["attention"] * 4},
    "granite-4-moe": {"layer_types": ["attention"] * 4},
    "granitehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "granitehybrid-moe": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "mamba2": {"intermediate_size": None},
    "mimo2": as_released("""
        hybrid_layer_pattern=[0,1,1,1,1,0,1] swa_head_dim=16 swa_v_head_dim=8 swa_num_attention_heads=4
        swa_num_key_value_heads=2 topk_method=noaux_tc layernorm_epsilon=1e-5 rope_parameters=None rope_theta=10_000.0
        swa_rope_theta=500.0 partial_rotary_factor=0.5
    """),
    "minimax-01": as_released("""
        architectures=['MiniMaxText01ForCausalLM'] rotary_dim=16 attn_type_list=[0,1,0,0] postnorm=True
        layernorm_full_attention_alpha=1.5 layernorm_linear_attention_alpha=1.5 layernorm_mlp_alpha=1.5
        layernorm_full_attention_beta=1.0 layernorm_linear_attention_beta=1.0 layernorm_mlp_beta=1.0 layer_types=None
        full_attn_alpha_factor=None linear_attn_alpha_factor=None mlp_alpha_factor=None full_attn_beta_factor=None
        linear_attn_beta_factor=None mlp_beta_factor=None
    """),
    "minimax-m2": {"rotary_dim": 8},
    "minimax-m3": as_released("n_shared_experts=1 rotary_dim=8 moe_layer_freq=[0,1,1,1]")
    | {
        "sparse_attention_config": parsed("""
        sparse_num_index_heads=2 sparse_index_dim=32 sparse_block_size=4 sparse_topk_blocks=3 sparse_local_block=1
    """)
    },
    "modern-bert": parsed("num_key_value_heads=None head_dim=None rms_norm_eps=None layer_norm_eps=1e-5"),
    "nemotron-h": as_released("""
        num_hidden_layers=5 layers_block_type=None hybrid_override_pattern=M-*M- num_experts_per_tok=None n_group=None
        n_routed_experts=None topk_group=None moe_intermediate_size=None moe_shared_expert_intermediate_size=None
    """),
    "exaone": as_released("architectures=['ExaoneForCausalLM'] activation_function=silu"),
    "jina-bert-v2": UNSET,
    "mpt": {"architectures": ["MPTForCausalLM"]},
    "mpt-positions": {"architectures": ["MPTForCausalLM"]},
    "neo-bert": dict.fromkeys(("classifier_pooling", "num_key_value_heads", "head_dim")),
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "qwen": {"rms_norm_eps": 1e-5},
    "qwen4exp": as_released("layer_types=['linear_attention','full_attention','linear_attention','full_attention']"),
    "step35": as_released("""
        num_attention_groups=2 norm_expert_weight=True moe_num_experts=6 moe_top_k=2 moe_layers_enum='1,2,3'
        attention_other_setting={'num_attention_heads':6} partial_rotary_factors=[0.5,1.0,1.0,1.0]
    """),
    "nomic-bert-moe": parsed("""
        num_hidden_layers=4 hidden_size=64 num_attention_heads=4 intermediate_size=48 layer_norm_eps=1e-5
        max_position_embeddings=512
    """)
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "nomic-bert": parsed("""
        num_key_value_heads=None head_dim=None rms_norm_eps=None n_positions=8192 activation_function=swiglu
        prenorm=False causal=False qkv_proj_bias=False mlp_fc1_bias=False mlp_fc2_bias=False rotary_emb_fraction=1.0
        rotary_emb_interleaved=False
    """),
}


def release(name: str, folder: Path) -> None:
    """Change a model's configuration and tensors to the form of released models."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    if name == "kimi-linear":
        save_file({key.replace("0.block_sparse_moe.", "0.mlp."): t for key, t in load_file(file).items()}, file)
    if name == "qwen3vlmoe":
        turned = {key: t.mT.contiguous() if ".experts." in key else t for key, t in load_file(file).items()}
        save_file(turned, file)
    path = folder / "config.json"
    changes = RELEASED.get(name, {})
    settings = (
        {"rotary_emb_scale_base": None} | json.loads(path.read_text()) | changes
    )  # Nomic's converter needs null
    path.write_text(json.dumps({key: settings[key] for key in settings if changes.get(key, 0) is not None}))
    if (folder / "1_Pooling").exists():
        (folder / "modules.json").write_text(json.dumps([{"type": "Pooling", "path": "1_Pooling"}]))


def write_tokenizer(name: str, folder: Path, n_vocab: int) -> None:
    """Write the tokenizer files that some converters read before they write a vocabulary."""
    vocabulary = {f"t{i}": i for i in range(n_vocab)}
    model = {"type": "WordPiece" if name.startswith("nomic-bert") else "BPE", "vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


class Result(NamedTuple):
    """Errors of the logits of our file of a tiny model, and whether the converted file is the same."""

    on_reference: float
    on_cpu: float
    is_same: bool | None

    @property
    def is_good(self) -> bool:
        return self.on_reference < 1e-3 and self.on_cpu < 5e-3 and self.is_same is not False


def compare(name: str, folder: Path, options: argparse.Namespace) -> Result:
    """Compare one tiny model in all ways, and print a line."""
    entry = MODELS[name]
    model = make_model(entry)
    path, expected = write(folder / f"{name}.gguf", entry, model), logits_of(model)
    own = errors(path, expected)
    begin = f"{name:20} {own[0]:9.1e} {own[1]:9.1e}"
    converted = folder / f"{name}-converted.gguf"
    write_tokenizer(name, folder / f"{name}.hf", expected.shape[1])
    release(name, folder / f"{name}.hf")
    flags = ["--fuse-qkv", "--fuse-gate-up-exps"] if options.fuse else []
    command = [sys.executable, "-c", CONVERT, str(options.source), str(folder / f"{name}.hf"), str(converted), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{begin}  not converted: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return Result(*own, None)
    if name in DIFFUSION:  # the converter's file lacks the mask token, because it has our vocabulary
        other = differences(path, converted)
        print(begin, *other, sep="\n    ", flush=True)
        return Result(*own, not other)
    try:
        error = largest_error(Runner(converted, ReferenceOps(np.float32)).logits(IDS), expected)
    except LocalLLMError as refused:
        print(f"{begin}  {refused}", flush=True)
        return Result(*own, False)
    theirs = ""
    if options.binding and name in TINY:  # llama.cpp returns no vectors of single tokens
        out = folder / f"{name}.npy"
        command = [options.binding, "-c", COMPUTE, str(path), ",".join(map(str, IDS)), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        theirs = f"{largest_error(np.load(out), expected):9.1e}" if out.exists() else done.stderr.strip()[-80:]
    other = differences(path, converted)
    print(f"{begin} {error:9.1e} {theirs}", *other, sep="\n    ", flush=True)
    if name in LOSSY:
        return Result(*own, None)
    return Result(*own, False if error >= 1e-3 else None if name in OTHERWISE else not other)


def logits_of(model: Any) -> Any:
    """Return transformers' logits [T, n_vocab], or the vectors [T, d] of an embedding model."""
    import torch

    with torch.no_grad():
        return next(iter(model(torch.tensor([IDS])).values()))[0].numpy()


def errors(path: Path, expected: Any) -> tuple[float, float]:
    """Return the errors on the reference and on the CPU."""
    on_reference, on_cpu = (Runner(path, ops).logits(IDS) for ops in (ReferenceOps(np.float32), CPUOps(threads=2)))
    return largest_error(on_reference, expected), largest_error(on_cpu, expected)


def row_of(architecture: str, results: list[Result]) -> str:
    """Return a row of the table, with the largest errors of its models."""
    numbers = [f"{max(each):.0e}" for each in ([r.on_reference for r in results], [r.on_cpu for r in results])]
    same = {r.is_same for r in results}
    agrees = "no" if False in same else "yes" if True in same else "–"
    return f"| `{architecture}` | {ARCHITECTURES[architecture].models} | {numbers[0]} | {numbers[1]} | {agrees} |"


def write_table(results: dict[str, list[Result]]) -> None:
    text = PAGE.read_text("utf-8")
    begin, line, rest = text.partition("|---|---|---|---|---|\n")
    table, _, end = rest.partition("\n\n")
    old = {row.split("`")[1]: row for row in table.splitlines()}
    rows = [row_of(name, results[name]) if name in results else old[name] for name in ARCHITECTURES]
    PAGE.write_text("\n".join([begin + line + rows[0], *rows[1:], "", end]), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--fuse", action="store_true")
    parser.add_argument("--binding", metavar="PYTHON")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_intermixed_args()
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"no tiny model is called {', '.join(unknown)}: choose names from tests/models/tiny.py")
    warnings.simplefilter("ignore")
    print(f"{'':20} {'reference':>9} {'CPU':>9} {'converted':>9} {'llama.cpp':>9}")
    results = defaultdict[str, list[Result]](list)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or MODELS:
            results[MODELS[name].architecture].append(compare(name, Path(folder), options))
    if options.table:
        write_table(results)
    sys.exit(not all(result.is_good for each in results.values() for result in each))


if __name__ == "__main__":
    main()
