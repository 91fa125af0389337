"""Flags that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from localllm.cli import argument_types as types
from localllm.cli.parser import HIDDEN, LEFT_OUT, Flag, flag, several
from localllm.options.declared import SWITCH, CheckedOptions, LoadOptions, Sampling, declared, default_text, flags_of
from localllm.options.types import DEFAULT_DRAFTS


def options(cls: type, *names: str, **more: Any) -> list[Flag]:
    """Return the flags of options in `localllm.options.declared`, by default of all options that have a flag.

    The default is None for `LoadOptions`, because the settings file may set them.  Other arguments do not exist if
    their flag is absent.
    """
    flags = []
    for name, option in declared(cls).items():
        if name not in (names or declared(cls)) or not option.flags:
            continue
        note = (
            "may be given several times" if more.get("action") == "append" else f"default: {default_text(cls, name)}"
        )
        keywords: dict[str, Any] = {"dest": name, "default": None if cls is LoadOptions else LEFT_OUT}
        if option.kind is SWITCH:
            keywords |= {"action": "store_true", "help": option.brief}
        else:
            value = {"type": types.reader(option), "metavar": option.kind.metavar, "help": f"{option.brief} ({note})"}
            keywords |= value | more
        flags.append(Flag(flags_of(name, option), keywords))
    return flags


class _CacheType(argparse.Action):
    """Sets the cache type, or only the type of keys (a flag that ends in k) or of values (in v)."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        keys, _, values = (getattr(namespace, self.dest) or "f16").partition("/")
        if flag and flag[-1] in "kv":
            keys, values = (value, values or keys) if flag[-1] == "k" else (keys, value)
            value = keys if keys == values else f"{keys}/{values}"
        setattr(namespace, self.dest, value)


class _FromFile(argparse.Action):
    """Reads text from a file.  Errors mention the flag that named the file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        setattr(namespace, self.dest, value)
        vars(namespace).setdefault("from_settings", {})[self.dest] = flag


class _NamesModel(argparse.Action):
    """Sets the model.  A model of the hub is downloaded if it is not on this machine."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        if namespace.model is not None:
            parser.error("a model is named twice: remove one of the names")
        namespace.model, namespace.download = value, self.option_strings == HUB.names


HUB = flag(
    "-hf --hf-repo ORG/REPO[:QUANT]",
    "model on the hub by name or address, which is downloaded if it is missing",
    types.model_file,
    dest="model",
    action=_NamesModel,
)
MODEL = flag(
    "-m --model FILE",
    "GGUF file, or a name that localllm models lists (default: the demo model)",
    types.model_file,
    action=_NamesModel,
)
#: The model, in commands that also accept it as a positional argument.
MODEL_OR_WORD = (Flag(MODEL.names, {**MODEL.keywords, "help": HIDDEN}), HUB)

CONTEXT = options(
    LoadOptions,
    "context",
    type=types.whole(0),
    help=f"{declared(LoadOptions)['context'].brief}; 0 means the number of tokens in training (default: "
    f"{default_text(LoadOptions, 'context')})",
)
PLACEMENT = [
    *options(LoadOptions, "device", "tensor_split", "split_mode", "n_cpu_moe", "cpu_moe", "max_memory"),
    *options(LoadOptions, "override_tensor", action="append"),
    *options(LoadOptions, "n_gpu_layers", type=types.layers),
]
CACHE_TYPE = [
    *options(LoadOptions, "cache_type", action=_CacheType),
    *(
        flag(
            f"-ct{name[0]} --cache-type-{name[0]} TYPE",
            f"type of the KV cache for {name} only",
            types.reader(declared(LoadOptions)["cache_type"]),
            dest="cache_type",
            action=_CacheType,
            default=None,
        )
        for name in ("keys", "values")
    ),
]
DEVICE = [*PLACEMENT, *CACHE_TYPE, *options(LoadOptions, "isa")]
THREADS = options(LoadOptions, "threads")
#: Flags for image and audio encoders.
MEDIA = [
    *options(LoadOptions, "mmproj", "image_max_tokens"),
    flag("--no-mmproj", "use no encoder of images or audio", dest="mmproj", action="store_const", const=False),
]
PRESETS = flag(
    "--models --models-preset FILE",
    "TOML file of models and their options (default: models.toml in the settings folder)",
    Path,
    dest="presets",
)
#: Flags for running a model.
RUNNING = [
    *CONTEXT,
    *DEVICE,
    flag("-hff --hf-file NAME", "file to use in the repository of -hf", dest="hub_file"),
    flag("--chat-template TEXT", "Jinja source instead of the file's template, or a name such as chatml or llama3"),
    flag("--chat-template-file FILE", "read --chat-template from a file"),
    flag(
        "--chat-template-kwargs JSON",
        "JSON object of additional variables for the template",
        types.json_object,
        default={},
    ),
    flag("--reasoning on|off|auto", "let the model reason before it answers, if it can"),
    *options(CheckedOptions, "reasoning_budget", "reasoning_budget_message"),
    *THREADS,
]
LORA = several(
    "--lora ADAPTER[=X]", "low-rank adapter, a GGUF file or a PEFT folder, and its scale (default: 1)", types.share
)
#: Control vectors, in llama.cpp's form.
STEERING = [
    several(
        "--control-vector FILE",
        "control vector, a GGUF file, to add to the outputs of layers",
        lambda path: (Path(path), 1.0),
        dest="control_vectors",
    ),
    several(
        "--control-vector-scaled FILE:X", "control vector to add X times", types.scaled_vector, dest="control_vectors"
    ),
    flag(
        "--control-vector-layer-range FIRST",
        "first and last layer that control vectors change (default: all layers of the file)",
        types.whole(0),
        nargs=2,
        metavar=("FIRST", "LAST"),
        dest="control_vector_layers",
    ),
]

ENDING = [
    *options(CheckedOptions, "max_tokens", type=types.token_limit),
    *options(CheckedOptions, "ignore_eos"),
    *options(CheckedOptions, "stop", action="append"),
]
#: Flags of models that write by diffusion.
DIFFUSION = options(
    CheckedOptions, "diffusion_steps", "diffusion_block_length", "diffusion_algorithm", "diffusion_eps"
)
SAMPLING: list[Flag | str] = [
    "sampling",
    *options(Sampling),
    several(
        "--dry-sequence-breaker TEXT",
        "DRY does not match repetitions across TEXT; replaces the default texts; 'none' removes them",
        dest="dry_sequence_breakers",
        default=LEFT_OUT,
    ),
    flag(
        "-jf --json-schema-file FILE",
        "read -j from a file",
        types.text_file,
        dest="json_schema",
        default=LEFT_OUT,
        action=_FromFile,
    ),
    flag(
        "--grammar-file FILE",
        "read --grammar from a file",
        types.text_file,
        dest="grammar",
        default=LEFT_OUT,
        action=_FromFile,
    ),
    flag(
        "--samplers NAME;…",
        "use only these samplers, such as top_k;top_p;temperature; the order is always llama.cpp's default",
        lambda text: text.split(";"),
    ),
    several("-l --logit-bias ID±X", "add X to the logit of a token: 15043+1, 15043-0.5, 15043-inf", types.logit_bias),
    "diffusion",
    *DIFFUSION,
]
DRAFT_MODEL = options(LoadOptions, "draft_model", type=types.model_file)
SPECULATION: list[Flag | str] = [
    "speculative decoding: the same text in less time",
    flag(
        "--lookup",
        "draft the continuation of the same words earlier in the prompt or reply",
        dest="speculate",
        action="store_const",
        const="lookup",
        default=LEFT_OUT,
    ),
    *DRAFT_MODEL,
    *options(
        CheckedOptions,
        "draft_max",
        type=types.draft_count,
        help=f"maximum number of tokens to draft per step (default: {DEFAULT_DRAFTS}); 'always' drafts that number "
        "in every step, even if that is not expected to be faster",
    ),
]

SYSTEM = flag("-sys --system-prompt --system TEXT", "system message, before the user's message", dest="system")
JSON = flag("--json", "print one JSON object")
JSON_AT_END = flag("--json", "print one JSON object at the end")
QUIET = flag("-q --quiet", "print nothing but errors")
#: Verbosity of generate and chat.
LOUDNESS = [
    flag("-q --quiet", "print nothing but the text and errors"),
    flag("-v --verbose", "print devices, memory use and all timings"),
]

#: The output file as a flag, in place of a positional argument.
OUTPUT = flag("-o --output OUTPUT", "same as OUTPUT above", Path)
#: Flags of commands that write a model.
DRY_RUN = flag("--dry-run", "show types and sizes without writing a file")
REQUANTIZE = flag("--allow-requantize", "requantise tensors that are already quantised")
WRITING = [
    flag("--allow-nan", "replace NaN and infinite values by 0"),
    flag("-t --threads N", "number of threads (default: one per processor)", types.whole(1)),
    QUIET,
    JSON_AT_END,
]
