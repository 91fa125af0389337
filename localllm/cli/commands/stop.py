"""``localllm stop``: unload a model of a running server."""

from __future__ import annotations

import argparse

from localllm.cli.local_server import SERVER, ask
from localllm.cli.parser import Command, flag
from localllm.console import visible_line


def run(arguments: argparse.Namespace) -> None:
    answer = ask(arguments, "/api/generate", {"model": arguments.name, "keep_alive": 0, "stream": False})
    print(
        f"{visible_line(str(answer.get('model', arguments.name)))} is unloaded, or will be after its running replies"
    )


COMMAND = Command(
    "NAME [--url URL]",
    "unload a model of a running server",
    [flag("name NAME", "name of the model, as listed by localllm ps"), *SERVER],
    run,
    """\
The server continues, and loads the model again when a request names it.  Ctrl-C stops a server.
""",
)
