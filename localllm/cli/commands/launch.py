"""``localllm launch``: start a coding agent that uses a model of a local server."""

from __future__ import annotations

import argparse

from localllm.cli.agents import AGENTS
from localllm.cli.local_server import SERVER
from localllm.cli.parser import Command, Flag, flag
from localllm.cli.shared_flags import CONTEXT, HUB, MODEL


def run(arguments: argparse.Namespace) -> int:
    from localllm.cli import agent_launcher

    return agent_launcher.run(arguments)


_MODEL_HELP = (
    "GGUF file, or a name that localllm models lists (default: the first model of a running server, or the model in "
    "the settings)"
)

COMMAND = Command(
    "AGENT [-m FILE] [-c N] [--url URL] [--dry-run] [-- ARGUMENTS OF THE AGENT]",
    "start a coding agent that uses a local model",
    [
        flag("agent AGENT", f"the agent: {', '.join(AGENTS)}"),
        Flag(MODEL.names, {**MODEL.keywords, "help": _MODEL_HELP}),
        HUB,
        *CONTEXT,
        *SERVER,
        flag("--dry-run", "print every step without running it"),
    ],
    run,
    """\
localllm launch codex -m qwen3-8b starts a server with this model, and Codex with settings for this server.  The
server ends with the agent.  If a server already runs at --url, the agent uses it.

The settings are environment variables, arguments, and files in a temporary folder that only you can read.  The
agent's own settings files do not change.  Words after -- are arguments of the agent.
""",
    forwards=True,
)
