"""Check that localllm reads the keys and tensors that llama.cpp's converter writes.

`tests.benchmarks.converter_names` extracts the data from llama.cpp's source: the headers of files that the
converter wrote for tiny models, and all its names of keys and tensors for each architecture.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.kernels.operations import RopeAppend
from localllm.models.config import _HARMLESS, _PARTS, ModelMetadata
from localllm.models.registry import ARCHITECTURES, read_model
from localllm.models.weights import Weights
from localllm.quant.types import GGMLType

DATA = Path(__file__).parents[1] / "data"
NAMES: dict[str, dict[str, list[str]]] = json.loads((DATA / "converter_names.json").read_text("utf-8"))
HEADERS: dict[str, dict[str, Any]] = json.loads((DATA / "converted_headers.json").read_text("utf-8"))


@dataclass(frozen=True)
class HeaderTensor:
    """A tensor of a header, filled with ones, because reading a model needs the values of some small tensors."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType = GGMLType.F32

    @property
    def data(self) -> NDArray[np.uint8]:
        return np.ones(prod(self.shape), np.float32).view(np.uint8)

    def drop_pages(self) -> None:
        pass


@dataclass(frozen=True)
class HeaderFile:
    metadata: dict[str, Any]
    tensors: dict[str, HeaderTensor]

    @classmethod
    def of(cls, name: str) -> HeaderFile:
        header, tensors = HEADERS[name], {}
        for generic, shapes in header["tensors"].items():
            for shape, layers in shapes.items():
                for layer in layers:
                    own = generic.replace("blk.N.", f"blk.{layer}.")
                    tensors[own] = HeaderTensor(own, tuple(map(int, shape.split())))
        return cls(header["keys"] | {"tokenizer.ggml.mask_token_id": 0}, tensors)  # headers have no tokenizer


@pytest.mark.parametrize("name", HEADERS)
def test_files_of_the_converter_load(name: str) -> None:
    file = HeaderFile.of(name)
    assert read_model(file).config.architecture == file.metadata["general.architecture"]


# -- Names that the converter can write and no tiny model has --------------------------------------------------------

#: Names that no released model of the architecture has, as patterns of "architecture name", with the reason.
#: llama.cpp's tables contain tensors of other models, and classes share code.  Loading refuses such a file.
NOT_RELEASED = {
    r"cogvlm blk\.N\.vis_\w+": "matrices for tokens of images, which text does not use",
    r"grok blk\.N\.ffn_(down|gate)": "only in Grok 2, whose tiny model is grok-2",
    r"maple rope\.scaling\..*": "layers with a window are not scaled",
    r"nomic-bert-moe (output_norm|position_embd)": "as in nomic-bert",
    r"plamo2 blk\.N\.attn_[qk]": "query and key are in attn_qkv",
    r"smallthinker blk\.N\.ffn_(down|gate|up)": "all layers have experts",
    r".* (norm_before_fc|norm_before_residual|target_hidden_size|target_layers)": "only in EAGLE-3 drafters",
    r".* rope\.freq_base_swa": "only in models with other rotary frequencies in windowed layers",
    r".* attention\.sliding_window": "its class is shared with Unlimited-OCR",
    r"(arcee|dream|eurobert|lfm2|llada|qwen2|qwen3(vl)?) classifier\.\w+": "only in rerankers",
    r"deepseek2-ocr (attention\.\w+_(mla|lora_rank)|blk\.N\.attn_(k_b|kv_\w+|q_\w+|v_b))": "of DeepSeek 2",
    r"gemma-embedding \{dense\}_feat_(in|out)": "written as dense_2_feat_in and so on",
    r"(apertus|mpt) blk\.N\.ffn(_gate)?": "a mistake in the table, and the scales of AWQ",
    r"(arcee|deci|llama-embed|minicpm|mistral3) blk\.N\.ffn_\w+": "no released model has experts",
    r".* blk\.N\.attn_rot_embd": "only converters of 2023 wrote it",
    r"(bert|jina-bert-v3|nomic-bert) output_norm": "encoders lack this norm",
    r"(codeshell|nomic-bert) position_embd": "positions are rotated",
    r"deepseek2 blk\.N\.attn_[kv]": "of DeepSeek 1",
    r"(gemma-embedding|llama-embed|t5encoder) output": "skipped, as encoders have no head",
    r"(mimo2|bailingmoe[23]) blk\.N\.layer_output_norm": "of blocks after the last layer",
    r"nemotron_h(_moe)? deepstack_mapping": "its class is shared with Granite Vision",
    r"(arwkv7|rwkv6qwen2) token_embd_norm": "of RWKV, whose embedding has a norm",
    r"rwkv6(qwen2)? blk\.N\.time_mix_lerp_[wkvrg]": "joined in time_mix_lerp_fused, except in files of 2024",
    r"rwkv6qwen2 blk\.N\.time_mix_(first|ln)": "of RWKV 6",
    r"phi2 blk\.N\.ffn_norm": "attention and MLP have the same norm",
}
#: Names in other files of the architecture than the tiny models' files, as the same patterns.
READ_ELSEWHERE = {
    r".* blk\.N\.nextn\.\w+": "tests/models/test_mtp.py, or omitted with the block",
    r"nemotron_h_moe blk\.N\.(ffn_(down|up)|post_attention_norm)": "as in nemotron_h, or omitted with the block",
    r"phi3 blk\.N\.attn_[qkv]|kimi-linear blk\.N\.attn_qkv": "with or without --fuse-qkv",
    r"(bailingmoe3|kimi-linear) blk\.N\.attn_(q_a|q_a_norm|q_b|kv_b)": "as in deepseek2",
    r"(deepseek2|deepseek32|glm-dsa|glm5-next|mistral4) blk\.N\.attn_(q|kv_b)": "as in deepseek-v3-old",
    r"jina-bert-v2 blk\.N\.attn_k_norm": "read next to attn_q_norm",
    r"lfm2 (dense_2|classifier\.pooling_type)": "tests/models/test_late_interaction.py",
    r"minicpm rope_factors_short": "read next to rope_factors_long",
    r"stablelm blk\.N\.attn_[qk]_norm": "test_transformers.py, stablelm-12b",
}


@cache
def names_read() -> dict[str, set[str]]:
    """Return, per architecture, the keys and tensors that localllm reads in the headers."""
    names = defaultdict[str, set[str]](set)
    with pytest.MonkeyPatch.context() as patched:
        asked = set[str]()

        def recording(method: Any) -> Any:
            def record(self: Any, name: str, *arguments: Any) -> Any:
                asked.add(getattr(self, "_prefix", "") + name)
                return method(self, name, *arguments)

            return record

        skip = ModelMetadata.skip
        patched.setattr(ModelMetadata, "find", recording(ModelMetadata.find))
        patched.setattr(ModelMetadata, "skip", lambda self, *keys: (asked.update(keys), skip(self, *keys)))
        for method in ("__contains__", "_find", "shape"):
            patched.setattr(Weights, method, recording(getattr(Weights, method)))
        for name in HEADERS:
            asked.clear()
            file = HeaderFile.of(name)
            operations = [node.operation for node in read_model(file).graph.nodes]
            architecture = file.metadata["general.architecture"]
            if not any(isinstance(each, RopeAppend) and each.rope is not None for each in operations):
                asked.update(key for key in NAMES[architecture]["keys"] if key.startswith("rope."))
            generic = (re.sub(r"blk\.\d+\.", "blk.N.", each) for each in asked)
            names[architecture] |= {re.sub(r"\.(weight|bias|scale)$", "", each) for each in generic}
    return names


WITH_HEADERS = sorted({header["keys"]["general.architecture"] for header in HEADERS.values()} & {*NAMES})


def unread(architecture: str) -> list[str]:
    """Return the names that localllm reads in no header, each prefixed with the architecture's name."""
    names = {*NAMES[architecture]["keys"], *NAMES[architecture]["tensors"]}
    names -= names_read()[architecture] | {*_HARMLESS}
    return sorted(f"{architecture} {name}" for name in names if not name.startswith(tuple(_PARTS)))


@pytest.mark.parametrize("architecture", WITH_HEADERS)
def test_all_names_of_the_converter_are_known(architecture: str) -> None:
    patterns = NOT_RELEASED | READ_ELSEWHERE
    assert not [name for name in unread(architecture) if not any(re.fullmatch(p, name) for p in patterns)]


def test_every_pattern_matches_a_name() -> None:
    names = [name for architecture in WITH_HEADERS for name in unread(architecture)]
    for pattern in NOT_RELEASED | READ_ELSEWHERE:
        assert any(re.fullmatch(pattern, name) for name in names), pattern


def test_all_architectures_are_compared() -> None:
    """llama.cpp lacks A.X-K2, EmbeddingGemma 2, Kolibri, Lara and LFM3; its converter refuses the other tiny models.

    The tiny models of T5 are not in `tests.models.tiny.TINY`.
    """
    missing = {
        *("axk2", "baichuan", "deepseek4", "embedding-gemma2", "jina-bert-v3", "kolibri1", "lara_mini", "lfm3"),
        *("mistral4", "plamo", "t5"),
    }
    assert {*ARCHITECTURES} - {*WITH_HEADERS} == missing
