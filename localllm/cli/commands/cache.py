"""``localllm cache``: list or remove the evaluated prompts on disk."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from localllm.cli.parser import Command, flag
from localllm.cli.shared_flags import JSON
from localllm.console import quantity, visible_line
from localllm.errors import UsageError, path_text


def run(arguments: argparse.Namespace) -> None:
    from localllm.cli.chat_launcher import PROMPT_CACHE
    from localllm.engine.block_store import BlockStore
    from localllm.files import expanded
    from localllm.tui.storage.chats import default_path

    folder = default_path().with_name(PROMPT_CACHE) if arguments.folder is None else expanded(arguments.folder)
    if not folder.is_dir():
        if arguments.folder is not None:
            raise UsageError(f"there is no folder {path_text(folder)}: name the folder of --prompt-cache")
        print(f"{visible_line(path_text(folder))}: empty")
        return
    store = BlockStore(folder, reads_only=not arguments.clear)
    try:
        if arguments.clear and not store.is_writable:
            raise UsageError(f"{store.take_notice()}; close that program first")
        store.flush()  # the index is read
        n_bytes, sizes = store.n_bytes, store.sizes()
        if arguments.clear:
            store.clear()
            print(f"removed {quantity(n_bytes, 'B')} from {visible_line(path_text(folder))}")
            return
    finally:
        store.close()
    rows: dict[tuple[str, str], list[float]] = {}
    for size in sizes:
        model, cache_type = (str(word) for word in [*json.loads(size.label), "", ""][:2])
        row = rows.setdefault((model, cache_type), [0, 0, 0.0])
        row[0] += size.n_bytes
        row[1] += size.n_tokens
        row[2] = max(row[2], size.used_at)
    if arguments.json:
        names = ("n_bytes", "n_tokens", "used_at")
        models = [
            {"model": model, "cache_type": cache_type, **dict(zip(names, row, strict=True))}
            for (model, cache_type), row in rows.items()
        ]
        print(json.dumps({"folder": str(folder), "n_bytes": n_bytes, "models": models}))
        return
    table = [("model", "cache", "size", "tokens", "last stored")]
    for (model, cache_type), (n, n_tokens, used_at) in rows.items():
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used_at))
        table.append((visible_line(model), cache_type, quantity(int(n), "B"), f"{n_tokens:,.0f}", when))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for words in table:
        print("  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip())
    print(f"{visible_line(path_text(folder))}: {quantity(n_bytes, 'B')}")


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
