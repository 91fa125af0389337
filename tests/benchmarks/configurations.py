"""Rewrites the configurations of tiny checkpoints as other programs write them, and compares what becomes of each.

    python -m tests.benchmarks.configurations [NAME …] [--kinds omit,old,change,empty] [--all] [--json FILE]

NAME is an architecture, or "mmproj NAME" for a family of encoders, whose processor's settings are rewritten too.  A
rewriting omits a key, names it as older releases do, or gives it another value ("empty": null or 0).  The result is
"equal" if the converted file is the original one and transformers computes the same output, "transformers" if the
file differs and its output is that of transformers, "refused" if the conversion raises an error of localllm, "wrong"
otherwise.  It is "illegal" if transformers refuses the rewriting, or if the output depends on the choice of one of
several tokens with equal scores.  The exit code is 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert import Checkpoint, MmprojCheckpoint
from localllm.convert.defaults import DEFAULTS
from localllm.convert.settings import read_json
from localllm.errors import LocalLLMError
from localllm.loading.devices import open_devices
from localllm.loading.media_encoder import MediaEncoder
from localllm.quantize import plan, run
from tests.helpers.checkpoints import parsed
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import DIFFUSION, ENCODERS, TINY, make_model, save, write_pooling

MODELS = TINY | ENCODERS | DIFFUSION

#: Longer than windows and than the context before scaling.
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 41)]

#: Keys that describe no computation; changing them tells nothing.
_NAMES = "architectures transformers_version model_type dtype torch_dtype vocab_size auto_map image_processor_type"
_NOT_CHANGED = _NAMES.split()

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
#: Rotations, each with what it needs.
_ROPES = [
    parsed(text)
    for text in (
        "rope_type=default",
        "rope_type=linear factor=2.0",
        "rope_type=dynamic factor=2.0",
        "rope_type=yarn factor=4.0 original_max_position_embeddings=32",
        "rope_type=yarn factor=4.0 original_max_position_embeddings=16 mscale=0.7 mscale_all_dim=0.9",
        "rope_type=yarn factor=3.0 original_max_position_embeddings=32 truncate=False beta_fast=20.0",
        "rope_type=yarn factor=3.0 original_max_position_embeddings=32 attention_factor=0.8",
        "rope_type=llama3 factor=8.0 low_freq_factor=1.0 high_freq_factor=4.0 original_max_position_embeddings=32",
    )
]
_STRINGS: dict[str, tuple[str, ...]] = {
    "position_embedding_type": ("absolute", "relative_key"),
    **{f"{name}_act": _ACTIVATIONS for name in ("hidden", "mlp_hidden", "projector_hidden")},
    **dict.fromkeys(("hidden_activation", "activation_function", "activation", "dense_act_fn"), _ACTIVATIONS),
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
    "output_gate_type": ("sigmoid", "silu"),
    "gating": ("per-head", "per-element"),
    "vision_feature_select_strategy": ("default", "full"),
    "interpolate_mode": ("bilinear", "bicubic"),
    "downsample_mode": ("4x", "16x"),
    "norm_type": ("layer_norm", "rms_norm"),
}


class IllegalError(Exception):
    """transformers does not accept a rewriting for the tiny model's weights, or computes something else with it."""


@dataclass(frozen=True)
class Rewriting:
    """A file in place of a tiny model's own."""

    kind: str
    name: str
    values: dict[str, Any]
    file: str = "config.json"


@dataclass(frozen=True)
class Document:
    """A JSON file of a checkpoint.

    Attributes:
        values: its complete content.
        paths: the keys that are rewritten.
        reloaded: returns what transformers reads from other content; None if it refuses it.
        old_names: other names of settings, by present names.
        without_defaults: the content that transformers writes.
    """

    file: str
    values: dict[str, Any]
    paths: list[tuple[str, ...]]
    reloaded: Callable[[dict[str, Any]], Any]
    old_names: tuple[tuple[str, str], ...] = ()
    without_defaults: dict[str, Any] | None = None


class TinyCheckpoint(ABC):
    """A tiny model of transformers in a folder, with what its checkpoint becomes."""

    documents: list[Document]
    #: Signature of the file that the checkpoint becomes, and output of transformers.
    original: dict[str, Any]
    expected: Any

    @abstractmethod
    def theirs(self, rewriting: Rewriting) -> Any:
        """Output of transformers.  Raises IllegalError."""

    @abstractmethod
    def converted(self, rewriting: Rewriting) -> Any:
        """The checkpoint with the rewritten file.  Raises IllegalError."""

    @abstractmethod
    def ours(self, checkpoint: Any) -> Any:
        """Output of localllm.  Raises IllegalError if it is another kind of output."""

    def judged(self, rewriting: Rewriting) -> tuple[str, str]:
        """The result, and what localllm says or how far outputs are apart."""
        try:
            with _equal_scores() as ties:
                theirs = self.theirs(rewriting)
            checkpoint = self.converted(rewriting)
            change = largest_error(self.expected, theirs)
            if signature(checkpoint) == self.original:
                return ("equal", "") if change < 1e-6 else ("wrong", f"ignored: {change:.1e}")
            error = largest_error(self.ours(checkpoint), theirs)
        except IllegalError as illegal:
            return "illegal", str(illegal)
        except LocalLLMError as refused:
            return "refused", str(refused)
        if error < 1e-3:
            return ("equal" if change < 1e-6 else "transformers"), f"{error:.1e}"
        return ("illegal" if ties else "wrong"), f"{error:.1e}"


class TinyModel(TinyCheckpoint):
    """A text model."""

    def __init__(self, name: str, folder: Path) -> None:
        self.entry, self.folder = MODELS[name], folder / name
        self.model = make_model(self.entry)
        save(self.folder, self.model)
        self.released = json.loads((self.folder / "config.json").read_text())
        (self.folder / "plain").mkdir()
        self.model.config.save_pretrained(self.folder / "plain")
        config: dict[str, Any] = read_json(self.folder / "plain/config.json")  # with infinity as a float
        config["architectures"] = [type(self.model).__name__]
        if self.entry.auto == "AutoModel":
            write_pooling(self.folder, "lasttoken" if self.entry.architecture == "qwen3" else "mean")
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.original = signature(self._converted(self.released))
        self.expected = self._computed(self.model)
        # A released class outside of transformers has other defaults than the class that computes the output.
        released_type = self.released["model_type"]
        self._defaults = {} if released_type == self.entry.model_type else DEFAULTS.get(released_type, {})
        kind = type(self.model.config)
        names = getattr(kind, "attribute_map", {}).items()
        paths = [path for path in _paths(config) if not path[0].startswith("vision")]
        diff = json.loads(self.model.config.to_json_string(use_diff=True))
        old_names = (*names, *((b, a) for a, b in names), *_OLD.items())
        self.documents = [Document("config.json", config, paths, _reader(kind), old_names, diff)]

    def _converted(self, config: Mapping[str, Any]) -> Checkpoint:
        (self.folder / "config.json").write_text(json.dumps(config))
        return Checkpoint(self.folder, self.entry.conversion)

    def converted(self, rewriting: Rewriting) -> Checkpoint:
        return self._converted(self._as_released(rewriting.values))

    def _as_released(self, config: dict[str, Any]) -> dict[str, Any]:
        """``config`` with the names of released checkpoints, where transformers does not know these."""
        if self.entry.release is None:
            return config
        tensors = {key: value.clone() for key, value in self.state.items()}
        try:
            return self.entry.release(copy.deepcopy(config), tensors)[0]
        except (KeyError, RuntimeError) as error:  # tensors of other shapes, or a setting that releases always have
            raise IllegalError("no released form") from error

    def theirs(self, rewriting: Rewriting) -> Any:
        import transformers

        entry = self.entry
        try:
            settings = type(self.model.config).from_dict(self._defaults | copy.deepcopy(rewriting.values))
            _tie_like(settings, self.model.config)
            kind = getattr(transformers, entry.auto)
            make = kind.from_config if entry.auto.startswith("Auto") else kind._from_config
            model = make(settings, attn_implementation="eager").eval().float()
            model.config.allow_global_per_layer_attribute_access = True
            model.load_state_dict(self.state, strict=True)
            entry.change(model)
            logits = self._computed(model)
        except Exception as error:  # transformers raises what it happens to
            raise IllegalError(str(error).split("\n")[0][:100]) from error
        released, name = self._as_released(rewriting.values), rewriting.name.removeprefix("compress_")
        is_same, is_changed = released == self.released, largest_error(self.expected, logits) > 1e-6
        has_two_forms = "rope_parameters" not in released and name.startswith(("rope_", "qk_rope"))
        is_lost = (is_same and is_changed) or (has_two_forms and (is_changed or not is_same))
        if not np.isfinite(logits).all() or (entry.release is not None and is_lost):
            raise IllegalError("not finite, or without a released form")
        return logits

    def _computed(self, model: Any) -> Any:
        import torch

        is_decoder = self.entry.auto.endswith(("ForCausalLM", "ForConditionalGeneration"))
        with torch.no_grad():
            options = {"use_cache": False} if is_decoder else {}
            return next(iter(model(torch.tensor([IDS]), **options).values()))[0].numpy()

    def ours(self, checkpoint: Checkpoint) -> Any:
        logits = Runner(_written(checkpoint, self.folder, "F32"), ReferenceOps(np.float32)).logits(IDS)
        if logits.shape != self.expected.shape:
            raise IllegalError("vectors for logits")
        return logits


class TinyEncoder(TinyCheckpoint):
    """A model with an image encoder: its configuration without the text model's, and its processor's."""

    media = "image"
    section = "vision_config"

    def __init__(self, name: str, folder: Path) -> None:
        from tests.models.encoders.families import FAMILIES, make, picture, processor_of

        self.name, self.family, self.folder = name, FAMILIES[name], folder / name
        self.folder.mkdir()
        self.model, self.processor = make(name, self.folder), processor_of(name)
        self.inputs: list[Any] = [picture(*size) for size in self.family.sizes[:2]]
        processor = json.loads((self.folder / _PROCESSOR).read_text())
        processor["image_processor_type"] = self.family.processor[1].removesuffix("Pil")
        self._set_up([Document(_PROCESSOR, processor, self._rewritten(processor), self._options)])

    def _set_up(self, documents: list[Document]) -> None:
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        released = json.loads((self.folder / "config.json").read_text())
        self.documents = [self._config(released), *documents]
        self.files = {document.file: document.values for document in self.documents}
        self.original = signature(self.converted(Rewriting("", "", released)))
        self.expected = self._computed(self.model, self.processor)

    def _config(self, released: dict[str, Any]) -> Document:
        if not hasattr(self.model.config, "to_json_string"):  # MiniCPM-V's of the tests
            sections = {key: released[key] for key in self.family.settings if key in released}
            return Document("config.json", released, [*_paths(sections)], lambda values: values)
        kind, inner = type(self.model.config), getattr(self.model.config, self.section)
        values = json.loads(self.model.config.to_json_string(use_diff=False))
        values["architectures"] = released["architectures"]
        sections = {key: value for key, value in values.items() if key == self.section or not key.endswith("_config")}
        pairs = [*kind.attribute_map.items()]
        pairs += [(f"{self.section}.{a}", f"{self.section}.{b}") for a, b in type(inner).attribute_map.items()]
        names = (*pairs, *((b, a) for a, b in pairs))
        return Document("config.json", values, self._rewritten(sections), _reader(kind), names, released)

    def _rewritten(self, values: Mapping[str, Any]) -> list[tuple[str, ...]]:
        kept = _KEPT.get(self.name.partition(" ")[0], ())
        return [path for path in _paths(values) if not {*path} & {*kept}]

    def _options(self, values: dict[str, Any]) -> Any:
        try:
            processor = self._processor(values)
        except Exception:
            return None
        return {key: str(value) for key, value in vars(getattr(processor, "processor", processor)).items()}

    def _processor(self, values: Mapping[str, Any]) -> Any:
        from tests.models.encoders.families import make_processor

        options = {key: value for key, value in values.items() if key != "image_processor_type"}
        return make_processor(self.name, options)

    def converted(self, rewriting: Rewriting) -> MmprojCheckpoint:
        for file, values in (self.files | {rewriting.file: rewriting.values}).items():
            (self.folder / file).write_text(json.dumps(values))
        return MmprojCheckpoint(self.folder)

    def theirs(self, rewriting: Rewriting) -> Any:
        try:
            if rewriting.file == _PROCESSOR:
                features = self._computed(self.model, self._processor(rewriting.values))
            else:
                features = self._computed(self._rebuilt(copy.deepcopy(rewriting.values)), self.processor)
        except Exception as error:  # transformers raises what it happens to
            raise IllegalError(str(error).split("\n")[0][:100]) from error
        if not np.isfinite(features).all():
            raise IllegalError("not finite")
        return features

    def _rebuilt(self, values: dict[str, Any]) -> Any:
        kind = type(self.model.config)
        if hasattr(kind, "from_dict"):
            config = kind.from_dict(values)
            _tie_like(config, self.model.config)
        else:
            sections = {key: values[key] for key in self.family.settings if key in values}
            text = {"text_config": self.family.settings["text_config"], "image_token_id": 7}
            config = kind(**sections | text)
        model = type(self.model)(config).eval().float()
        model.load_state_dict(self.state, strict=True)
        return model

    def _computed(self, model: Any, processor: Any) -> Any:
        from tests.models.encoders.test_transformers import features

        return np.concatenate([features(model, self.name, image, processor)[1] for image in self.inputs])

    def ours(self, checkpoint: MmprojCheckpoint) -> Any:
        from tests.models.encoders.test_transformers import encoded

        encoder = MediaEncoder.open(_written(checkpoint, self.folder, None))
        (host, *_) = open_devices("reference")
        encoder.backend = host.backend
        try:
            return np.concatenate(encoded(encoder, [encoder.prepare(x, kind=self.media) for x in self.inputs]))
        finally:
            encoder.close()
            host.close()


class TinySound(TinyEncoder):
    """A model with an audio encoder: its configuration without the text model's."""

    media = "audio"
    section = "audio_config"
    processor = None

    def __init__(self, name: str, folder: Path) -> None:
        from tests.models.encoders.test_hearing import made, sound

        self.name, self.folder = name, folder / name
        self.folder.mkdir()
        self.family = made(name, self.folder)
        self.folder = self.folder / name if (self.folder / name).exists() else self.folder
        self.model = self.family.model
        self.inputs = [sound(seconds) for seconds in self.family.seconds]
        self._set_up([])

    def _config(self, released: dict[str, Any]) -> Document:
        if self.name != "ultravox":
            return super()._config(released)
        paths = [path for path in _paths(released) if path[0] == self.section]
        return Document("config.json", released, paths, lambda values: values)

    def _rebuilt(self, values: dict[str, Any]) -> Any:
        if self.name != "ultravox":
            return super()._rebuilt(values)
        import transformers

        config = transformers.WhisperConfig.from_dict(values[self.section])
        encoder = transformers.WhisperModel(config).encoder.eval().float().requires_grad_(False)
        encoder.load_state_dict(self.family.encoder.state_dict())
        return encoder

    def _computed(self, model: Any, processor: Any) -> Any:
        import torch

        family = copy.copy(self.family)
        setattr(family, "encoder" if self.name == "ultravox" and model is not self.model else "model", model)
        with torch.no_grad():
            return np.concatenate([family.features(samples).numpy()[:, None] for samples in self.inputs])


_PROCESSOR = "preprocessor_config.json"
#: Settings of families that are not rewritten: `MergedPatches` has one value, processors of text and images choose
#: some in each call, and transformers reorders Kimi's rows by the number of heads only when it loads a file.
_KEPT = {
    "gemma4uv": ("max_soft_tokens",),
    "internvl": ("crop_to_patches",),
    "kimik25": ("num_attention_heads",),
    "pixtral": ("patch_size",),
}


@contextmanager
def _equal_scores() -> Iterator[list[float]]:
    """Collect scores of 0 that both a selected and an omitted entry have: `torch.topk` selects any of them."""
    import torch

    ties: list[float] = []
    select = torch.Tensor.topk

    def topk(scores: Any, k: int, dim: int = -1, **options: Any) -> Any:
        result = select(scores, k, dim=dim, **options)
        if result.values.numel() and k < scores.shape[dim]:
            n_zero = (scores == 0).sum(dim), (result.values == 0).sum(dim)
            ties.extend([0.0] * int(((n_zero[1] > 0) & (n_zero[0] > n_zero[1])).sum()))
        return result

    torch.Tensor.topk = topk
    try:
        yield ties
    finally:
        torch.Tensor.topk = select


def _reader(kind: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that returns what a configuration class reads from values."""

    def read(values: dict[str, Any]) -> Any:
        try:
            return kind.from_dict(copy.deepcopy(values)).to_dict()
        except Exception:
            return None

    return read


def _tie_like(config: Any, other: Any) -> None:
    """Weights that differ are not tied, whatever the configuration says."""
    for one, its in ((config, other), (config.get_text_config(), other.get_text_config())):
        if hasattr(its, "tie_word_embeddings"):
            one.tie_word_embeddings = its.tie_word_embeddings


def _written(checkpoint: Any, folder: Path, type: str | None) -> Path:
    path = folder / "out.gguf"
    path.unlink(missing_ok=True)
    list(run(plan(checkpoint, path, type)))
    return path


def largest_error(ours: Any, theirs: Any) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max()) if ours.shape == theirs.shape else float("inf")


def signature(checkpoint: Checkpoint | MmprojCheckpoint) -> dict[str, Any]:
    """Keys and tensors of the file, to be compared."""
    tensors = {
        name: (tensor.shape, tensor.type, hashlib.sha1(np.ascontiguousarray(tensor.data)).hexdigest())
        for name, tensor in checkpoint.tensors.items()
    }
    return {key: np.asarray(value).tolist() for key, value in checkpoint.metadata.items()} | tensors


def rewritings(tiny: TinyCheckpoint) -> Iterator[Rewriting]:
    """Every rewriting of a model's files."""
    for document in tiny.documents:
        yield from omissions(document)
        yield from old_names(document)
        yield from changes(document)
        yield from emptied(document)


def emptied(document: Document) -> Iterator[Rewriting]:
    for path in document.paths:
        value = _section(document.values, path[:-1])[path[-1]]
        if path[-1] in _NOT_CHANGED or value is None:
            continue
        for other in (None, 0) if type(value) is int and value else (None,):
            changed = copy.deepcopy(document.values)
            _section(changed, path[:-1])[path[-1]] = other
            yield Rewriting("empty", f"{'.'.join(path)} = {other}", changed, document.file)


def omissions(document: Document) -> Iterator[Rewriting]:
    if document.without_defaults is not None:
        yield Rewriting("omit", "to_diff_dict", document.without_defaults)
    whole, rest = document.reloaded(document.values), copy.deepcopy(document.values)
    for path in document.paths:
        without = copy.deepcopy(rest)
        _section(without, path[:-1]).pop(path[-1], None)
        if path[-1] not in ("model_type", "architectures") and document.reloaded(without) == whole:
            rest = without
    yield Rewriting("omit", "all defaults", rest, document.file)
    for path in document.paths:
        if path[-1] in _NOT_CHANGED:
            continue
        without = copy.deepcopy(document.values)
        del _section(without, path[:-1])[path[-1]]
        yield Rewriting("omit", ".".join(path), without, document.file)


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if key == "quantization_config":
            continue
        if isinstance(value, dict) and key not in ("id2label", "label2id"):
            yield from ((key, *rest) for rest in _paths(value))
        else:
            yield (key,)


def _section(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for key in path:
        config = config[key]
    return config


#: Older names by the present ones, whatever the class.
_OLD = {
    "dtype": "torch_dtype",
    "partial_rotary_factor": "rotary_pct",
    "rope_theta": "rotary_emb_base",
    "num_kv_heads": "n_head_kv",
    "num_experts": "num_local_experts",
}


def old_names(document: Document) -> Iterator[Rewriting]:
    whole = document.reloaded(document.values)
    for kind in ("type", "rope_type"):
        config = copy.deepcopy(document.values)
        for section in (config, config.get("text_config")):
            if isinstance(section, dict) and isinstance(rope := section.get("rope_parameters"), dict):
                if "rope_theta" not in rope:
                    if "full_attention" not in rope or "sliding_attention" not in rope:
                        continue
                    local, rope = rope["sliding_attention"], rope["full_attention"]
                    section["rope_local_base_freq"] = local.get("rope_theta")
                rope = dict(rope)
                del section["rope_parameters"]
                for key in ("rope_theta", "partial_rotary_factor"):
                    if key in rope:
                        section[key] = rope.pop(key)
                rope[kind] = rope.pop("rope_type")
                section["rope_scaling"] = None if rope == {kind: "default"} else rope
        if config != document.values and document.reloaded(config) == whole:
            yield Rewriting("old", f"rope_scaling with {kind}", config, document.file)
        for theirs, ours in (("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")):
            other = copy.deepcopy(config)
            if theirs in other:
                other[ours] = other.pop(theirs)
                if document.reloaded(other) == whole:
                    yield Rewriting("old", f"{ours} for {theirs}, {kind}", other, document.file)
    for one, other in document.old_names:
        config = copy.deepcopy(document.values)
        *place, name = one.split(".")
        section, new = _section(config, tuple(place)), other.rpartition(".")[2]
        if name in section and new not in section:
            section[new] = section.pop(name)
            if document.reloaded(config) == whole:
                yield Rewriting("old", f"{other} for {one}", config, document.file)


def changes(document: Document) -> Iterator[Rewriting]:
    for path in document.paths:
        if path[-1] in _NOT_CHANGED or path[-1].endswith("token_id"):
            continue
        value = _section(document.values, path[:-1])[path[-1]]
        if path[-1] == "rope_type":
            for rope in _ROPES:
                changed = copy.deepcopy(document.values)
                section = _section(changed, path[:-1])
                section |= rope
                yield Rewriting("change", f"{'.'.join(path)} = {rope}"[:150], changed, document.file)
            continue
        for other in _others(path[-1], value):
            changed = copy.deepcopy(document.values)
            _section(changed, path[:-1])[path[-1]] = other
            yield Rewriting("change", f"{'.'.join(path)} = {str(other)[:60]}", changed, document.file)


def _others(key: str, value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value or 2]
    if isinstance(value, float):
        return [value * 1.5 or 0.5]
    if isinstance(value, str):
        return [other for other in _STRINGS.get(key, ()) if other != value]
    if value is None:
        return [True, 2, 0.5] if key not in _STRINGS else list(_STRINGS[key])
    if isinstance(value, list) and value:
        if key in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
            return [value[::-1], value[1:] + value[:1]]
        if isinstance(value[0], bool | int | float):
            return [[_others(key, value[0])[0], *value[1:]], value[::-1]]
    return []


def tiny_checkpoint(name: str, folder: Path) -> TinyCheckpoint:
    """The tiny checkpoint of an architecture, or "mmproj " and the name of a family of encoders."""
    from tests.models.encoders.test_hearing import FAMILIES

    family = name.removeprefix("mmproj ")
    kind = TinyModel if family == name else TinySound if family in FAMILIES else TinyEncoder
    return kind(family, folder)


def all_names() -> list[str]:
    from tests.models.encoders.families import FAMILIES as IMAGE_FAMILIES
    from tests.models.encoders.test_hearing import FAMILIES as AUDIO_FAMILIES

    return [*MODELS, *(f"mmproj {name}" for name in (*IMAGE_FAMILIES, *AUDIO_FAMILIES))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--kinds", default="omit,old,change,empty")
    parser.add_argument("--all", action="store_true", help="print every result, not only the wrong ones")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in options.kinds.split(",")}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names or all_names():
            tiny = tiny_checkpoint(name, Path(folder))
            for rewriting in rewritings(tiny):
                if rewriting.kind not in counts:
                    continue
                result, why = tiny.judged(rewriting)
                counts[rewriting.kind][result] += 1
                rows.append([name, rewriting.kind, rewriting.name, result, why])
                if result == "wrong" or options.all:
                    print(
                        f"{name:18} {rewriting.kind:7} {rewriting.file} {rewriting.name}: {result} {why}", flush=True
                    )
    for kind, counter in counts.items():
        print(kind, dict(sorted(counter.items())))
    if options.json:
        options.json.write_text(json.dumps(rows))
    sys.exit(any(counter["wrong"] for counter in counts.values()))


if __name__ == "__main__":
    main()
