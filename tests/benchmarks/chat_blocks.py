"""How long 200 blocks of Markdown that come at once hold the chat's screen.

    python -m tests.benchmarks.chat_blocks

A task looks at the clock all the time; measured is how long it cannot, in seconds of this thread's processor time, so
that other programs do not count.  It should be less than 200 ms.
"""

from __future__ import annotations

import asyncio
import time

from localllm.tui.app import responsive
from tests.helpers.chat_app import AppModel, Chat, chatting, setup, talk

_BLOCKS = (
    "Paragraph {i} with **bold** and `code`, and some words more to make it wrap around the end of its line.",
    "# Heading {i}",
    "- item {i}\n- another\n- third",
    "```python\nfor i in range({i}):\n    print(i)\n```",
    "> quote {i}",
)
TEXT = "\n\n".join(_BLOCKS[i % len(_BLOCKS)].format(i=i) for i in range(200))


async def held(chat: Chat, comes: bool) -> float:
    """Seconds that the screen is held at most, while a reply comes, or a chat that has one is opened."""
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


async def main() -> None:
    async with chatting(setup(AppModel([TEXT], context=1_000_000)), (120, 40)) as chat:
        for what, comes in (("a reply that comes", True), ("a chat that is opened", False)):
            print(f"{what}: {1000 * await held(chat, comes):.0f} ms at most")


if __name__ == "__main__":
    with responsive():
        asyncio.run(main())
