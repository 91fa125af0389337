"""How long keys wait in the chat app while a model generates on all cores.

    python -m tests.benchmarks.chat_keys [--model FILE] [--seconds 10]

Keys are pressed at random times while a reply streams in; measured is the time from the press to the letter in the
editor.  It should be within 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

#: Seconds between two keys, on average.
_BETWEEN = 0.08
#: Seconds after which a key will not come any more.
_LOST = 30.0


async def measure(app: ChatApp, seconds: float) -> list[float]:
    """Seconds that each key waited."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    # A reply that goes on where the context is full has twice as many tokens; one that fills it would ask what to do.
    settings: dict[str, Any] = {"ignore_eos": True, "max_tokens": 400, "temperature": 0.8}
    setup = Setup(
        Store(None),
        conversation=Conversation(settings=settings),
        load=lambda name, progress: localllm.load(arguments.model, progress=progress),
        when_full="drop",
    )
    app = ChatApp(setup)
    with responsive():
        waited = sorted(1000 * seconds for seconds in asyncio.run(measure(app, arguments.seconds)))
    app.end()
    setup.store.close()
    result = {
        "keys": len(waited),
        "median_ms": statistics.median(waited),
        "p95_ms": waited[int(0.95 * len(waited))],
        "most_ms": waited[-1],
    }
    print(f"{result['keys']} keys: half of them within {result['median_ms']:.1f} ms, 95 % within", end=" ")
    print(f"{result['p95_ms']:.1f} ms, all within {result['most_ms']:.1f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
