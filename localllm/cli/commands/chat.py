"""``localllm chat``: the chat app, or a chat line by line."""

from __future__ import annotations

import argparse

from localllm.cli.parser import Command, Positionals, flag
from localllm.cli.shared_flags import (
    ENDING,
    LORA,
    LOUDNESS,
    MODEL_OR_WORD,
    PRESETS,
    RUNNING,
    SAMPLING,
    SEEING,
    SPECULATION,
    SYSTEM,
)


def run(arguments: argparse.Namespace) -> int | None:
    from localllm.cli import chat_launcher

    return chat_launcher.run(arguments)


COMMAND = Command(
    "[FILE] [QUESTION] [options]",
    "chat with a model",
    [
        "model",
        *MODEL_OR_WORD,
        PRESETS,
        *RUNNING,
        *SEEING,
        LORA,
        "conversation",
        flag("--plain", "line by line, without a screen of its own"),
        [
            flag("--continue", "go on with the last chat", dest="resume"),
            flag("--session ID", "go on with this chat; the beginning of its id is enough"),
            flag("--list", "list the chats, and their ids", dest="list_chats"),
        ],
        SYSTEM,
        flag("--prefix TEXT", "what replies begin with"),
        flag(
            "--when-full ask|drop|summarise|stop", "what to do with the oldest turns of a full context", default="ask"
        ),
        "where replies end",
        *ENDING,
        *SAMPLING,
        *SPECULATION,
        "output",
        LOUDNESS,
    ],
    run,
    """\
Without a file the small demo model that ships with localllm answers.  Chats are saved as they are written.

With --plain, or if standard input or output is not a terminal, the chat works line by line: a backslash at the end
of a line continues it on the next one, three quotation marks begin and end a block, and /help lists commands.
Replies go to standard output, everything else to standard error.
""",
    words=Positionals(
        "FILE QUESTION",
        "a GGUF file (default: the demo model), also -m FILE; and a first message",
        ("model", "question"),
    ),
    aliases="run",
)
