"""A Hugging Face folder with the interface of a GGUF file: keys, and tensors whose values are read on access.

`localllm.quantize` writes it in any type.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.convert.config import Config, general_keys, of_thinker, with_floats
from localllm.convert.generation import generation_keys
from localllm.convert.safetensors import read_folder
from localllm.convert.settings import read_json
from localllm.convert.sources import Source, find_sources
from localllm.convert.vocabulary import vocabulary_keys
from localllm.errors import (
    ModelError,
    OutputError,
    TokenizerError,
    UnsupportedArchitectureError,
    UsageError,
    path_text,
    quoted,
)
from localllm.gguf import Metadata
from localllm.gguf.writer import TensorSpec, read_back
from localllm.models import deepseek4_dspark
from localllm.models.config import MAX_LAYERS, ModelMetadata, read_general
from localllm.models.hf_convert import MEANT, floats, is_classifier
from localllm.models.registry import ARCHITECTURES, DRAFTERS, Architecture, Conversion, has_block, read_model
from localllm.models.tensor_names import LAYER, gguf_name, split_layer, tensor_names, without_wrappers
from localllm.models.weights import ModelFile
from localllm.quant.types import BLOCK_SIZES, GGMLType
from localllm.quantize.mixes import is_quantizable
from localllm.tokenizer import Tokenizer

Array = NDArray[Any]

#: Tensors of a checkpoint that do not belong to the language model.
_OTHERS = re.compile(
    r"(^|\.)(mtp|talker|token2wav|code2wav|masked_embedding|vision(?!_expert|_mlp)(?:_\w+)?|vit(?:_\w+)?|sam_model|qwen2_model|projector|visual|perceive|patch_merger|patch_merge_mlp|vpm|resampler|apm|tts|audio_\w+|speech_\w+|sound_\w+|ln_speech|multi_modal_projector|mm_projector|aligner|vqmodel|generation_\w+|connector|mlp_AR|(?:layerwise|spatial)_projectors|embed_vision"
    r"|embed_audio)\.|^((model\.)?merger|mlp1)\."
    r"|rotary_emb\.inv_freq$|\.masked_bias$|^cls\.(predictions|seq_relationship)\.|position_ids$|image_newline$"
    r"|(^|\.)encoder\.(input_linear|out|out_mid|layers\.\d+\.(attn\.(pre_norm|rel_pos_emb|to_\w+)|conv|ff1|ff2|post_norm))\.|\.attention_dists$"
    r"|(^|\.)h\.\d+\.attn\.bias$|view_seperator$|^decoder\.(weight|bias)$"
)
#: Tensors after the last layer of an encoder, for classifiers.
_HEAD = re.compile(r"^(pooler|head)\.(?!weight$)")
#: Numbered tensors that are stacked to one tensor in GGUF files.
_STACKED = r"\.((?:chunk_)?experts|norms|altup_(?:unembed_)?projections)\.(\d+)\."
#: Parts of a table of n-grams, whose rows are concatenated.
_PART = re.compile(r".*\.ple_embedding\.ngram_embedding\.(?:shard_(\d+)\.)?")
#: Tensors of an MTP block: GGUF's names after "nextn.", by DeepSeek's and Qwen's names.
_NEXTN = {
    "eh_proj": "eh_proj",
    "e_proj": "e_proj",  # the left and the right half of eh_proj
    "h_proj": "h_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "embed_tokens": "embed_tokens",
    "shared_head.norm": "shared_head_norm",
    "shared_head.head": "shared_head_head",
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}

#: ``pooling_type`` by the setting in 1_Pooling/config.json, or by "pooling_mode" in newer files.
_POOLING = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
_POOLING |= {"mean": 1, "cls": 2, "lasttoken": 3}


_KNOWN = ARCHITECTURES | DRAFTERS


@dataclass(frozen=True, eq=False)
class CheckpointTensor:
    """A tensor of the converted file, with the interface of `localllm.gguf.TensorInfo`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    _read: Callable[[], Iterator[Array]] = field(repr=False)

    @property
    def data(self) -> NDArray[np.uint8]:
        """uint8 [*shape[:-1], bytes of a row], read at each access."""
        parts = [*self._bytes()]
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(*self.shape[:-1], -1)

    def parts(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the data in parts of several rows, for tables that are larger than memory."""
        return self._bytes() if len(self.shape) == 2 else iter([self.data])

    def _bytes(self) -> Iterator[NDArray[np.uint8]]:
        for part in self._read():
            values = floats(part) if self.type is GGMLType.F32 else part
            yield np.ascontiguousarray(values).view(np.uint8)

    @property
    def n_values(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return TensorSpec(self.name, self.shape, self.type).n_bytes

    def drop_pages(self) -> None:
        """Do nothing: values are not mapped into memory."""


class ConvertedFolder:
    """A Hugging Face folder with the interface of a GGUF file."""

    path: Path
    paths: list[Path]  # safetensors files
    architecture: str
    tensors: dict[str, CheckpointTensor]
    metadata: Metadata

    @property
    def parts(self) -> Sequence[Sequence[str]]:
        return (tuple(self.tensors),)

    def check_unchanged(self) -> None:
        """Do nothing: reading a tensor raises ModelError if a file was truncated."""

    def read_back(self, metadata: Mapping[str, Any], name: str, read: Callable[[], object]) -> None:
        """Set the metadata as a file stores it. ``read`` checks such a file; ``name`` is its name in errors."""
        try:
            specs = [TensorSpec(tensor.name, tensor.shape, tensor.type) for tensor in self.tensors.values()]
            self.metadata = read_back(self.path, metadata, specs)
            read()
        except UnsupportedArchitectureError:
            raise
        except (ModelError, UsageError, OutputError, TokenizerError) as error:
            raise ModelError(f"{name} cannot be converted: {error}") from error


class Checkpoint(ConvertedFolder):
    """A folder with config.json, safetensors and a tokenizer.

    ``conversion``: defaults to the conversion of the architecture; ``target``: target model of a drafter without a
    tokenizer; ``only_block``: convert only the block for multi-token prediction, with embedding and head.
    """

    def __init__(
        self,
        folder: Path,
        conversion: Conversion | None = None,
        target: ModelFile | None = None,
        *,
        only_block: bool = False,
    ) -> None:
        self.path = folder
        values = _read_config(folder)
        config = Config(values)
        self.architecture = _architecture(config, values)
        if only_block and "dspark_block_size" in config:  # the block of DeepSeek V4 is a DSpark drafter
            self.architecture, conversion = "dflash", Conversion.of(deepseek4_dspark, MEANT)
        architecture = _KNOWN[self.architecture]
        conversion = conversion or architecture.conversion
        _check_target(folder, architecture, target)
        if only_block and not (architecture.has_block or self.architecture == "dflash"):
            raise UsageError(f"{path_text(folder)} has no block for multi-token prediction that localllm supports")
        self._only_block = only_block
        if target is not None:
            meta = ModelMetadata(target.metadata, str(target.metadata.get("general.architecture")))
            config.target = read_general(meta, target.tensors)
        files = read_folder(folder)
        self.paths = sorted({tensor.path for tensor in files.values()})
        sources = config.tensors = find_sources(files, config)
        _check_modules(folder)
        try:
            if config.num_hidden_layers > MAX_LAYERS:
                raise ValueError(f"it has num_hidden_layers = {config.num_hidden_layers}")
            self.tensors = _Namer(self.architecture, conversion, config, only_block).tensors(sources)
            self.tensors |= (dense := _dense(folder))
            _check_head(folder, config, values, self.tensors)
            keys = _model_keys(folder, config, conversion, self.tensors)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise ModelError(
                f"config.json and the tensors of {path_text(folder)} do not make a {self.architecture} model "
                f"({type(error).__name__}: {error!s:.150}): is the folder complete, and of this architecture?"
            ) from error
        if only_block and not any(name.startswith("blk.") for name in self.tensors):
            raise UsageError(f"{path_text(folder)} has no tensors of a block for multi-token prediction")
        embedding, target_metadata = self.tensors.get("token_embd.weight"), {} if target is None else target.metadata
        n_vocab = embedding.shape[0] if embedding else 0
        metadata = (
            {
                "general.architecture": self.architecture,
                "general.type": "model",
                "general.name": checkpoint_name(folder),
                "general.size_label": size_label(self.tensors),
            }
            | {key: value for key, value in target_metadata.items() if key.startswith("tokenizer.")}
            | generation_keys(folder, n_vocab)
            | _pooling(folder, self.architecture)  # a classifier's keys replace it
            | {
                key.removeprefix(".") if key.startswith(".") else f"{self.architecture}.{key}": value
                for key, value in keys.items()
                if value is not None
            }
            | _dense_widths(self.architecture, dense)
            | (vocabulary_keys(folder, config, n_vocab) if target is None else {})
        )
        config.check_lost(conversion.meant)
        self.read_back(metadata, path_text(folder), self._read)

    def _read(self) -> None:
        if not self._only_block:
            read_model(self)
        if self.architecture == "dflash":
            read_model(self)
        elif has_block(self):
            read_model(self, is_block=True)
        elif self._only_block:
            raise ModelError("the checkpoint has no block for multi-token prediction")
        Tokenizer.from_gguf(self)


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the values of config.json. Raises ModelError if the folder is not a Hugging Face model."""
    if folder.is_file():
        raise ModelError(
            f"{path_text(folder)} is a file: name the folder of a Hugging Face model "
            "(localllm quantize changes the type of a GGUF file)"
        )
    values: dict[str, Any] = read_json(folder / "config.json")
    if not values:
        raise ModelError(
            f"{path_text(folder)} has no config.json: name the folder of a Hugging Face model, with config.json, "
            "*.safetensors and its tokenizer"
        )
    return of_thinker(values)


def _check_target(folder: Path, architecture: Architecture, target: ModelFile | None) -> None:
    """Raise UsageError unless a target is passed exactly for drafters that need one."""
    if target is None and architecture.takes_target:
        raise UsageError(
            f"{path_text(folder)} is a drafter, which has no tokenizer: name the model that it drafts for "
            "(--target), a checkpoint's folder or a GGUF file"
        )
    if target is not None and not architecture.takes_target:
        raise UsageError(f"{path_text(folder)} is not an EAGLE-3, DFlash or DSpark drafter: leave --target out")


def _check_head(
    folder: Path, config: Config, values: Mapping[str, Any], tensors: Mapping[str, CheckpointTensor]
) -> None:
    """Raise ModelError if a language model's head is missing that the configuration does not tie to the embedding."""
    names = ("tie_word_embeddings", "tie_embedding", "share_input_output_layers")
    ties = [ties for name in names for ties in (config.peek(name), values.get(name))]
    is_tied = False not in ties or True in ties
    classes = texts(config.get("architectures"))
    has_head = any(name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")) for name in classes)
    is_embedding = (folder / "modules.json").exists() or (folder / "1_Pooling").exists()
    if has_head and not (is_tied or is_embedding or config.target or "output.weight" in tensors):
        raise ModelError(
            f"{path_text(folder)} lacks lm_head.weight, and config.json has tie_word_embeddings = false: download it "
            "again, or set tie_word_embeddings to true if the head is the embedding"
        )


def _model_keys(
    folder: Path, config: Config, conversion: Conversion, tensors: Mapping[str, CheckpointTensor]
) -> dict[str, Any]:
    """Return the architecture's keys, without its name. Sets ``config.n_nextn``, which some of them need."""
    n_blocks = max((1 + int(name.split(".")[1]) for name in tensors if name.startswith("blk.")), default=0)
    config.n_nextn = max(0, n_blocks - config.num_hidden_layers)
    keys = with_floats(general_keys(config) | dict(conversion.keys(config)))
    if "dense_2.weight" in tensors and not (folder / "1_Pooling").exists():  # a model of late interaction
        last = tensors.get("dense_3.weight") or tensors["dense_2.weight"]
        keys |= {"pooling_type": 0, "embedding_length_out": last.shape[0]}
    if config.n_nextn:
        keys |= {"block_count": n_blocks, "nextn_predict_layers": config.n_nextn}
    return keys


def _architecture(config: Config, values: Mapping[str, Any]) -> str:
    kinds = texts(config.get("architectures"))  # some architectures share a model_type
    found = [name for name, each in _KNOWN.items() if kinds & set(each.hf_types.split())]
    if "draft_vocab_size" in config and config.get("num_hidden_layers") == 1 and found != ["dflash"]:
        return "eagle3"  # for any class, because some files name the target model's class
    kind = str(values.get("model_type"))
    wanted = {kind, f"{kind}/{values.get('version')}", str(config.get("model_type"))}
    found = found or [name for name, each in _KNOWN.items() if wanted & set(each.hf_types.split())]
    if found == ["bert"] and config.get("position_embedding_type") == "rotary":  # Jina ColBERT v2
        return "jina-bert-v3"
    if found == ["nomic-bert"] and config.get("moe_every_n_layers"):
        return "nomic-bert-moe"
    if found[1:] and config.get("use_bidirectional_attention"):
        return next(name for name in found if _KNOWN[name].is_encoder)
    found = [name for name in found if not _KNOWN[name].is_encoder] or found
    if found:  # of two architectures, the second has experts
        layers = config.get("layers_block_type") or config.get("hybrid_override_pattern")
        return found[-1 if {"moe", "E"} & texts(layers) else 0]
    known = ", ".join(sorted({kind for each in _KNOWN.values() for kind in each.hf_types.split()}))
    raise UnsupportedArchitectureError(
        f"config.json has model_type = {quoted(values.get('model_type'))}, which localllm does not convert; it "
        f"converts {known}"
    )


def texts(values: Any) -> set[str]:
    """Return the strings in a list, or the characters of a string."""
    return {each for each in values if isinstance(each, str)} if isinstance(values, list | str) else set()


def checkpoint_name(folder: Path) -> str:
    """Return the folder's name, or the repository's name in the hub's cache (…/models--ORG--NAME/snapshots/…)."""
    folder = folder.resolve()
    parent = folder.parent.parent.name
    return path_text(parent.rpartition("--")[2] if parent.startswith("models--") else folder.name)


def size_label(tensors: Mapping[str, CheckpointTensor]) -> str:
    n: float = sum(tensor.n_values for tensor in tensors.values())
    unit = next((unit for unit in "KMB" if (n := n / 1000) < 999.5), "T")
    return f"{n:.2g}{unit}" if n < 9.95 else f"{n:.0f}{unit}"


#: Modules of sentence-transformers that a GGUF file describes; every program normalizes vectors.
_MODULES = re.compile("Transformer( 1_Pooling)?( [1-3]_Dense)*( Normalize)?")


def _check_modules(folder: Path) -> None:
    """Raise ModelError for a module of sentence-transformers that the file would lose."""
    modules = [module for module in read_json(folder / "modules.json", list) if isinstance(module, dict)]
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    paths = [str(module.get("path")) for module in modules]
    names = [kind if kind in ("Transformer", "Normalize") else path for kind, path in zip(kinds, paths, strict=True)]
    if modules and not _MODULES.fullmatch(" ".join(names)):
        raise ModelError(
            f"{path_text(folder / 'modules.json')} has the modules {', '.join(names)}: GGUF files can only describe "
            "a pooling in 1_Pooling, and linear layers in folders such as 2_Dense"
        )
    missing = [name for name in names if "_" in name and not (folder / name / "config.json").is_file()]
    if missing:
        raise ModelError(f"{path_text(folder)} lacks {missing[0]}/config.json: download it")
    if read_json(folder / "sentence_bert_config.json").get("do_lower_case"):
        normalizer = read_json(folder / "tokenizer.json").get("normalizer") or {}
        if not normalizer.get("lowercase"):
            raise ModelError(
                "sentence_bert_config.json has do_lower_case, for which GGUF files of this tokenizer have no key: "
                "remove it, and embed text in lower case"
            )


def _pooling(folder: Path, architecture: str) -> dict[str, Any]:
    path = folder / "1_Pooling" / "config.json"
    values = read_json(path)
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    modes += [mode] if (mode := values.get("pooling_mode")) else []
    types = [_POOLING.get(str(mode)) for mode in modes]
    if None in types or len(types) > 1:
        raise ModelError(
            f"{path_text(path)} has the pooling {' and '.join(map(str, modes))}: GGUF files can only describe one of "
            "the mean, the first token and the last token"
        )
    return {f"{architecture}.pooling_type": types[0]} if types else {}


def _dense(folder: Path) -> dict[str, CheckpointTensor]:
    """Return the linear layers after the pooling of sentence-transformers, in folders 2_Dense and 3_Dense. Models of
    late interaction have no pooling; their folders are 1_Dense and 2_Dense."""
    found = {}
    first = 2 if (folder / "1_Pooling").exists() else 1
    for place, path in enumerate(sorted(folder.glob("[0-9]_Dense")), 2):
        values = read_json(path / "config.json")
        activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
        if activation != "Identity" or path.name not in (f"{first}_Dense", f"{first + 1}_Dense"):
            raise ModelError(
                f"{path_text(path)} is a linear layer after the pooling, with the activation {quoted(activation)}: "
                f"GGUF files have a place for two such layers, in {first}_Dense and {first + 1}_Dense, without an "
                "activation"
            )
        if values.get("use_residual"):
            raise ModelError(f"{path_text(path)} adds its input (use_residual), which GGUF files have no place for")
        for name, source in find_sources(read_folder(path), Config(values)).items():
            ours = f"dense_{place}.{name.removeprefix('linear.')}"

            def read(source: Source = source) -> Iterator[Array]:
                yield source.values()

            type = source.type if len(source.shape) == 2 else GGMLType.F32
            found[ours] = CheckpointTensor(ours, source.shape, type, read)
    return found


def _dense_widths(architecture: str, dense: Mapping[str, CheckpointTensor]) -> dict[str, Any]:
    return {
        f"{architecture}.{name.partition('.')[0]}_feat_{side}": width
        for name, tensor in dense.items()
        if name.endswith("weight")
        for side, width in zip(("out", "in"), tensor.shape, strict=True)
    }


class _Namer:
    """Maps a checkpoint's tensors to GGUF's names, and plans their conversion."""

    def __init__(self, architecture: str, conversion: Conversion, config: Config, only_block: bool) -> None:
        known = _KNOWN[architecture]
        self._conversion, self._config, self._only_block = conversion, config, only_block
        self._is_dspark = only_block and architecture == "dflash"
        self._has_block = known.has_block and (only_block or not known.block_is_separate)
        self._names = tensor_names(architecture, conversion.names)

    def tensors(self, sources: Mapping[str, Source]) -> dict[str, CheckpointTensor]:
        groups: dict[str, dict[int, Source]] = defaultdict(dict)
        tied_head: Source | None = None
        for name, source in sources.items():
            name, original = self._conversion.name(without_wrappers(name), self._config), name
            if self._is_dspark:
                if not (name := _stage_name(name)):
                    continue
            elif self._has_block:
                name = self._block_name(name)
            if self._only_block and not self._is_dspark and not self._is_of_block(original, name):
                continue
            if _HEAD.search(name) and not is_classifier(self._config):
                continue
            if name == "lm_head.weight" and self._config.get("tie_word_embeddings"):
                tied_head = source
                continue
            if _OTHERS.search(name):
                continue
            layer = re.match(LAYER, name)
            is_after = layer and int(layer[1]) >= self._config.num_hidden_layers
            if is_after and not (self._has_block or name.startswith("decoder.block.")):
                continue  # part of an MTP block
            number = re.search(_STACKED, name)
            generic = name if number is None else name.replace(number[0], f".{number[1]}.*.")
            place = int(number[2]) if number else 0
            if part := _PART.match(name):
                generic, place = name.replace(part[0], "ngram_embedding."), int(part[1] or 0)
            groups[generic][place] = source
        for name in [name for name in groups if name.endswith("nextn.e_proj.weight")]:
            halves = groups.pop(name)[0], groups.pop(name.replace("e_proj", "h_proj"))[0]
            groups[name.replace("e_proj", "eh_proj")][0] = _side_by_side(*halves)
        found: dict[str, CheckpointTensor] = {}
        for name, numbered in groups.items():
            if sorted(numbered) != list(range(len(numbered))):
                what = "experts" if ".*." in name else "parts"
                raise ModelError(f"the checkpoint lacks {what} of {quoted(name)}: download it again")
            found |= self._planned(name, [numbered[i] for i in range(len(numbered))])
        if tied_head is not None:
            # A checkpoint may contain tied weights only under the head's name. Weights that differ are not tied, as
            # in transformers.
            (head,) = self._planned("lm_head.weight", [tied_head]).values()
            embedding = found.setdefault("token_embd.weight", replace(head, name="token_embd.weight"))
            if embedding.shape != head.shape or not np.array_equal(embedding.data, head.data):
                found[head.name] = head
        for name, array in self._conversion.extra(self._config).items():
            type = GGMLType.I64 if array.dtype == np.int64 else GGMLType.F32
            found[name] = CheckpointTensor(name, array.shape, type, partial(iter, [array]))
        return found

    def _block_name(self, name: str) -> str:
        """Return DeepSeek's name of a tensor of an MTP block, which is a layer after the last one; Qwen's files name
        it separately. Tensors that only MTP blocks have get GGUF's names."""
        n_layers = self._config.num_hidden_layers
        name = re.sub(r"^(?:model\.)?mtp\.(?:(?:layers\.)?0\.)?", f"model.layers.{n_layers}.", name)
        name = re.sub(rf"^model\.layers\.{n_layers}\.(?=hc_head_)", "", name)  # not in a layer
        match = re.fullmatch(LAYER + r"(.*)\.weight", name)
        if match and int(match[1]) >= n_layers and match[2] in _NEXTN:
            return f"model.layers.{match[1]}.nextn.{_NEXTN[match[2]]}.weight"
        return name

    def _is_of_block(self, original: str, name: str) -> bool:
        """Return whether a file with only an MTP block contains a tensor."""
        layer = re.match(LAYER, name)
        if layer or original.startswith(("mtp.", "model.mtp.")):
            return layer is None or int(layer[1]) >= self._config.num_hidden_layers
        return gguf_name(self._names, name) in ("token_embd.weight", "output_norm.weight", "output.weight")

    def _planned(self, name: str, sources: Sequence[Source]) -> dict[str, CheckpointTensor]:
        """Return the planned tensors for a tensor, or for the tensors of all experts of a layer."""
        is_stacked = ".*." in name
        first, n_free = sources[0], 0 if is_stacked else 1
        if any((source.shape[n_free:], source.type) != (first.shape[n_free:], first.type) for source in sources):
            raise ModelError(f"the tensors that make up {quoted(name)} differ in shape or type: download them again")
        type, as_blocks = first.type, first.blocks is not None
        if as_blocks and not self._moves_rows(name, first, is_stacked):
            type, as_blocks = GGMLType.BF16 if type is GGMLType.MXFP4 else GGMLType.F16, False
        outputs = self._changed(name, placeholder(first.shape, empty_row(type), is_stacked))
        found = {}
        for ours, array in outputs.items():
            shape = array.shape
            if is_stacked or len(sources) > 1:
                shape = len(sources) if is_stacked else sum(source.shape[0] for source in sources), *shape[1:]

            def read(ours: str = ours) -> Iterator[Array]:
                for source in sources:
                    values = source.blocks() if as_blocks and source.blocks else source.values()
                    yield self._changed(name, values[None] if is_stacked else values)[ours]

            is_float32 = array.dtype.kind == "f" and array.dtype.itemsize >= 4
            keeps = type is GGMLType.I32 or (is_quantizable(ours, shape) and not is_float32)
            found[ours] = CheckpointTensor(ours, shape, type if keeps else GGMLType.F32, read)
        return found

    def _moves_rows(self, name: str, source: Source, is_stacked: bool) -> bool:
        """Return whether the conversion moves whole rows only, and therefore can also move rows of blocks."""
        n = BLOCK_SIZES[source.type].row_bytes(source.shape[-1])
        numbers = np.arange(n, dtype=np.uint16)
        try:
            outputs = self._changed(name, placeholder((*source.shape[:-1], n), numbers, is_stacked))
        except (ValueError, IndexError):
            return False
        names = [ours for ours, array in outputs.items() if array.ndim > 1 and is_quantizable(ours, array.shape)]
        return len(names) == len(outputs) and all(
            array.dtype == numbers.dtype and np.array_equal(array[(0,) * (array.ndim - 1)], numbers)
            for array in outputs.values()
        )

    def _changed(self, name: str, array: Array) -> dict[str, Array]:
        """Return the file's tensors for a tensor of the checkpoint, by GGUF's names. Gate and up of experts are
        split."""
        array = floats(array) if array.ndim == 1 else array
        changed = self._conversion.tensor(name, array, self._config)
        if isinstance(changed, Mapping):
            prefix, _ = split_layer(name)
            return {prefix + ours: part for ours, part in changed.items()}
        ours = gguf_name(self._names, name.removesuffix("_blocks"))
        if ours is None:
            raise ModelError(
                f"the checkpoint has the tensor {quoted(name)}, which localllm convert does not know for its "
                "architecture"
            )
        if "ffn_gate_up_exps" not in ours:
            return {ours: changed}
        halves = zip(("gate", "up"), np.split(changed, 2, axis=1), strict=True)
        return {ours.replace("gate_up", half): part for half, part in halves}


def _stage_name(name: str) -> str:
    """Return the name of a tensor of DeepSeek V4's DSpark drafter without ``mtp.{i}.``; empty for other tensors."""
    match = re.fullmatch(r"mtp\.(\d+)\.(.*)", name)
    if match is None:
        return ""
    of_drafter = r"(main_(proj|norm)|norm|markov_head\.markov_w[12]|confidence_head\.proj)\.(weight|bias)|hc_head_\w+"
    return match[2] if re.fullmatch(of_drafter, match[2]) else f"layers.{match[1]}.{match[2]}"


def _side_by_side(left: Source, right: Source) -> Source:
    """Return a matrix with the columns of two matrices."""
    shape = left.shape[0], left.shape[1] + right.shape[1]
    return Source(shape, left.type, lambda: np.concatenate([left.values(), right.values()], axis=1))


def empty_row(type: GGMLType) -> Array:
    dtypes = {GGMLType.BF16: np.uint16, GGMLType.F32: np.float32, GGMLType.I32: np.int32}
    return np.zeros(1, dtypes.get(type, np.float16))


def placeholder(shape: Sequence[int], row: Array, is_stacked: bool = False) -> Array:
    """Return an array of a shape without memory: every row is ``row``."""
    return np.broadcast_to(row if shape else row[0], (1, *shape) if is_stacked else tuple(shape))
