"""``localllm inspect``: show the contents of a GGUF file, the devices and memory that its model would use, or the
values inside the model.

Reads the header, the metadata and the tensor table, but no weights.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.cli import shared_flags as flags
from localllm.cli.defaults import apply_settings, load_options
from localllm.cli.parser import Command, Positionals, flag
from localllm.console import detail, is_terminal, placement_lines, quantity, rounded, short_count, visible_line, warn
from localllm.errors import LocalLLMError, UsageError
from localllm.options.declared import in_flags

if TYPE_CHECKING:
    from localllm.gguf import GGUFFile, TensorInfo
    from localllm.loading.placement import Placement, Plan

#: Flags that need ``--plan``.
PLANNING = [*flags.CONTEXT, *flags.THREADS, *flags.PLACEMENT, *flags.CACHE_TYPE, *flags.MEDIA, *flags.DRAFT_MODEL]

#: Attributes in JSON: of a group of tensors in a plan, and of a tensor of a file.
_GROUP_FIELDS = ("name", "device", "kernels", "weights", "kv_cache", "scratch", "pool")
_TENSOR_FIELDS = ("shape", "n_bytes", "offset")

#: Width of the column of keys; a longer key moves its value to the right.
_KEY_WIDTH = 50


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.demo import demo_path
    from localllm.gguf import GGUFFile

    for planning_flag in PLANNING:
        if not arguments.plan and getattr(arguments, planning_flag.keywords["dest"]) is not None:
            raise UsageError(f"{planning_flag.names[0]} needs --plan: add it")
    apply_settings(arguments)
    with GGUFFile.open(arguments.model or demo_path()) as file:
        if arguments.plan:
            _show_plan(file, arguments)
            return
        if arguments.graph is not None:
            _show_graph(file, arguments)
            return
        if arguments.json:
            print(json.dumps(as_json(file, arguments), ensure_ascii=False, allow_nan=False))
            return
        clean = _cleaner()
        if not arguments.tensors:
            for line in (*_heading(file), "", *_metadata_lines(file, full=arguments.full)):
                print(clean(line))
        if not arguments.metadata:
            if not arguments.tensors:
                print()
            for line in _tensor_lines(file):
                print(clean(line))


def _cleaner() -> Callable[[str], str]:
    """Return a function that makes a line safe to print to standard output."""
    if is_terminal(sys.stdout):
        return visible_line
    return lambda text: text.replace("\r", "\\r").replace("\n", "\\n")


# -- The plan ------------------------------------------------------------------------------------------------------


def _show_plan(file: GGUFFile, arguments: argparse.Namespace) -> None:
    # Imported here: importing kernels and tokenizers takes much longer than reading a file.
    from localllm.loading.load import plan_file
    from localllm.loading.prediction import Predictor
    from localllm.options.declared import LoadOptions

    options = LoadOptions(path=arguments.model, **load_options(arguments, arguments.model))
    plan = plan_file(options)
    predictor = Predictor.of(file.path, plan.placement, options.threads, isa=options.isa)
    speed = None if predictor is None else predictor.speed()
    placement, as_json = plan.placement, plan_as_json(plan) | {"speed": speed}
    if arguments.json:
        print(json.dumps({"files": [str(path) for path in file.paths], "plan": as_json}))
    else:
        clean = _cleaner()
        for line in (
            *_heading(file),
            f"{placement.context:,} tokens of context",
            "",
            *placement_lines(placement, plan.free),
            *([] if plan.draft is None else [f"draft model: {arguments.draft_model or 'in the same file'}"]),
            *([] if plan.draft is None else (f"  {line}" for line in placement_lines(plan.draft))),
            *([] if plan.encoder is None else [detail("encoder", str(plan.encoder))]),
            detail("total", f"{quantity(as_json['total'], 'B')}, Python and kernels included"),
            *([] if speed is None else speed_lines(speed)),
        ):
            print(clean(line))
    for message in plan.notices:
        warn(message.worded(in_flags))


def _show_graph(file: GGUFFile, arguments: argparse.Namespace) -> None:
    # Imported here: importing the operations of models takes longer than reading a file.
    from localllm.inspection.names import ValueNames
    from localllm.models.registry import read_model

    names = ValueNames(read_model(file).graph)
    if arguments.json:
        values = {name: {"rows": shape.rows, "width": shape.width} for name, shape in names.items()}
        print(json.dumps({"files": [str(path) for path in file.paths], "values": values}))
    else:
        print(names.mermaid() if arguments.graph == "mermaid" else names)


def speed_lines(speed: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the predicted speed of a model (`localllm.loading.prediction.Predictor.speed`)."""
    n, seconds = speed["prompt_tokens"], speed["first_token_s"]
    yield detail(
        "prompts", f"about {rounded(n / seconds)} tokens/s: the first token after {n:,} takes {seconds:.2g} s"
    )
    rates = (f"{rounded(x['tokens_per_s'])} after {x['depth']:,}" for x in speed["decode"])
    if speed["decode"]:
        yield detail("generation", f"about {', '.join(rates)} tokens")
    if not speed["kernels_measured"]:
        yield detail("", "a prediction from the GPU's speed of copies and products; no kernel was timed")


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values; sizes are in bytes."""
    placement, draft = plan.placement, plan.draft
    return {
        "context": placement.context,
        "cache_type": placement.cache_type,
        "cache": None if placement.cache is None else asdict(placement.cache),
        "groups": _groups(placement),
        "draft": None if draft is None else {"groups": _groups(draft), "total": draft.total},
        "devices": {device: placement.on(device).total for device in placement.devices},
        "encoder": None if plan.encoder is None else asdict(plan.encoder) | {"path": str(plan.encoder.path)},
        "experts_in_file": placement.experts_in_file,
        "free": dict(plan.free),
        "total": placement.total
        + (0 if draft is None else draft.total)
        + (0 if plan.encoder is None else plan.encoder.n_bytes),
    }


def _groups(placement: Placement) -> list[dict[str, Any]]:
    return [{name: getattr(group, name) for name in _GROUP_FIELDS} for group in placement.groups]


# -- Text ----------------------------------------------------------------------------------------------------------


def _heading(file: GGUFFile) -> Iterator[str]:
    from localllm.loading.model_info import file_type_name
    from localllm.models.registry import ARCHITECTURES, DRAFTERS

    n_files = f", {len(file.paths)} files" if len(file.paths) > 1 else ""
    yield f"{file.path}: GGUF version {file.version}, {quantity(file.size, 'B')}{n_files}"
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        yield "no general.architecture: not a model"
        return
    if architecture == "clip":
        yield _encoder_line(file)
        return
    remark = "" if architecture in ARCHITECTURES else ", which localllm cannot run"
    if architecture in DRAFTERS:
        remark = ", which drafts for another model (--draft-model)"
    n_parameters = sum(tensor.n_values for tensor in file.tensors.values())
    file_type = file_type_name(file.metadata, file.tensors.values())
    yield f"{architecture}{remark}, {short_count(n_parameters)} parameters ({n_parameters:,}), {file_type}"


def _encoder_line(file: GGUFFile) -> str:
    from localllm.loading.media_encoder import MediaEncoder
    from localllm.models.encoders.registry import PROJECTORS

    try:
        encoder = MediaEncoder.open(file.path)
    except LocalLLMError as error:
        return f"an encoder that localllm cannot run: {error}"
    with contextlib.closing(encoder):
        inputs = {"image": ("images", "an image of 1,024 × 768"), "audio": ("audio", "30 seconds of audio")}
        families = ", ".join(e.family for e in encoder.encoders.values())
        tokens = [
            f"{encoder.n_tokens(medium):,} tokens of {encoder.width:,} values for {inputs[medium][1]}"
            for medium in encoder.encoders
        ]
        return (
            f"an encoder of {' and '.join(inputs[medium][0] for medium in encoder.encoders)} for "
            f"{PROJECTORS[encoder.family].models} ({families}): {', '.join(tokens)}"
        )


def _metadata_lines(file: GGUFFile, *, full: bool) -> Iterator[str]:
    from localllm.gguf.json_values import value_of

    yield f"{len(file.metadata):,} metadata keys"
    width = min(_KEY_WIDTH, max((len(key) for key in file.metadata), default=0))
    for key in file.metadata:
        value = value_of(file, key, full=full)
        yield f"  {key:<{width}}  {value.type}: {value}"


def _tensor_lines(file: GGUFFile) -> Iterator[str]:
    yield f"{len(file.tensors):,} tensors, shapes as (rows, columns)"
    width = max((len(name) for name in file.tensors), default=0)
    for tensor in file.tensors.values():
        shape = " × ".join(f"{n:,}" for n in tensor.shape) or "one value"
        yield f"  {tensor.name:<{width}}  {tensor.type.name:<7}  {shape:>18}  {quantity(tensor.n_bytes, 'B'):>8}"

    if file.tensors:
        yield ""
    by_type: dict[str, list[TensorInfo]] = {}
    for tensor in file.tensors.values():
        by_type.setdefault(tensor.type.name, []).append(tensor)
    sizes = {name: _sizes(tensors) for name, tensors in by_type.items()}
    for name, tensors in sorted(by_type.items(), key=lambda item: -sizes[item[0]][0]):
        n_bytes, n_values = sizes[name]
        yield (
            f"  {name:<7}  {len(tensors):>5,} tensors  {short_count(n_values):>5} values  "
            f"{quantity(n_bytes, 'B'):>8}  {8 * n_bytes / n_values:6.3f} bits a value"
        )


def _sizes(tensors: Sequence[TensorInfo]) -> tuple[int, int]:
    """Return the total bytes and values of tensors."""
    return sum(t.n_bytes for t in tensors), sum(t.n_values for t in tensors)


# -- JSON ----------------------------------------------------------------------------------------------------------


def as_json(file: GGUFFile, arguments: argparse.Namespace) -> dict[str, Any]:
    from localllm.gguf.json_values import value_of
    from localllm.loading.model_info import file_type_name

    n_bytes, n_values = _sizes(list(file.tensors.values()))
    result: dict[str, Any] = {
        "files": [str(path) for path in file.paths],
        "version": file.version,
        "n_bytes": file.size,
        "n_tensors": len(file.tensors),
        "n_parameters": n_values,
        "n_tensor_bytes": n_bytes,
        "file_type": file_type_name(file.metadata, file.tensors.values()),
    }
    if not arguments.tensors:
        values = [(key, value_of(file, key, full=arguments.full)) for key in file.metadata]
        result["metadata"] = {key: {"type": v.type, "value": v.shown, "left_out": v.left_out} for key, v in values}
    if not arguments.metadata:
        result["tensors"] = [
            {"name": t.name, "type": t.type.name, **{name: getattr(t, name) for name in _TENSOR_FIELDS}}
            for t in file.tensors.values()
        ]
    return result


COMMAND = Command(
    "[FILE] [options]",
    "show the contents of a GGUF file",
    [
        *flags.MODEL_OR_WORD,
        [
            flag("--metadata", "show only the metadata"),
            flag("--tensors", "show only the tensors"),
            flag("--plan", "show the devices that the model would use, and the memory it would take"),
            flag(
                "--graph text|mermaid",
                "show the names and shapes of the values inside the model, as text or as a Mermaid diagram",
                nargs="?",
                const="text",
            ),
        ],
        flag("--full", "show long strings and arrays in full"),
        flags.JSON,
        "with --plan, as for generate",
        *PLANNING,
    ],
    run,
    words=Positionals(
        "FILE", "a GGUF file, or any file of a split model (default: the demo model); also -m FILE", ("model",)
    ),
    aliases="show info gguf-dump",
)
