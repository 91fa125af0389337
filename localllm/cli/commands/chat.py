"""``localllm chat``: the full-screen chat app, or a chat line by line."""

from __future__ import annotations

import argparse

from localllm.cli import shared_flags as flags
from localllm.cli.parser import Command, Positionals, flag
from localllm.options.declared import LoadOptions


def run(arguments: argparse.Namespace) -> int | None:
    from localllm.cli import chat_launcher

    return chat_launcher.run(arguments)


COMMAND = Command(
    "[FILE] [QUESTION] [options]",
    "chat with a model",
    [
        "model",
        *flags.MODEL_OR_WORD,
        flags.PRESETS,
        *flags.RUNNING,
        *flags.MEDIA,
        flags.LORA,
        *flags.STEERING,
        "conversation",
        flag("--folder DIR", "let the model read and change files in this folder, with your permission"),
        flag("--plain", "chat line by line instead of in the full-screen app"),
        [
            flag("--continue", "continue the last chat", dest="resume"),
            flag("--session ID", "continue this chat; the start of its id is enough"),
            flag("--list", "list chats and their ids", dest="list_chats"),
        ],
        flags.SYSTEM,
        [
            *flags.options(LoadOptions, "prompt_cache"),
            flag("--no-prompt-cache", "do not store evaluated chats; they then continue more slowly after a restart"),
        ],
        *flags.options(LoadOptions, "prompt_cache_size"),
        flag("--prefix TEXT", "start every reply with TEXT"),
        flag(
            "--when-full ask|drop|summarise|stop",
            "what to do with the oldest turns when the context is full",
            default="ask",
        ),
        "where replies end",
        *flags.ENDING,
        *flags.SAMPLING,
        *flags.SPECULATION,
        "output",
        flags.LOUDNESS,
    ],
    run,
    """\
Without FILE, the chat uses the small demo model that ships with localllm.  Every chat is saved automatically.

With --plain, or if standard input or output is not a terminal, the chat works line by line: a backslash at the end
of a line continues the message on the next line, \"\"\" starts and ends a message of several lines, and /help lists
commands.
Replies go to standard output, everything else to standard error.
""",
    words=Positionals(
        "FILE QUESTION",
        "a GGUF file (default: the demo model; also -m FILE), and a first message",
        ("model", "question"),
    ),
    aliases="run",
)
