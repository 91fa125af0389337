"""``localllm cache``: list or remove the evaluated prompts on disk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from localllm.cli.parser import Command, flag
from localllm.cli.shared_flags import JSON
from localllm.console import print_columns, quantity, visible_line
from localllm.errors import UsageError, path_text


def run(arguments: argparse.Namespace) -> None:
    from localllm.cli.chat_launcher import PROMPT_CACHE
    from localllm.files import expanded
    from localllm.tui.storage.chats import default_path

    folder = default_path().with_name(PROMPT_CACHE) if arguments.folder is None else expanded(arguments.folder)
    if folder.is_dir():
        n_bytes, rows = _read(folder, clear=arguments.clear)
    elif arguments.folder is not None:
        raise UsageError(f"there is no folder {path_text(folder)}: name the folder of --prompt-cache")
    else:
        n_bytes, rows = 0, []
    name = visible_line(path_text(folder))
    if arguments.json:
        models = [] if arguments.clear else [row._asdict() for row in rows]
        removed = {"n_removed_bytes": n_bytes} if arguments.clear else {}
        n_left = 0 if arguments.clear else n_bytes
        print(json.dumps({"folder": str(folder), "n_bytes": n_left, "models": models, **removed}))
    elif arguments.clear:
        print(f"removed {quantity(n_bytes, 'B')} from {name}")
    else:
        _print_table(rows)
        print(f"{name}: {quantity(n_bytes, 'B') if n_bytes else 'empty'}")


class _Row(NamedTuple):
    """The prompts of a model with a cache type."""

    model: str
    cache_type: str
    n_bytes: int
    n_tokens: int
    used_at: float  # seconds since 1970


def _read(folder: Path, *, clear: bool) -> tuple[int, list[_Row]]:
    """Return the bytes of a folder, and its prompts by model. ``clear``: also remove them."""
    from localllm.engine.block_store import BlockStore

    store = BlockStore(folder, reads_only=not clear)
    try:
        if clear and not store.is_writable:
            raise UsageError(f"{store.take_notice()}; close that program first")
        store.flush()  # the index is read
        n_bytes, sizes = store.n_bytes, store.sizes()
        if clear:
            store.clear()
    finally:
        store.close()
    rows: dict[tuple[str, str], _Row] = {}
    for size in sizes:
        names = _names_of(size.label)
        row = rows.get(names, _Row(*names, 0, 0, 0.0))
        rows[names] = row._replace(
            n_bytes=row.n_bytes + size.n_bytes,
            n_tokens=row.n_tokens + size.n_tokens,
            used_at=max(row.used_at, size.used_at),
        )
    return n_bytes, list(rows.values())


def _names_of(label: str) -> tuple[str, str]:
    """Return the model and the cache type of a label of `localllm.loading.load`, or the label if it is different."""
    try:
        model, cache_type, *_ = json.loads(label)
    except (ValueError, TypeError):
        return label, ""
    return str(model), str(cache_type)


def _print_table(rows: Iterable[_Row]) -> None:
    table = [("model", "cache", "size", "tokens", "last stored")]
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.used_at))
        table.append((visible_line(row.model), row.cache_type, quantity(row.n_bytes, "B"), f"{row.n_tokens:,}", when))
    if len(table) > 1:
        print_columns(table)


COMMAND = Command(
    "[DIR] [--clear] [--json]",
    "list or remove evaluated prompts on disk",
    [
        flag("folder DIR", "folder of --prompt-cache (default: the chat's folder)", Path, nargs="?"),
        flag("--clear", "remove all evaluated prompts in the folder"),
        JSON,
    ],
    run,
    """\
localllm chat stores the tokens that a model has evaluated, so that a chat continues at once after a restart.  The
folder can be removed at any time: the chats themselves are saved elsewhere.
""",
)
