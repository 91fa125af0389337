"""``localllm ps``: list the models that a running server has loaded."""

from __future__ import annotations

import argparse
import json
import time
from datetime import datetime

from localllm.cli.local_server import SERVER, ask
from localllm.cli.parser import Command
from localllm.cli.shared_flags import JSON
from localllm.console import print_columns, quantity, visible_line

#: An expiry after more seconds than this is shown as "never".
_NEVER = 365 * 86400


def run(arguments: argparse.Namespace) -> None:
    models = ask(arguments, "/api/ps").get("models", [])
    if arguments.json:
        print(json.dumps({"models": models}))
        return
    rows = [("name", "size", "context", "unloaded")]
    for model in models:
        seconds = datetime.fromisoformat(model["expires_at"]).timestamp() - time.time()
        progress = model.get("load_progress")
        state = _after(seconds) if progress is None else f"loading, {progress:.0%}"
        size, context = quantity(model["size"], "B"), f"{model['context_length']:,}"
        rows.append((visible_line(model["name"]), size, context, state))
    print_columns(rows)


def _after(seconds: float) -> str:
    if seconds > _NEVER:
        return "never"
    return f"in {max(0, round(seconds))} s" if seconds < 120 else f"in {round(seconds / 60)} min"


COMMAND = Command("[--url URL] [--json]", "list the models that a running server has loaded", [*SERVER, JSON], run)
