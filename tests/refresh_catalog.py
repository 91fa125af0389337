"""Compare the models with short names with the hub, and update the sizes of their files in models.toml and in docs/.

    python -m tests.refresh_catalog [--write] [NAME …]

Prints one line per difference. Facts that need a decision are only reported: missing repositories and formats, and
other architectures, licences and projectors. Exits with 1 if there are such differences.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from localllm.catalog.hub import Hub, RemoteFile
from localllm.catalog.hub_names import group_files, matching
from localllm.catalog.known_models import KnownModel, known_models
from localllm.errors import LocalLLMError
from localllm.loading.projector_files import projector_names

ROOT = Path(__file__).parent.parent
PATH = ROOT / "localllm" / "catalog" / "models.toml"
#: Pages with a table of the models for a use.
PAGES = {"images": ROOT / "docs" / "images.md", "audio": ROOT / "docs" / "audio.md"}
_TABLE = re.compile(r"\| pull \|.*?\n\n", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.refresh_catalog", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the sizes of files to models.toml")
    parser.add_argument("names", nargs="*", help="families, such as qwen3.5 (default: all)")
    options = parser.parse_args(arguments)
    text, n_problems = PATH.read_text(encoding="utf-8"), 0
    for model in known_models():
        if options.names and model.family not in options.names:
            continue
        try:
            line, problems = compared(model)
        except LocalLLMError as error:
            line, problems = None, [str(error)]
        n_problems += len(problems)
        for problem in problems:
            print(f"{model.name}: {problem}")
        if line is not None and (changed := _with_sizes(text, model.repository, *line)) != text:
            print(f"{model.name}: the sizes of the files differ")
            text = changed
    if options.write:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        PATH.write_text(re.sub(r"(?m)^updated = .*", f"updated = {today}", text), encoding="utf-8")
        known_models.cache_clear()
        for use, page in PAGES.items():
            page.write_text(_TABLE.sub(table(use), page.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    return int(n_problems > 0)


def table(use: str) -> str:
    """Return a page's table of the models that are suggested for a use, smallest first."""
    rows = ["| pull | download | memory | model |", "|---|---|---|---|"]
    models = [model for model in known_models() if use in model.uses]
    for model in sorted(models, key=lambda model: model.n_bytes(model.default_format)):
        format = model.default_format
        size, memory = (f"{_gigabytes(n)} GB" for n in (model.n_bytes(format), model.memory(format)))
        more = ", ".join(ability for ability in model.abilities if ability != use)
        rows.append(f"| `{model.name}` | {size} | {memory} | {model.title}{more and f': also {more}'} |")
    return "\n".join(rows) + "\n\n"


def compared(model: KnownModel) -> tuple[tuple[str, str], list[str]]:
    """Return the formats and the projector of a model on the hub in TOML, and problems as sentences."""
    _, files, listing = Hub(model.repository).described(lambda name: name.lower().endswith(".gguf"))
    problems = list(_facts(model, listing))
    groups = group_files({file.name: file.n_bytes for file in files.values()})
    sizes, first = dict(model.formats), ""
    for format in model.formats:
        matches = [group for group in matching(format, groups) if group.is_complete]
        if len(matches) != 1:
            problems.append(f"{model.repository} has {len(matches)} models in {format}")
            continue
        first = first or matches[0].names[0]
        sizes[format] = matches[0].n_bytes
    projector = _projector(first, files) if model.projector is not None else None
    if projector != model.projector:
        problems.append(f"the projector is {projector}, not {model.projector}")
    projector_size = {} if projector is None else {f'"{projector}"': files[projector].n_bytes}
    return (_table(sizes), _table(projector_size)), problems


def _facts(model: KnownModel, listing: Mapping[str, object]) -> Iterator[str]:
    header = listing.get("gguf")
    architecture = header.get("architecture") if isinstance(header, dict) else None
    if architecture is not None and architecture != model.architecture:
        yield f"the architecture is {architecture}, not {model.architecture}"
    tags = listing.get("tags")
    licences = [str(tag)[8:] for tag in tags if str(tag).startswith("license:")] if isinstance(tags, list) else []
    if licences and model.licence not in licences and licences != ["other"]:
        yield f"the licence is {licences[0]}, not {model.licence}"


def _projector(model: str, files: Mapping[str, RemoteFile]) -> str | None:
    folder = model.rpartition("/")[0]
    return next(iter(projector_names(model, [name for name in files if name.rpartition("/")[0] == folder])), None)


def _table(sizes: Mapping[str, int]) -> str:
    """Return sizes in bytes as a TOML table in GB, with two digits."""
    return "{ " + ", ".join(f"{name} = {_gigabytes(size)}" for name, size in sizes.items()) + " }"


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f}" if n_bytes >= 950_000_000 else f"{n_bytes / 1e9:.2f}"


def _with_sizes(text: str, repository: str, formats: str, projector: str) -> str:
    """Return the text of models.toml with other sizes in a repository's line."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if f'repository = "{repository}"' in line:
            line = re.sub(r"formats = \{[^}]*\}", f"formats = {formats}", line)
            lines[i] = re.sub(r"projector = \{[^}]*\}", f"projector = {projector}", line)
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
