"""``localllm search``: search models to download."""

from __future__ import annotations

import argparse
import json
import sys

from localllm.cli.parser import Command, flag
from localllm.cli.shared_flags import JSON
from localllm.console import is_terminal, print_table, quantity, say, visible_line, warn
from localllm.errors import HubError, shown

#: Maximum number of repositories that the hub returns.
_LIMIT = 20

_HEAD = ("name", "download", "fits", "downloads in a month", "model")


def run(arguments: argparse.Namespace) -> None:
    from localllm.catalog.hub import Hub
    from localllm.catalog.known_models import available_bytes, matching_models

    text, available = " ".join(arguments.words), available_bytes()
    known = matching_models(text)
    try:
        remote = Hub(text).search(_LIMIT)
    except HubError as error:
        if not known:
            raise
        warn(str(error))
        remote = []
    rows, values = [], []
    for model in known:
        format = model.format_for(available)
        fits, n_bytes = model.memory(format) <= available, model.n_bytes(format)
        rows.append((model.name, quantity(n_bytes, "B"), "yes" if fits else "no", "-", model.title))
        values.append({"name": model.name, "title": model.title, "n_bytes": n_bytes, "fits": fits})
    for found in remote:
        name, n_downloads = visible_line(found.name), found.n_downloads
        rows.append((name, "-", "-", f"{n_downloads:,}", "needs permission" if found.is_gated else "-"))
        values.append({"name": found.name, "downloads": n_downloads, "gated": found.is_gated})
    if arguments.json:
        print(json.dumps(values))
    elif not rows:
        say(f"no model matches {shown(text)}: try fewer words, or parts of names")
    elif is_terminal(sys.stdout):
        print_table(_HEAD, rows, numbers=("download", "downloads in a month"))
    else:
        print("\n".join("\t".join(row) for row in (_HEAD, *rows)))


COMMAND = Command(
    "WORDS [--json]",
    "search models to download",
    [flag("words WORD", "parts of names", nargs="+"), JSON],
    run,
    """\
Lists the models with short names whose name, abilities (images, audio, tools, reasoning, embeddings) or uses contain
all words, and then repositories of GGUF files on the hub, most downloads first.  localllm pull NAME downloads one of
them.  Without a network, only models with short names are listed.
""",
)
