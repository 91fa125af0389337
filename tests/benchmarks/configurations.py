"""Rewrites the configurations of tiny checkpoints as other programs write them, and compares what becomes of each.

    python -m tests.benchmarks.configurations [NAME …] [--kinds omit,old,change] [--wrong] [--json FILE]

A rewriting omits a key, names it as older releases do, or gives it another value that transformers accepts.  The
result is "equal" if the converted file is the original one and transformers computes the same logits, "transformers"
if the file differs and its logits are those of transformers, "refused" if the conversion raises an error of localllm,
"wrong" otherwise.  A rewriting that transformers itself refuses is not counted.  The exit code is 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localllm.convert import Checkpoint
from localllm.errors import LocalLLMError
from localllm.quantize import plan, run
from tests.helpers.recorder import ReferenceOps
from tests.helpers.run_model import Runner
from tests.models.tiny import ENCODERS, TINY, make_model, save, write_pooling

MODELS = TINY | ENCODERS

#: Longer than windows and than the context before scaling.
IDS = [int(i) for i in np.random.default_rng(1).integers(3, 300, 41)]

#: Keys that describe no computation; changing them tells nothing.
_NOT_CHANGED = (
    "architectures",
    "transformers_version",
    "model_type",
    "dtype",
    "torch_dtype",
    "vocab_size",
    "auto_map",
)

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2")
#: Rotations, each with what it needs.
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
        "beta_fast": 20.0,
    },
    {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32, "attention_factor": 0.8},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 32},
)
_STRINGS: dict[str, tuple[str, ...]] = {
    "position_embedding_type": ("absolute", "relative_key"),
    "hidden_act": _ACTIVATIONS,
    "hidden_activation": _ACTIVATIONS,
    "activation_function": _ACTIVATIONS,
    "mlp_hidden_act": _ACTIVATIONS,
    "activation": _ACTIVATIONS,
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
    "dense_act_fn": _ACTIVATIONS,
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "expert_selection_fn": ("softmax", "sigmoid"),
    "shared_expert_combination_strategy": ("average", "sum"),
    "output_gate_type": ("sigmoid", "silu"),
    "gating": ("per-head", "per-element"),
}


@dataclass(frozen=True)
class Rewriting:
    """A configuration in place of a tiny model's own."""

    kind: str
    name: str
    config: dict[str, Any]


class TinyModel:
    """A tiny model of transformers in a folder, with what its checkpoint becomes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.entry, self.folder = MODELS[name], folder / name
        self.model = make_model(self.entry)
        save(self.folder, self.model)
        self.released = json.loads((self.folder / "config.json").read_text())
        (self.folder / "plain").mkdir()
        self.model.config.save_pretrained(self.folder / "plain")
        self.config: dict[str, Any] = json.loads((self.folder / "plain/config.json").read_text())
        self.config["architectures"] = [type(self.model).__name__]
        if self.entry.auto == "AutoModel":
            write_pooling(self.folder, "lasttoken" if self.entry.architecture == "qwen3" else "mean")
        self.state = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.original = signature(self.converted(self.released))
        self.logits = self._computed(self.model)

    def converted(self, config: Mapping[str, Any]) -> Checkpoint:
        (self.folder / "config.json").write_text(json.dumps(config))
        return Checkpoint(self.folder, self.entry.conversion)

    def as_released(self, config: dict[str, Any]) -> dict[str, Any]:
        """``config`` with the names of released checkpoints, where transformers does not know these."""
        if self.entry.release is None:
            return config
        tensors = {key: value.clone() for key, value in self.state.items()}
        return self.entry.release(copy.deepcopy(config), tensors)[0]

    def theirs(self, config: Mapping[str, Any]) -> Any:
        """Logits of transformers; None if it does not accept ``config`` for these weights."""
        import transformers

        entry = self.entry
        try:
            settings = type(self.model.config).from_dict(copy.deepcopy(dict(config)))
            # Weights that differ are not tied, whatever the configuration says.
            for one, other in (
                (settings, self.model.config),
                (settings.get_text_config(), self.model.config.get_text_config()),
            ):
                one.tie_word_embeddings = other.tie_word_embeddings
            kind = getattr(transformers, entry.auto)
            make = kind.from_config if entry.auto.startswith("Auto") else kind._from_config
            model = make(settings, attn_implementation="eager").eval().float()
            model.config.allow_global_per_layer_attribute_access = True
            model.load_state_dict(self.state, strict=True)
            entry.change(model)
            logits = self._computed(model)
        except Exception:  # transformers raises what it happens to
            return None
        return logits if np.isfinite(logits).all() else None

    def _computed(self, model: Any) -> Any:
        import torch

        with torch.no_grad():
            options = {"use_cache": False} if self._is_decoder else {}
            return next(iter(model(torch.tensor([IDS]), **options).values()))[0].numpy()

    @property
    def _is_decoder(self) -> bool:
        return self.entry.auto.endswith(("ForCausalLM", "ForConditionalGeneration"))

    def judged(self, rewriting: Rewriting) -> tuple[str, str]:
        """The result, and what localllm says or how far logits are apart."""
        theirs = self.theirs(rewriting.config)
        try:
            released = self.as_released(rewriting.config)
        except (KeyError, RuntimeError):  # of tensors of other shapes, or without what released models always have
            return "illegal", ""
        name = rewriting.name.removeprefix("compress_")
        is_lost = self.entry.release is not None and (
            released == self.released
            or ("rope_parameters" not in released and name.startswith(("rope_", "qk_rope")))  # two forms at once
        )
        if theirs is None or (is_lost and largest_error(self.logits, theirs) > 1e-6):
            return "illegal", ""
        try:
            checkpoint = self.converted(released)
        except LocalLLMError as error:
            return "refused", str(error)
        is_same = largest_error(self.logits, theirs) < 1e-6
        if signature(checkpoint) == self.original:
            return ("equal", "") if is_same else ("wrong", f"ignored: {largest_error(self.logits, theirs):.1e}")
        try:
            error = largest_error(self._ours(checkpoint), theirs)
        except LocalLLMError as refused:
            return "refused", str(refused)
        if error == float("inf"):  # an embedding model of a model with a head
            return "illegal", "vectors for logits"
        if error < 1e-3:
            return ("equal" if is_same else "transformers"), f"{error:.1e}"
        return "wrong", f"{error:.1e}"

    def _ours(self, checkpoint: Checkpoint) -> Any:
        path = self.folder / "out.gguf"
        path.unlink(missing_ok=True)
        for _ in run(plan(checkpoint, path, "F32")):
            pass
        return Runner(path, ReferenceOps(np.float32)).logits(IDS)


def largest_error(ours: Any, theirs: Any) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max()) if ours.shape == theirs.shape else float("inf")


def signature(checkpoint: Checkpoint) -> dict[str, Any]:
    """Keys and tensors of the file, to be compared."""
    tensors = {
        name: (tensor.shape, tensor.type, hashlib.sha1(np.ascontiguousarray(tensor.data)).hexdigest())
        for name, tensor in checkpoint.tensors.items()
    }
    return {key: np.asarray(value).tolist() for key, value in checkpoint.metadata.items()} | tensors


def rewritings(tiny: TinyModel) -> Iterator[Rewriting]:
    """Every rewriting of a model's configuration."""
    yield from omissions(tiny)
    yield from old_names(tiny)
    yield from changes(tiny.config)


def _reloaded(tiny: TinyModel, config: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = type(tiny.model.config).from_dict(copy.deepcopy(dict(config))).to_dict()
    except Exception:
        return None
    return found


def omissions(tiny: TinyModel) -> Iterator[Rewriting]:
    yield Rewriting("omit", "to_diff_dict", json.loads(tiny.model.config.to_json_string(use_diff=True)))
    whole, rest = _reloaded(tiny, tiny.config), copy.deepcopy(tiny.config)
    for path in [*_paths(tiny.config)]:
        without = copy.deepcopy(rest)
        _section(without, path[:-1]).pop(path[-1], None)
        if path[-1] not in ("model_type", "architectures") and _reloaded(tiny, without) == whole:
            rest = without
    yield Rewriting("omit", "all defaults", rest)
    for path in _paths(tiny.config):
        if path[-1] in _NOT_CHANGED:
            continue
        without = copy.deepcopy(tiny.config)
        del _section(without, path[:-1])[path[-1]]
        yield Rewriting("omit", ".".join(path), without)


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if key == "quantization_config" or key.startswith("vision"):
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


def old_names(tiny: TinyModel) -> Iterator[Rewriting]:
    whole = _reloaded(tiny, tiny.config)
    for kind in ("type", "rope_type"):
        config = copy.deepcopy(tiny.config)
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
        if config != tiny.config and _reloaded(tiny, config) == whole:
            yield Rewriting("old", f"rope_scaling with {kind}", config)
        for theirs, ours in (("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")):
            other = copy.deepcopy(config)
            if theirs in other:
                other[ours] = other.pop(theirs)
                if _reloaded(tiny, other) == whole:
                    yield Rewriting("old", f"{ours} for {theirs}, {kind}", other)
    names = getattr(type(tiny.model.config), "attribute_map", {})
    for one, other in [*names.items(), *((b, a) for a, b in names.items()), *_OLD.items()]:
        if one in tiny.config and other not in tiny.config:
            config = {(other if key == one else key): value for key, value in tiny.config.items()}
            if _reloaded(tiny, config) == whole:
                yield Rewriting("old", f"{other} for {one}", config)


def changes(config: dict[str, Any]) -> Iterator[Rewriting]:
    for path in _paths(config):
        if path[-1] in _NOT_CHANGED or path[-1].endswith("token_id"):
            continue
        value = _section(config, path[:-1])[path[-1]]
        if path[-1] == "rope_type":
            for rope in _ROPES:
                changed = copy.deepcopy(config)
                section = _section(changed, path[:-1])
                section |= rope
                yield Rewriting("change", f"{'.'.join(path)} = {rope}"[:150], changed)
            continue
        for other in _others(path[-1], value):
            changed = copy.deepcopy(config)
            _section(changed, path[:-1])[path[-1]] = other
            yield Rewriting("change", f"{'.'.join(path)} = {str(other)[:60]}", changed)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--kinds", default="omit,old,change")
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
        for name in options.names or MODELS:
            tiny = TinyModel(name, Path(folder))
            for rewriting in rewritings(tiny):
                if rewriting.kind not in counts:
                    continue
                result, why = tiny.judged(rewriting)
                counts[rewriting.kind][result] += 1
                rows.append([name, rewriting.kind, rewriting.name, result, why])
                if result == "wrong" or options.all:
                    print(f"{name:18} {rewriting.kind:7} {rewriting.name}: {result} {why}", flush=True)
    for kind, counter in counts.items():
        print(kind, dict(sorted(counter.items())))
    if options.json:
        options.json.write_text(json.dumps(rows))
    sys.exit(any(counter["wrong"] for counter in counts.values()))


if __name__ == "__main__":
    main()
