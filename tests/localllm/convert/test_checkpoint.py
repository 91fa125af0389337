"""Conversion: the written file, and folders that are rejected before anything is written.

`tests.models.test_transformers` converts every architecture.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import files, models
from localllm.convert import Checkpoint
from localllm.convert.config import with_floats
from localllm.errors import LocalLLMError, ModelError, OutputError, UnsupportedArchitectureError
from localllm.gguf import GGUFFile, writer
from localllm.models import gpt_oss, qwen4exp
from localllm.models.hf_convert import gemma_keys
from localllm.quant.formats import dequantize
from localllm.quant.types import GGMLType
from localllm.quantize import plan, run
from tests.helpers import tiny_models
from tests.helpers.checkpoints import write_checkpoint, write_safetensors
from tests.helpers.command_line import run_main


def convert(folder: Path, out: Path, type: str | None = None, **options: Any) -> Path:
    list(run(plan(Checkpoint(folder), out, type, allow_requantize=True), **options))
    return out


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_tensors_and_keys_are_those_of_another_writer(model_type: str, tmp_path: Path) -> None:
    """Call `tiny_models.write_gguf`, with different parameter names."""
    settings = tiny_models.config(model_type)
    theirs = tiny_models.write_gguf(tmp_path / "b.gguf", settings, tiny_models.random_weights(settings))
    ours = convert(write_checkpoint(tmp_path / "folder", model_type), tmp_path / "a.gguf")
    with GGUFFile.open(ours) as one, GGUFFile.open(theirs) as other:
        assert one.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            np.testing.assert_array_equal(one.tensors[name].data, tensor.data)
        for key in other.metadata:
            if not re.match(r"general\.|.*(rope.dimension_count|unknown_|add_)", key):
                np.testing.assert_array_equal(one.metadata[key], other.metadata[key], err_msg=key)


def test_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    whole = convert(write_checkpoint(tmp_path / "a"), tmp_path / "a.gguf")
    folder = write_checkpoint(tmp_path / "b")
    weights = tiny_models.random_weights(tiny_models.config())
    (folder / "model.safetensors").unlink()
    index = {}
    for i, name in enumerate(weights):
        index[name] = f"model-{i}.safetensors"
        write_safetensors(folder / index[name], {name: weights[name]})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    parts = convert(folder, tmp_path / "b.gguf")
    with GGUFFile.open(whole) as one, GGUFFile.open(parts) as other:
        assert all(np.array_equal(one.tensors[name].data, other.tensors[name].data) for name in one.tensors)


def test_tied_weights_may_have_the_heads_name_alone(tmp_path: Path) -> None:
    settings = tiny_models.config(tie_word_embeddings=True)
    weights = tiny_models.random_weights(settings)
    weights.pop("lm_head.weight", None)
    usual = convert(write_checkpoint(tmp_path / "a", tie_word_embeddings=True), tmp_path / "a.gguf")
    folder = write_checkpoint(tmp_path / "b", tie_word_embeddings=True)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    write_safetensors(folder / "model.safetensors", weights)
    with GGUFFile.open(usual) as one, GGUFFile.open(convert(folder, tmp_path / "b.gguf")) as other:
        assert one.tensors.keys() == other.tensors.keys()
        assert all(np.array_equal(one.tensors[name].data, other.tensors[name].data) for name in one.tensors)


def test_types(tmp_path: Path) -> None:
    weight = np.full((64, 64), 0x3F80, np.uint16)  # 1 in bfloat16
    folder = write_checkpoint(tmp_path / "a", tensors={"model.layers.0.self_attn.o_proj.weight": weight})
    types = {}
    for type in (None, "F16", "Q8_0"):
        with GGUFFile.open(convert(folder, tmp_path / f"{type}.gguf", type)) as file:
            names = ("blk.0.attn_output.weight", "blk.0.attn_q.weight", "blk.0.attn_norm.weight")
            types[type] = [file.tensors[name].type.name for name in names]
            values = dequantize(file.tensors["blk.0.attn_output.weight"].data, file.tensors[names[0]].type)
            np.testing.assert_allclose(values, 1, rtol=1e-4)
            assert file.metadata["general.file_type"] == {None: 0, "F16": 1, "Q8_0": 7}[type]
    assert types == {
        None: ["BF16", "F32", "F32"],
        "F16": ["F16", "F16", "F32"],
        "Q8_0": ["Q8_0", "Q8_0", "F32"],
    }


def test_integers_of_gptq_are_kept_where_rows_are_reordered(tmp_path: Path) -> None:
    """The rows of query are reordered in Llama files."""
    rng = np.random.default_rng(0)
    words = rng.integers(-(1 << 31), 1 << 31, (8, 64)).astype(np.int32)  # [64 / 8, 64]
    name = "model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.qweight": words,
        f"{name}.qzeros": np.full((2, 8), 0x77777777, np.int32),
        f"{name}.scales": rng.uniform(0.01, 0.02, (2, 64)).astype(np.float16),
        f"{name}.g_idx": (np.arange(64) // 32).astype(np.int32),
    }
    quantization = {"quant_method": "gptq", "bits": 4}
    folder = write_checkpoint(
        tmp_path / "a", tensors=tensors, without=f"{name}.weight", quantization_config=quantization
    )
    integers = (words.view(np.uint32)[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15).reshape(64, 64)
    values = (integers.astype(np.float32) - 8) * tensors[f"{name}.scales"].repeat(32, 0).astype(np.float32)
    expected = tiny_models.interleave_pairs(values.T, 4)
    with GGUFFile.open(convert(folder, tmp_path / "a.gguf")) as file:
        tensor = file.tensors["blk.0.attn_q.weight"]
        assert tensor.type is GGMLType.Q4_0
        np.testing.assert_array_equal(dequantize(tensor.data, tensor.type), expected)
    with GGUFFile.open(convert(folder, tmp_path / "b.gguf", "F16")) as file:
        values = dequantize(file.tensors["blk.0.attn_q.weight"].data, GGMLType.F16)
        np.testing.assert_allclose(values, expected, rtol=1e-3)


def test_a_model_that_sees_is_converted_without_its_eyes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a", "mistral", sliding_window=None)
    settings = json.loads((folder / "config.json").read_text())
    text = settings | {"model_type": "ministral3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral3", "text_config": text}))
    weights = tiny_models.random_weights(settings)
    seeing = {f"language_model.{name}": array for name, array in weights.items()}
    seeing |= {"vision_tower.conv.weight": np.float32([1]), "multi_modal_projector.linear.weight": np.float32([1])}
    write_safetensors(folder / "model.safetensors", seeing)
    checkpoint = Checkpoint(folder)
    assert checkpoint.architecture == "mistral3"
    assert len(checkpoint.tensors) == len(weights)


def test_sampling_settings_and_name(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "models--org--Name" / "snapshots" / "abc")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 1, "top_k": 20, "do_sample": True}))
    metadata = Checkpoint(folder).metadata
    assert metadata["general.name"] == "Name"
    sampling = {key: value for key, value in metadata.items() if "sampling" in key}
    assert sampling == {"general.sampling.temp": 1.0, "general.sampling.top_k": 20}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
BAD: list[tuple[dict[str, Any], type[LocalLLMError], str]] = [
    ({"model_type": "t5"}, UnsupportedArchitectureError, "has model_type = 't5', which localllm does not convert"),
    ({"num_attention_heads": None}, ModelError, "cannot be converted|do not make a llama model"),
    ({"num_attention_heads": 5}, ModelError, "cannot be converted|do not make a llama model"),
    ({"hidden_size": "64"}, ModelError, "cannot be converted|do not make a llama model"),
    ({"num_hidden_layers": 4}, ModelError, "block_count is 4, but the file has tensors of 3 layers"),
    ({"rope_scaling": "linear"}, ModelError, "rope_scaling = 'linear', which must be an object"),
    ({"rope_scaling": {"rope_type": "llama3"}}, ModelError, "do not make a llama model"),
    ({"model_type": ["llama"]}, UnsupportedArchitectureError, "which localllm does not convert"),
    ({"head_dim": math.inf}, ModelError, "do not make a llama model"),
    ({"head_dim": 1 << 40, "rope_scaling": LLAMA3}, ModelError, "1099511627776 values of a head are rotated"),
    ({"rope_scaling": LLAMA3 | {"rope_theta": 0}}, ModelError, "cannot be converted: llama.rope.freq_base is 0"),
    ({"rope_scaling": LLAMA3 | {"factor": 0}}, ModelError, "cannot be converted: .*rope_freqs|do not make"),
    ({"num_hidden_layers": 10**12}, ModelError, "it has num_hidden_layers = 1000000000000"),
    ({"vocab_size": {"a": 1}}, ModelError, "key 'llama.vocab_size': {'a': 1} has no place in a GGUF file"),
    ({"vocab_size": -1}, ModelError, "key 'llama.vocab_size': -1 has no place"),
    ({"vocab_size": 1e300}, ModelError, r"key 'llama.vocab_size': 1e\+300 has no place"),
    ({"vocab_size": [[300]]}, ModelError, r"key 'llama.vocab_size': \[\[300\]\] has no place"),
    ({"vocab_size": ["a", {}]}, ModelError, r"key 'llama.vocab_size': \['a', \{\}\] has no place"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD)
def test_odd_configurations_are_refused(
    changes: dict[str, Any], kind: type[LocalLLMError], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "a")
    settings = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(kind, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize("key", ["architectures", "layers_block_type", "hybrid_override_pattern"])
@pytest.mark.parametrize("value", [5, [[]], {}])
def test_what_tells_architectures_apart_may_be_odd(key: str, value: object, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 3} | settings | {key: value}))
    assert Checkpoint(folder).architecture == "llama"


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"without": Q}, "has no tensor blk.1.attn_q.weight"),
        ({"tensors": {Q: np.zeros((32, 64), np.float32)}}, r"blk.1.attn_q.weight"),
        (
            {"tensors": {"model.norm.weight": np.zeros((*[1] * 40, 64), np.float32)}},
            r"would not load: tensor 'output_norm.weight': 41 dimensions are more than 4",
        ),
        (
            {"tensors": {"model.layers.0.extra.weight": np.zeros(4, np.float32)}},
            "has the tensor 'model.layers.0.extra.weight'",
        ),
        ({"tensors": {Q: np.zeros((64, 64), np.uint8)}}, "is U8 without scales"),
    ],
)
def test_missing_and_odd_tensors_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        Checkpoint(write_checkpoint(tmp_path / "a", **options))


def test_missing_experts_are_refused(tmp_path: Path) -> None:
    experts = {f"model.layers.0.mlp.experts.{i}.gate_proj.weight": np.zeros((4, 64), np.float32) for i in (0, 2)}
    with pytest.raises(ModelError, match=r"lacks experts of 'model.layers.0.mlp.experts"):
        Checkpoint(write_checkpoint(tmp_path / "a", "qwen2_moe", tensors=experts))


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        Checkpoint(tmp_path)


def test_nan_weights_are_named_and_leave_no_file(tmp_path: Path) -> None:
    weight = np.zeros((64, 64), np.float32)
    weight[3, 5] = np.nan
    folder = write_checkpoint(tmp_path / "a", tensors={Q: weight})
    for type in (None, "F16", "Q8_0"):
        with pytest.raises(ModelError, match=r"'blk.1.attn_q.weight' has values that are NaN"):
            convert(folder, tmp_path / "out.gguf", type)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with GGUFFile.open(convert(folder, tmp_path / "out.gguf", allow_nan=True)) as file:
        assert not file.tensors["blk.1.attn_q.weight"].data.any()


def test_a_missing_head_is_not_the_embedding(tmp_path: Path) -> None:
    options = {"without": "lm_head.weight", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, and config.json has tie_word_embeddings = false"):
        Checkpoint(write_checkpoint(tmp_path / "a", **options))
    folder = write_checkpoint(tmp_path / "b", **options)
    (folder / "modules.json").write_text("[]")  # of an embedding model
    Checkpoint(folder)


POOLING: list[tuple[dict[str, Any], str]] = [
    ({"pooling_mode": "mean"}, ""),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ""),
    ({"pooling_mode_max_tokens": True}, "has the pooling pooling_mode_max_tokens"),
    ({"pooling_mode_weightedmean_tokens": True}, "has the pooling pooling_mode_weightedmean_tokens"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token and pooling_mode_mean_tokens"),
    ({"pooling_mode": "max"}, "has the pooling max: GGUF files can only describe"),
]


@pytest.mark.parametrize(("values", "message"), POOLING)
def test_poolings_that_a_file_cannot_describe_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | values))
    if message:
        with pytest.raises(ModelError, match=message):
            Checkpoint(folder)
    else:
        expected = 2 if "pooling_mode_cls_token" in values else 1
        assert Checkpoint(folder).metadata["llama.pooling_type"] == expected


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["models.Transformer:", "models.Pooling:1_Pooling", "models.Normalize:2_Normalize"], ""),
        (["models.Transformer:", "models.Pooling:2_Pooling"], "has the modules Transformer, 2_Pooling: GGUF files"),
        (["models.Transformer:", "models.Pooling:1_Pooling", "models.LayerNorm:2_LayerNorm"], "2_LayerNorm"),
        (["models.Transformer:", "models.Normalize:1_Normalize", "models.Pooling:1_Pooling"], "Normalize, 1_Pooling"),
        (["models.Transformer:", "models.Pooling:1_Pooling", "models.Dense:2_Dense"], "lacks 2_Dense/config.json"),
    ],
)
def test_modules_that_a_file_cannot_describe_are_refused(modules: list[str], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    pairs = (module.split(":") for module in modules)
    listed = [{"type": f"sentence_transformers.{type_}", "path": path} for type_, path in pairs]
    (folder / "modules.json").write_text(json.dumps(listed))
    if message:
        with pytest.raises(ModelError, match=message):
            Checkpoint(folder)
        return
    Checkpoint(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(ModelError, match="has do_lower_case, for which GGUF files of this tokenizer have no key"):
        Checkpoint(folder)


_KILLED = """
import os, pathlib, signal, sys
from localllm import models
from localllm.convert import Checkpoint
from localllm.quantize import plan, run
for i, _ in enumerate(run(plan(Checkpoint(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]), "F16"), threads=1)):
    if i == 12:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_what_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SYNC", 1000)
    folder, out, partial = write_checkpoint(tmp_path / "a"), tmp_path / "out.gguf", tmp_path / "out.gguf.part"
    whole = convert(folder, tmp_path / "whole.gguf", "F16").read_bytes()
    killed = subprocess.run([sys.executable, "-c", _KILLED, folder, out], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert partial.read_bytes()[:4] != b"GGUF"
    n_all = len(Checkpoint(folder).tensors)
    n_written = len(list(islice(run(plan(Checkpoint(folder), out, "F16")), 3)))  # stopped as by Ctrl-C
    n_written += len(list(run(plan(Checkpoint(folder), out, "F16"))))
    assert n_all - 12 < n_written < n_all
    assert out.read_bytes() == whole
    assert not partial.exists()


def test_what_was_written_of_other_weights_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_SYNC", 1000)
    folder, out = write_checkpoint(tmp_path / "a"), tmp_path / "out.gguf"
    n_all = len(Checkpoint(folder).tensors)
    n_written = []
    for is_other in (False, True):
        out.unlink(missing_ok=True)
        list(islice(run(plan(Checkpoint(folder), out, "F16")), 15))
        if is_other:
            (folder / "model.safetensors").touch()
        n_written.append(len(list(run(plan(Checkpoint(folder), out, "F16")))))
    assert n_written[0] < n_written[1] == n_all


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_checkpoint(tmp_path / "a")
    put, written = files.NewFile.put, []

    def fail(self: files.NewFile, data: Any) -> None:
        written.append(data)
        if len(written) == 9:
            monkeypatch.setattr(self, "_file", Full(self._file))
        put(self, data)

    class Full:
        def __init__(self, file: Any) -> None:
            self.close, self.raw = file.close, file.raw

        def write(self, data: Any) -> None:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.NewFile, "put", fail)
    with pytest.raises(OutputError, match="the disk is full"):
        convert(folder, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OutputError, match="pipe is a device or a pipe, not a file: choose"), files.NewFile(pipe, 3):
        pass
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = write_checkpoint(tmp_path / "Tiny")
    monkeypatch.chdir(tmp_path)
    done = run_main(capfdbinary, "convert", folder, "--type", "q8_0", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["files"] == ["Tiny-Q8_0.gguf"]
    with localllm.load(tmp_path / "Tiny-Q8_0.gguf", threads=1) as llm:
        assert llm.generate("the", max_tokens=3, temperature=0, ignore_eos=True)
    done = run_main(capfdbinary, "convert", folder, "-o", "x.gguf", "--dry-run")
    assert done.code == 0, done.err
    assert "blk.0.attn_q.weight" in done.out
    assert not (tmp_path / "x.gguf").exists()
    done = run_main(capfdbinary, "convert", tmp_path / "Tiny-Q8_0.gguf")
    assert "is a file: name the folder of a Hugging Face model" in done.error()


def test_clipped_queries_are_refused(tmp_path: Path) -> None:
    sizes = {"q_norm": 64, "k_norm": 32}
    norms = {
        f"model.layers.{i}.self_attn.{name}.weight": np.ones(n, np.float32)
        for i in range(3)
        for name, n in sizes.items()
    }
    Checkpoint(write_checkpoint(tmp_path / "a", "olmoe", tensors=norms, num_experts=0))
    with pytest.raises(ModelError, match=r"olmoe.attention.clamp_kqv = 8.0, which localllm does not support yet"):
        Checkpoint(write_checkpoint(tmp_path / "b", "olmoe", tensors=norms, num_experts=0, clip_qkv=8.0))


def test_what_files_have_no_key_for_is_refused() -> None:
    gemma = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 7}
    assert gemma_keys(SimpleNamespace(**gemma, query_pre_attn_scalar=16)) == gemma_keys(SimpleNamespace(**gemma))
    with pytest.raises(ModelError, match="query_pre_attn_scalar = 24, but GGUF files mean 16"):
        gemma_keys(SimpleNamespace(**gemma, query_pre_attn_scalar=24))
    with pytest.raises(ModelError, match="truncates, which GGUF files of gpt-oss do not"):
        gpt_oss.hf_keys(SimpleNamespace(rope_parameters={"rope_type": "yarn"}))


@pytest.mark.parametrize(
    "changes",
    [{"ngram_size": 10**9}, {"heads_per_ngram": 10**9}, {"ngram_vocab_size_base": 1 << 62}, {"heads_per_ngram": 0}],
    ids=str,
)
def test_n_grams_beyond_what_a_model_can_have(changes: dict[str, int]) -> None:
    """The table sizes are primes, whose search would take forever."""
    usual = {"ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50}
    config = SimpleNamespace(
        **usual | changes, ple_layer_ids=[3], eos_token_id=2, vocab_size=300, seed=0, hidden_size=64
    )
    with pytest.raises(ValueError, match=r"^n-grams of \d+ tokens, with \d+ heads of \d+ rows$"):
        qwen4exp._ngram_keys(config)


def test_numbers_that_files_have_as_floats_are_floats_also_where_the_configuration_has_whole_ones() -> None:
    keys = {"rope.freq_base": 10_000, "swiglu_clamp_exp": [7, 0], "rope.dimension_sections": [2, 2], "block_count": 4}
    assert with_floats(keys) == keys
    assert [type(value) for value in with_floats(keys).values()] == [float, list, list, int]
    assert [type(with_floats(keys)[key][0]) for key in ("swiglu_clamp_exp", "rope.dimension_sections")] == [
        float,
        int,
    ]
    read = r'\bread(?:_each|_uniform)?\(\s*f?"([^"]+)",[^")]*\bfloat\b'
    sources = [path.read_text("utf-8") for path in Path(models.__file__).parent.glob("*.py")]
    names = {name.replace("{name}", "exp") for text in sources for name in re.findall(read, text)}
    assert {"rope.freq_base", "expert_weights_scale", "attention.layer_norm_epsilon"} < names
    for name in names:
        assert type(with_floats({name: 1})[name]) is float, name


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]


@pytest.mark.posix("Windows has no named pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json"])
def test_pipes_of_a_folder_are_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=rf"{name} cannot be read \(it is not a regular file\)"):
        convert(folder, tmp_path / "out.gguf")


@pytest.mark.posix("links need privileges on Windows")
@pytest.mark.parametrize("name", FILES)
def test_links_out_of_a_folder_are_not_followed(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "a")
    secret = tmp_path / "secret"
    secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(ModelError, match="it is a link to a file in another folder: copy that file"):
        convert(folder, tmp_path / "out.gguf")


@pytest.mark.posix("links need privileges on Windows")
def test_a_snapshot_of_the_hubs_cache_is_converted(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    write_checkpoint(blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    convert(snapshot, tmp_path / "out.gguf")
    with localllm.load(tmp_path / "out.gguf", threads=1, context=64) as llm:
        assert llm.generate("the", max_tokens=1)
