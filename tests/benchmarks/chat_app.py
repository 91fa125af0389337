"""Measure how responsive the chat app is.

    python -m tests.benchmarks.chat_app keys [--model FILE] [--seconds 10]
    python -m tests.benchmarks.chat_app blocks

``keys`` presses keys at random times while a reply streams from a model on all cores, and measures the time until the
letter appears in the editor.  It should be at most 50 ms.  ``blocks`` measures how long 200 blocks of Markdown that
arrive at once block the screen.  A task reads the clock in a loop; the result is the longest time between two reads,
in processor time of this thread, so that other programs do not count.  It should be less than 200 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

from textual import events

import localllm
from localllm.tui.app import ChatApp, responsive
from localllm.tui.chat.conversation import Conversation
from localllm.tui.setup import Setup
from localllm.tui.storage.chats import Store
from tests.helpers.chat_app import AppModel, Chat, chatting, setup, talk

#: Mean seconds between two keys.
_BETWEEN = 0.08
#: Longest wait for a key in seconds.
_LOST = 30.0

_BLOCKS = (
    "Paragraph {i} with **bold** and `code`, and some words more to make it wrap around the end of its line.",
    "# Heading {i}",
    "- item {i}\n- another\n- third",
    "```python\nfor i in range({i}):\n    print(i)\n```",
    "> quote {i}",
)
TEXT = "\n\n".join(_BLOCKS[i % len(_BLOCKS)].format(i=i) for i in range(200))


async def key_times(app: ChatApp, seconds: float) -> list[float]:
    """Return the seconds that each key waited."""
    waited: list[float] = []
    async with app.run_test(size=(120, 40)) as pilot:
        chat = app._chat
        while chat.models.state != "loaded":
            await pilot.pause(0.1)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if chat.turn is None:
                chat.submit("Tell me a long story, with a list and a block of code in it.")
            await asyncio.sleep(random.expovariate(1 / _BETWEEN))
            before = len(chat.composer.text)
            begun = time.perf_counter()
            app.post_message(events.Key("x", "x"))
            while len(chat.composer.text) == before:
                if time.perf_counter() - begun > _LOST:
                    raise SystemExit(f"a key was lost: {chat.status.status}, {app.focused}")
                await asyncio.sleep(0.0005)
            if chat.turn is not None:
                waited.append(time.perf_counter() - begun)
        await chat.end_turn()
    return waited


def keys(model: str | None, seconds: float) -> None:
    # A reply that continues in a full context has twice as many tokens; otherwise, the app would open a question.
    settings: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400, "temperature": 0.8}
    store = Store(None)
    app = ChatApp(
        Setup(
            store,
            conversation=Conversation(settings=settings),
            load=lambda name, progress: localllm.load(model, progress=progress),
            when_full="drop",
        )
    )
    waited = sorted(1000 * wait for wait in asyncio.run(key_times(app, seconds)))
    app.end()
    store.close()
    print(
        f"{len(waited)} keys: half within {statistics.median(waited):.1f} ms, "
        f"95 % within {waited[int(0.95 * len(waited))]:.1f} ms, all within {waited[-1]:.1f} ms"
    )


async def blocked_seconds(chat: Chat, comes: bool) -> float:
    """Return the longest time in seconds without a read, while a reply arrives or a chat with a reply is opened."""
    most, ended = 0.0, False

    async def watch() -> None:
        nonlocal most
        while not ended:
            begun = time.thread_time()
            await asyncio.sleep(0.001)
            most = max(most, time.thread_time() - begun)

    watching = asyncio.create_task(watch())
    if comes:
        await chat.ask("go")
    else:
        await chat.app._chat.open(talk("question", TEXT, title="long"))
    await chat.until(lambda: chat.views[-1]._reply is not None and len(chat.views[-1]._reply.children) >= 200)
    await chat.rest()
    ended = True
    await watching
    return most


async def blocks() -> None:
    async with chatting(setup(AppModel([TEXT], context=1_000_000)), (120, 40)) as chat:
        for what, comes in (("an arriving reply", True), ("an opened chat", False)):
            print(f"{what}: {1000 * await blocked_seconds(chat, comes):.0f} ms at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("keys", "blocks"))
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with responsive():
        if arguments.what == "keys":
            keys(arguments.model, arguments.seconds)
        else:
            asyncio.run(blocks())


if __name__ == "__main__":
    main()
