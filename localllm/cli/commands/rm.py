"""``localllm rm``: remove the files of a model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from localllm.cli.parser import Command, flag
from localllm.console import is_terminal, quantity, visible_line
from localllm.errors import LocalLLMError, OutputError, UsageError, path_text
from localllm.options.settings import load_settings


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.hub_cache import remove_file

    paths = model_files(arguments.name)
    n_bytes = sum(path.stat().st_size for path in paths)
    shown = visible_line(path_text(paths[0])) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    if not arguments.yes:
        if not is_terminal(sys.stdin):
            raise UsageError(f"removing {shown} needs a confirmation: add --yes")
        answer = ""
        with contextlib.suppress(EOFError):  # Ctrl-D
            answer = input(f"Remove {shown} ({quantity(n_bytes, 'B')})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise LocalLLMError("no file was removed")
    for path in paths:
        try:
            remove_file(path)
        except OSError as error:
            raise OutputError(
                f"{path_text(path)} cannot be removed ({error.strerror or error}): check permissions"
            ) from None
    print(f"removed {shown} ({quantity(n_bytes, 'B')})")


def model_files(name: str) -> list[Path]:
    """Return all files of a model.  Raises UsageError if the model is unknown or belongs to another program."""
    from localllm.catalog import other_programs
    from localllm.catalog.hub_cache import parts_of
    from localllm.catalog.hub_names import DEMO
    from localllm.catalog.listing import find_models

    path = Path(name)
    if not path.is_file():  # only complete names, because part of a name may match another model after a download
        models = find_models(load_settings().model_folders).models
        path = next((m.path for m in models if name in (m.name, m.name.removesuffix(".gguf"), *m.aliases)), path)
    if not path.is_file() and name != DEMO:
        raise UsageError(f"there is no file or model {name!r:.80} here: localllm models lists the names")
    if any(path == model.path for model in other_programs.ollama_models().values()):
        raise UsageError(f"{name!r:.80} belongs to Ollama: remove it with ollama rm {name}")
    installed = (file for files in other_programs.package_models().values() for file in files.values())
    if name == DEMO or path in installed:
        raise UsageError(f"{name!r:.80} is a file of a Python package: remove it with pip uninstall")
    if path.suffix.lower() != ".gguf":
        raise UsageError(f"{path_text(path)} is not a GGUF file: remove it with your file manager")
    return parts_of(path)


COMMAND = Command(
    "NAME [--yes]",
    "remove a model's files",
    [
        flag("name NAME", "a GGUF file, or the name of a model that localllm models lists"),
        flag("-y --yes", "remove without a confirmation"),
    ],
    run,
    """\
A split model's files are removed together.  A projector file (mmproj) next to the model stays.
""",
    aliases="remove delete",
)
