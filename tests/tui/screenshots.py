"""Draw the screenshots of README.md and docs/chat.md: ``python -m tests.tui.screenshots [FOLDER]``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.helpers.chat_app import AppModel, chatting, setup
from tests.helpers.scenes import conversation

FOLDER = Path(__file__).parent / "screenshots"

#: Theme, size and keys of each screenshot, and the text to wait for.
PICTURES: dict[str, tuple[str, tuple[int, int], tuple[str, ...], str]] = {
    "chat-dark": ("dark", (100, 34), (), "sunset"),
    "message": ("dark", (100, 30), ("ctrl+up",), "Continue"),
}


async def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (theme, size, keys, awaited) in PICTURES.items():
        model = AppModel()
        model.name = "Qwen2.5 1.5B"
        built = setup(model, conversation=conversation(), theme=theme)
        async with chatting(built, size) as chat:
            await chat.press(*keys)
            await chat.sees(awaited)
            await chat.pilot.pause(0.5)
            (folder / f"{name}.svg").write_text(chat.app.export_screenshot(title="localllm chat"), encoding="utf-8")
            print(folder / f"{name}.svg")


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
