"""``localllm inspect``: what is in a GGUF file, or where its model would go.

Header, metadata and tensor table are read, and no weight.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.cli.defaults import apply_settings, load_options
from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import (
    CACHE_TYPE,
    CONTEXT,
    DRAFT_MODEL,
    JSON,
    MODEL_OR_WORD,
    PLACEMENT,
    SEEING,
    THREADS,
)
from localllm.console import detail, is_terminal, placement_lines, quantity, short_count, visible_line, warn
from localllm.errors import LocalLLMError, UsageError
from localllm.options.declared import in_flags

if TYPE_CHECKING:
    from localllm.gguf import GGUFFile, TensorInfo
    from localllm.loading.placement import Placement, Plan

#: Flags of the plan.
PLANNING = [*CONTEXT, *THREADS, *PLACEMENT, *CACHE_TYPE, *SEEING, *DRAFT_MODEL]

#: What the JSON of a plan says of each group of tensors, and that of a file of each tensor.
_OF_A_GROUP = ("name", "device", "kernels", "weights", "kv_cache", "scratch", "pool")
_OF_A_TENSOR = ("shape", "n_bytes", "offset")

#: Keys longer than this push their value to the right.
_LONGEST_KEY = 50


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.demo import demo_path
    from localllm.gguf import GGUFFile

    _check_flags(arguments)
    apply_settings(arguments)
    with GGUFFile.open(arguments.model or demo_path()) as file:
        if arguments.plan:
            _show_plan(file, arguments)
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
    """Makes a line one that standard output can have."""
    if is_terminal(sys.stdout):
        return visible_line
    return lambda text: text.replace("\r", "\\r").replace("\n", "\\n")


# -- The plan ------------------------------------------------------------------------------------------------------


def _check_flags(arguments: argparse.Namespace) -> None:
    for each in PLANNING:
        if not arguments.plan and getattr(arguments, each.keywords["dest"]) is not None:
            raise UsageError(f"{each.names[0]} is for the plan of where a model would go: give --plan as well")


def _show_plan(file: GGUFFile, arguments: argparse.Namespace) -> None:
    # Imported here: kernels and tokenizers take much longer than to show what is in a file.
    from localllm.loading.load import plan_file
    from localllm.options.declared import LoadOptions

    plan = plan_file(LoadOptions(path=arguments.model, **load_options(arguments, arguments.model)))
    placement, as_json = plan.placement, plan_as_json(plan)
    if arguments.json:
        print(json.dumps({"files": [str(path) for path in file.paths], "plan": as_json}))
    else:
        clean = _cleaner()
        for line in (
            *_heading(file),
            f"{placement.context:,} tokens of context",
            "",
            *placement_lines(placement, plan.free),
            *_draft_lines(plan, arguments.draft_model or "in the same file"),
            *([] if plan.encoder is None else [detail("sees by", str(plan.encoder))]),
            detail("in all", f"{quantity(as_json['total'], 'B')}, Python and kernels included"),
        ):
            print(clean(line))
    for message in plan.notices:
        warn(message.worded(in_flags))


def _draft_lines(plan: Plan, name: object) -> Iterator[str]:
    if plan.draft is not None:
        yield f"draft model: {name}"
        yield from (f"  {line}" for line in placement_lines(plan.draft))


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON values; sizes are in bytes."""
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
    return [{name: getattr(group, name) for name in _OF_A_GROUP} for group in placement.groups]


# -- For people ----------------------------------------------------------------------------------------------------


def _heading(file: GGUFFile) -> Iterator[str]:
    from localllm.loading.model_info import file_type_name
    from localllm.models.registry import ARCHITECTURES, DRAFTERS

    parts = f", {len(file.paths)} files" if len(file.paths) > 1 else ""
    yield f"{file.path}: GGUF version {file.version}, {quantity(file.size, 'B')}{parts}"
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        yield "no general.architecture: not a model"
        return
    if architecture == "clip":
        yield _encoder(file)
        return
    known = "" if architecture in ARCHITECTURES else ", which localllm cannot run"
    if architecture in DRAFTERS:
        known = ", which drafts for another model (--draft-model)"
    n_parameters = sum(tensor.n_values for tensor in file.tensors.values())
    file_type = file_type_name(file.metadata, file.tensors.values())
    yield f"{architecture}{known}, {short_count(n_parameters)} parameters ({n_parameters:,}), {file_type}"


def _encoder(file: GGUFFile) -> str:
    from localllm.loading.media_encoder import MediaEncoder
    from localllm.models.encoders.registry import PROJECTORS

    try:
        encoder = MediaEncoder.open(file.path)
    except LocalLLMError as error:
        return f"an encoder that localllm cannot run: {error}"
    with contextlib.closing(encoder):
        what = {"image": ("pictures", "a picture of 1,024 × 768"), "audio": ("sounds", "30 seconds of sound")}
        families = ", ".join(each.family for each in encoder.encoders.values())
        tokens = [
            f"{encoder.n_tokens(kind):,} tokens of {encoder.width:,} values for {what[kind][1]}"
            for kind in encoder.encoders
        ]
        return (
            f"an encoder of {' and '.join(what[kind][0] for kind in encoder.encoders)} for "
            f"{PROJECTORS[encoder.family].models} ({families}): {', '.join(tokens)}"
        )


def _metadata_lines(file: GGUFFile, *, full: bool) -> Iterator[str]:
    from localllm.gguf.json_values import value_of

    yield f"{len(file.metadata):,} metadata keys"
    width = min(_LONGEST_KEY, max((len(key) for key in file.metadata), default=0))
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
    """Bytes and values of some tensors."""
    return sum(t.n_bytes for t in tensors), sum(t.n_values for t in tensors)


# -- For programs --------------------------------------------------------------------------------------------------


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
            {"name": t.name, "type": t.type.name, **{name: getattr(t, name) for name in _OF_A_TENSOR}}
            for t in file.tensors.values()
        ]
    return result


COMMAND = Command(
    "[FILE] [options]",
    "show what is in a GGUF file",
    [
        *MODEL_OR_WORD,
        [
            flag("--metadata", "show only the metadata"),
            flag("--tensors", "show only the tensors"),
            flag("--plan", "show what would run where, and how much memory it would take"),
        ],
        flag("--full", "show long texts and arrays in full"),
        JSON,
        "with --plan, the same as for generate",
        *PLANNING,
    ],
    run,
    words=Positionals(
        "FILE", "a GGUF file, or any file of a split one (default: the demo model); also -m FILE", ("model",)
    ),
    aliases="show info gguf-dump",
)
