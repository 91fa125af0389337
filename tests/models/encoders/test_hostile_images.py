"""Damaged image files in every front end: all give the same reply, or refuse the image in one sentence.

``LOCALLLM_PICTURES=2000`` tests 2,000 files, which takes ten minutes or more; the default is a few.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from localllm import LLM
from localllm.compat import Llama, Llava15ChatHandler
from localllm.errors import LocalLLMError
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from localllm.tui.widgets.image import half_blocks
from tests.helpers.command_line import run_main
from tests.helpers.fake_chat import play
from tests.helpers.http_server import Serving
from tests.helpers.images import file_of
from tests.models.encoders.families import Image, picture
from tests.models.encoders.test_front_ends import GREEDY, asked, files, messages, text_of

__all__ = ["files"]  # a fixture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Number of files to test, over all formats.
N_FILES = int(os.environ.get("LOCALLLM_PICTURES", "18"))
QUESTION = "what is it"

#: Returns the reply to an image file, or None if the file is refused.
Ask = Callable[[Path], str | None]


def mutated(kind: str, number: int) -> bytes:
    """Return a truncated image file, or one with changed bytes, lengths or whole ranges."""
    rng = np.random.default_rng([len(kind), ord(kind[0]), number])
    image = picture(24, 31)
    modes = {"PNG": ("RGB", "P", "RGBA", "L"), "TIFF": ("RGB", "CMYK", "1"), "GIF": ("P", "L"), "BMP": ("RGB", "P")}
    options: dict[str, Any] = {"append_images": [picture(24, 31)], "save_all": True} if number % 5 == 4 else {}
    if kind in ("JPEG", "WEBP", "TIFF", "PNG"):
        exif = Image.Exif()
        exif[0x0112] = number % 9  # orientation
        options["exif"] = exif
    kept = options if kind in ("GIF", "WEBP", "TIFF", "PNG") else {k: v for k, v in options.items() if k == "exif"}
    choices = modes.get(kind, ("RGB",))
    bad = bytearray(file_of(image.convert(choices[number % len(choices)]), kind, **kept))
    if number % 3 == 0:
        del bad[int(rng.integers(1, len(bad))) :]
    # Headers contain the sizes and offsets.
    for place in rng.integers(0, min(len(bad), (len(bad), 64)[number % 2]), 1 + number % 4):
        bad[place] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF, int(rng.integers(256))]))
    if number % 7 == 6:
        at, n = rng.integers(0, len(bad), 2)
        bad[at:at] = bad[n : n + 40]
    return bytes(bad)


@pytest.fixture(scope="module")
def compat(files: Path) -> Iterator[Llama]:
    handler = Llava15ChatHandler(clip_model_path=str(files / "mmproj.gguf"))
    with Llama(str(files / "model.gguf"), n_ctx=512, n_threads=1, chat_handler=handler) as loaded:
        yield loaded


def refusal(text: str) -> None:
    """Check that an error is one sentence about the image."""
    assert "\n" not in text.strip()
    # A JPEG file with a changed second byte looks like an MP3 file; llama.cpp's API does not state the media type.
    assert "image" in text or "multimodal_data[0]" in text or "no encoder of audio" in text
    assert "Traceback" not in text


def by_library(llm: LLM) -> Ask:
    def ask(path: Path) -> str | None:
        try:
            return llm.chat(messages(path.read_bytes(), QUESTION), **GREEDY).text
        except LocalLLMError as error:
            refusal(str(error))
            return None

    return ask


def by_compat(llm: Llama) -> Ask:
    def ask(path: Path) -> str | None:
        parts = asked(f"data:image/png;base64,{text_of(path.read_bytes())}", QUESTION)[0]["content"][::-1]
        try:
            answer: Any = llm.create_chat_completion(
                [{"role": "user", "content": parts}], max_tokens=2, temperature=0
            )
        except (LocalLLMError, ValueError) as error:
            refusal(str(error))
            return None
        return str(answer["choices"][0]["message"]["content"])

    return ask


def by_server(server: Serving, path: str, body: Callable[[str], dict[str, Any]], *keys: str | int) -> Ask:
    """Return a client; ``body`` creates a request from an image in base64, ``keys`` are the path of the reply."""

    def ask(file: Path) -> str | None:
        answer = httpx.post(f"{server.url}{path}", json=body(text_of(file.read_bytes())), timeout=60)
        value = answer.json()
        if answer.status_code == 400:
            error = value["error"]
            refusal(error if isinstance(error, str) else error["message"])
            return None
        assert answer.status_code == 200, value
        for key in keys:
            value = value[key]
        return str(value)

    return ask


def by_command(files: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Ask:
    options = ("-n", 2, "--temp", 0, "--ignore-eos", "-c", 512, "-t", 1, "-q")

    def ask(path: Path) -> str | None:
        outcome = run_main(
            capfdbinary, "generate", "-m", files / "model.gguf", "--image", path, "-p", QUESTION, *options
        )
        if outcome.code:
            refusal(outcome.error())
            return None
        return outcome.out.removesuffix("\n")

    return ask


def by_chat(llm: LLM) -> Ask:
    """Attach an image, draw it and send a question."""

    def ask(path: Path) -> str | None:
        assert half_blocks(path.read_bytes()).plain
        with closing(Store(None)) as store:
            session = ChatSession(llm, store)
            session.set_options({"max_tokens": 2, "temperature": 0})
            try:
                play(session.send, f'@"{path}" {QUESTION}')
            except LocalLLMError as error:
                refusal(str(error))
                return None
        return session.conversation.path()[-1].content

    return ask


@pytest.mark.timeout(600 + 5 * N_FILES)
@pytest.mark.filterwarnings("ignore:.*is an animation")
def test_every_front_end_sees_or_refuses_damaged_images(
    llm: LLM, server: Serving, compat: Llama, files: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    limits = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "model": "demo"}
    ollama = {"num_predict": 2, "temperature": 0}
    marked = f"user:<start_of_image><__media__><end_of_image>{QUESTION};"

    def anthropic(data: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        return {"messages": [{"role": "user", "content": content}], **limits}

    def responses(data: str) -> dict[str, Any]:
        parts = [
            {"type": "input_image", "image_url": f"data:;base64,{data}"},
            {"type": "input_text", "text": QUESTION},
        ]
        return {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2, **limits}

    def chat(data: str) -> dict[str, Any]:
        message = asked(f"data:image/png;base64,{data}", QUESTION)[0]
        return {"messages": [message | {"content": message["content"][::-1]}], **limits}

    def chat_of_ollama(data: str) -> dict[str, Any]:
        message = {"role": "user", "content": QUESTION, "images": [data]}
        return {"messages": [message], "model": "demo", "stream": False, "options": ollama}

    def completion(data: str) -> dict[str, Any]:
        return {"prompt": {"prompt_string": marked, "multimodal_data": [data]}, "n_predict": 2, **limits}

    front_ends: dict[str, Ask] = {
        "library": by_library(llm),
        "compat": by_compat(compat),
        "generate --image": by_command(files, capfdbinary),
        "chat app": by_chat(llm),
        "OpenAI": by_server(server, "/v1/chat/completions", chat, "choices", 0, "message", "content"),
        "OpenAI's responses": by_server(server, "/v1/responses", responses, "output", -1, "content", 0, "text"),
        "Anthropic": by_server(server, "/v1/messages", anthropic, "content", 0, "text"),
        "Ollama": by_server(server, "/api/chat", chat_of_ollama, "message", "content"),
        "llama.cpp": by_server(server, "/completion", completion, "content"),
    }
    n_seen, n_refused = dict.fromkeys(FORMATS, 0), dict.fromkeys(FORMATS, 0)
    for number in range(N_FILES):
        kind = FORMATS[number % len(FORMATS)]
        path = tmp_path / f"{number}.png"
        path.write_bytes(mutated(kind, number // len(FORMATS)))
        replies = {name: ask(path) for name, ask in front_ends.items()}
        is_refused = [reply is None for reply in replies.values()]
        same = {reply for name, reply in replies.items() if name not in ("chat app", "llama.cpp")}  # other prompts
        assert (len(set(is_refused)), len(same)) == (1, 1), (kind, number, replies)
        (n_refused if replies["library"] is None else n_seen)[kind] += 1
    with capfdbinary.disabled():
        if "LOCALLLM_PICTURES" in os.environ:
            print(f"\nseen: {n_seen}, refused: {n_refused}")
    assert sum(n_seen.values()) > N_FILES // 6 < sum(n_refused.values())
