"""Attached files: folders, patterns, PDF files, and excerpts of files larger than the context."""

from __future__ import annotations

import base64
import io
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from textual import events

from localllm.errors import UsageError
from localllm.models.encoders.images import open_image
from localllm.tui import commands
from localllm.tui.chat import attachments
from localllm.tui.chat.attachments import attach, media_reference
from localllm.tui.chat.export import from_json, to_json, to_markdown
from localllm.tui.chat.pieces import best, cut, ranked, ranked_by_vectors
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from localllm.tui.widgets.image import half_blocks
from tests.helpers.chat_app import AppModel, chatting, setup
from tests.helpers.fake_chat import FakeModel, play, words


def count(text: str) -> int:
    return len(words(text))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "docs/a.md": "apples are red",
        "docs/b.txt": "pears",
        "docs/deep/c.md": "plums are blue",
        "docs/.hidden": "no",
        "docs/.git/x": "no",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "docs" / "z.bin").write_bytes(b"\0\1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_and_patterns(folder: Path) -> None:
    found = attach("what is in @docs/ ?", count)
    assert [file.name for file in found.files] == ["docs/a.md", "docs/b.txt", "docs/deep/c.md"]
    assert (found.skipped, found.n_tokens, found.is_cut) == (("docs/z.bin",), 7, False)
    assert [file.name for file in attach("@docs/**/*.md", count).files] == ["docs/a.md", "docs/deep/c.md"]
    assert [file.name for file in attach('see @"docs/*.txt"', count).files] == ["docs/b.txt"]
    assert attach("@nothing/*.md", count).unknown == ("nothing/*.md",)
    with pytest.raises(UsageError, match="not UTF-8 text"):
        attach("@docs/z.bin", count)


def test_too_many_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachments, "MAX_FILES", 2)
    with pytest.raises(UsageError, match="more than 2 files"):
        attach("@docs", count)


@pytest.mark.skipif(sys.platform != "linux", reason="names are Unicode elsewhere")
def test_a_file_in_a_folder_may_have_a_name_of_any_bytes(folder: Path) -> None:
    Path(os.fsdecode(b"docs/y\xff.txt")).write_text("y", encoding="utf-8")
    assert "docs/y\\udcff.txt" in [file.name for file in attach("@docs/", count).files]


def test_pieces_are_cut_at_lines_and_pages_and_lose_nothing() -> None:
    text = "".join(f"line {i} {'x' * (i % 90)}\n" for i in range(500)) + "y" * 9000
    pieces = list(cut("f", text))
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[0].first == 1
    assert all(b.first in (a.last + 1, a.last) for a, b in pairwise(pieces))
    lines = text.splitlines(keepends=True)
    assert all(
        piece.text in "".join(lines[piece.first - 1 : piece.last]) and len(piece.text) <= 3000 for piece in pieces
    )
    pages = list(cut("f", "one\ftwo\n\f\fthree"))
    assert [(p.unit, p.first, p.text) for p in pages] == [
        ("page", 1, "one"),
        ("page", 2, "two\n"),
        ("page", 4, "three"),
    ]


def test_excerpts_that_match_a_question_come_first() -> None:
    texts = ["the cat sat", "the dog barked at the cat", "a whale swims in the sea", "nothing"]
    assert ranked(texts, "Where does the WHALE swim?")[0] == 2
    assert ranked(texts, "the cat")[:2] == [0, 1]
    assert ranked(texts, "?") == [0, 1, 2, 3]
    assert ranked([], "x") == []


def test_the_best_pieces_fit_and_are_in_order() -> None:
    lines = [f"{'word ' * 60}{i}\n" for i in range(60)]
    lines[7], lines[50] = "the zebra lives here\n", "here a zebra eats\n"
    files = best({"big.txt": "".join(lines), "small.txt": "zebra"}, "what does the zebra do?", count, 1500, ranked)
    assert sum(file.n_tokens for file in files) <= 1500
    assert [file.name.split(",")[0] for file in files] == sorted(file.name.split(",")[0] for file in files)
    text = "".join(file.text for file in files)
    assert "the zebra lives here" in text
    assert "here a zebra eats" in text
    assert "big.txt, lines " in files[0].name
    assert files[0].text in "".join(lines)
    assert best({"big.txt": "x " * 9000}, "x", count, 5, ranked) == []


def test_pieces_are_ranked_by_an_embedding_model() -> None:
    embedded: list[list[str]] = []

    def embed(texts: list[str]) -> NDArray[np.float32]:
        embedded.append(texts)
        return np.array([[1, 0] if "cat" in text or "pet" in text else [0, 1] for text in texts], np.float32)

    texts = [*(f"which {i}" for i in range(150)), "a cat"]
    texts[3] = "which cat"
    rank = ranked_by_vectors(embed)
    assert rank(texts, "which pet?")[:3] == [3, 0, 1]  # the last text lacks all words and exceeds the limit
    assert rank(["a dog", "a cat"], "which pet?") == [1, 0]
    assert [len(each) for each in embedded] == [101, 3]


def test_of_a_file_larger_than_the_context_pieces_are_sent(tmp_path: Path) -> None:
    lines = [f"entry {i}: {'filler ' * 20}\n" for i in range(2000)]
    lines[1234] = "entry 1234: the password is swordfish\n"
    path = tmp_path / "big.log"
    path.write_text("".join(lines))
    model = FakeModel(["It is swordfish."], context=2000)
    session = ChatSession(model, Store(None))
    play(session.send, f"what is the password? @{path}")
    question, reply = session.conversation.path()
    assert reply.text == "It is swordfish."
    assert "swordfish" in str(model.asked[0].messages[0]["content"])
    assert any(", lines " in file.name for file in question.attachments)
    assert count("".join(file.text for file in question.attachments)) < 1500
    names = commands._detach(session, "")
    assert f"{path}, lines " in names
    commands._detach(session, str(path))
    assert commands._detach(session, "") == "no files are attached"
    assert session.store.load(session.conversation.id).path()[0].attachments == ()
    with pytest.raises(UsageError, match="there is no attached file"):
        commands._detach(session, "x")


PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/Resources<</Font<</F 4 0 R>>>>/Contents 5 0 R>>endobj\n"
    b"4 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\n"
    b"5 0 obj<</Length 41>>stream\nBT /F 12 Tf 9 9 Td (Hello from a page) Tj ET\nendstream endobj\n"
    b"trailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF\n"
)


@pytest.mark.posix("symbolic links need privileges on Windows")
def test_links_out_of_a_folder_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("text")
    (tmp_path / "docs" / "b.txt").symlink_to("a.txt")
    (tmp_path / "docs" / "c.txt").symlink_to("../secret")
    os.mkfifo(tmp_path / "docs" / "d.txt")
    attached = attach(f"@{tmp_path}/docs", count)
    assert [file.text for file in attached.files] == ["text", "text"]
    assert [Path(name).name for name in attached.skipped] == ["c.txt", "d.txt"]


@pytest.mark.filterwarnings("ignore")
def test_the_text_of_a_pdf_is_sent(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(PDF)
    (file,) = attach(f"@{tmp_path}/a.pdf", count).files
    assert file.text.strip() == "Hello from a page"
    (tmp_path / "b.pdf").write_bytes(b"no PDF")
    with pytest.raises(UsageError, match="cannot be read as a PDF"):
        attach(f"@{tmp_path}/b.pdf", count)


async def test_the_app_shows_the_files_that_fit(folder: Path) -> None:
    (folder / "big.txt").write_text("some words " * 20_000)
    (folder / "docs" / "d.md").write_text("more")
    async with chatting(setup(AppModel(context=4000)), (100, 30)) as chat:
        await chat.type("@docs/ ")
        await chat.sees("4 files: 8 tokens; 1 that are not text are skipped")
        await chat.type("@big.txt ")
        await chat.sees("the pieces that match your message best are sent")


# -- Images --------------------------------------------------------------------------------------------------------


class SeeingModel(FakeModel):
    """A model that uses five tokens per image."""

    accepts_images = True

    def tokenize_chat(self, messages: Any, **options: Any) -> list[int]:
        parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
        n_pictures = sum(part["type"] == "image" for part in parts)
        return [-1] * 5 * n_pictures + [abs(id_) for id_ in super().tokenize_chat(messages, **options)]


class SeeingAppModel(SeeingModel, AppModel):
    pass


def write_picture(path: Path, size: tuple[int, int] = (60, 30)) -> bytes:
    Image.new("RGB", size, (200, 30, 30)).save(path)
    return path.read_bytes()


def sent_pictures(model: FakeModel, asked: int = -1) -> list[bytes]:
    parts: list[Any] = [part for message in model.asked[asked].messages for part in cast("Any", message["content"])]
    return [part["image"] for part in parts if isinstance(part, dict) and part["type"] == "image"]


def test_images_are_sent_with_a_message_and_restored(folder: Path) -> None:
    data = write_picture(folder / "my cat.png")
    model, store = SeeingModel(), Store(folder / "chats.db")
    session = ChatSession(model, store)
    play(session.send, 'what is @"my cat.png" beside @docs/a.md ?')
    question = session.conversation.path()[0]
    assert [(file.name, file.n_tokens, file.picture) for file in question.attachments] == [
        ("my cat.png", 5, data),
        ("docs/a.md", 3, b""),
    ]
    assert sent_pictures(model) == [data]
    (folder / "my cat.png").unlink()
    again = store.load(session.conversation.id)
    assert again.path()[0] == question
    assert from_json(to_json(again)).path()[0].attachments == question.attachments
    assert f"![my cat.png](data:;base64,{base64.b64encode(data).decode()})" in to_markdown(again)
    play(session.edit, question.id, 'and @"my cat.png"')
    assert sent_pictures(model) == [data]
    session.detach("my cat.png")
    play(session.send, "well?")
    assert not isinstance(model.asked[-1].messages[0]["content"], list)


def test_images_are_refused_if_the_model_cannot_see(folder: Path) -> None:
    write_picture(folder / "docs" / "cat.png")
    with pytest.raises(UsageError, match=r"docs/cat\.png cannot be attached: the model cannot process images"):
        attach("@docs/cat.png", count)
    assert attach("@docs", count).skipped == ("docs/cat.png", "docs/z.bin")
    with pytest.raises(UsageError, match=r"there is no room for docs/cat\.png, which has 70 tokens"):
        attach("@docs/cat.png", count, budget=lambda: 60, see=lambda data: 70)
    found = attach("@docs/*.png", count, see=lambda data: 70)
    assert [(file.name, file.n_tokens) for file in found.files] == [("docs/cat.png", 70)]
    (folder / "bad.png").write_bytes(b"\x89PNG")

    def see(data: bytes) -> int:
        open_image(data)
        return 1

    with pytest.raises(UsageError, match=r"bad\.png cannot be attached: the image is not one that can be read"):
        attach("@bad.png", count, see=see)


class HearingModel(SeeingModel):
    """A model that uses five tokens per image and seven per audio file."""

    accepts_images, accepts_audio = False, True

    def tokenize_chat(self, messages: Any, **options: Any) -> list[int]:
        parts = [part for m in messages if not isinstance(m["content"], str) for part in m["content"]]
        return [-1] * 7 * sum(part["type"] == "audio" for part in parts) + super().tokenize_chat(messages, **options)


def test_audio_is_sent_with_a_message(folder: Path) -> None:
    data = b"RIFF\x24\0\0\0WAVEfmt "
    (folder / "talk.WAV").write_bytes(data)
    model, store = HearingModel(), Store(folder / "chats.db")
    session = ChatSession(model, store)
    play(session.send, "what does @talk.WAV say?")
    (file,) = session.conversation.path()[0].attachments
    assert (file.name, file.n_tokens, file.picture, file.is_sound) == ("talk.WAV", 7, data, True)
    content: Any = model.asked[-1].messages[0]["content"]
    assert content[0] == {"type": "audio", "audio": data}
    again = store.load(session.conversation.id)
    assert f"\n[talk.WAV](data:;base64,{base64.b64encode(data).decode()})" in to_markdown(again)
    assert media_reference("talk.WAV") == "@talk.WAV "
    with pytest.raises(UsageError, match=r"talk\.WAV cannot be attached: the model cannot process audio"):
        attach("@talk.WAV", count)


@pytest.mark.skipif(os.sep != "/", reason="other shells quote paths differently")
def test_pasted_paths_of_images_attach_them(folder: Path) -> None:
    write_picture(folder / "my cat.png")
    url = (folder / "my cat.png").as_uri()
    for pasted in ("my\\ cat.png", "'my cat.png'", '"my cat.png" '):
        assert media_reference(pasted) == '@"my cat.png" '
    assert media_reference(url) == f'@"{folder}/my cat.png" '
    for other in ("", "dog.png", "look at my cat.png", "docs/a.md", "my cat.png\nmy cat.png", "~nobody/cat.png"):
        assert media_reference(other) is None


@pytest.mark.skipif(sys.platform != "linux", reason="fakes Wayland's programs")
async def test_images_on_the_clipboard_are_attached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (60, 30), (200, 30, 30)).save(folder / "clipboard.jpg")
    program = folder / "wl-paste"
    program.write_text('#!/bin/sh\ncat clipboard.jpg || { echo "Nothing is copied" >&2; false; }\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    async with chatting(setup(SeeingAppModel())) as chat:
        composer = chat.app._chat.composer
        await chat.press("ctrl+v")
        await chat.until(lambda: composer.text.startswith("@") and composer.text.endswith(".png "))
        await chat.press("enter")
        await chat.sees("▀" * 40)
        for path in [folder / "clipboard.jpg", *folder.glob("clipboard-*")]:
            path.unlink()  # the chat has read the file
        chat.app.copy_to_clipboard("words")
        composer.post_message(events.Paste(""))
        await chat.until(lambda: composer.text == "words")


def test_pages_of_a_pdf_without_text_are_images(folder: Path) -> None:
    pytest.importorskip("pypdfium2")
    page = Image.new("RGB", (80, 60), "white")
    page.save(folder / "scan.pdf", save_all=True, append_images=[page])
    found = attach("@scan.pdf", count, see=lambda data: 7)
    assert [(file.name, file.n_tokens, file.picture[:4]) for file in found.files] == [
        (f"scan.pdf, page {i}", 7, b"\x89PNG") for i in (1, 2)
    ]
    with pytest.raises(UsageError, match=r"scan\.pdf cannot be attached: its pages are images without text"):
        attach("@scan.pdf", count)


async def test_images_are_drawn(folder: Path) -> None:
    write_picture(folder / "cat.png")
    async with chatting(setup(SeeingAppModel())) as chat:
        chat.app._chat.composer.post_message(events.Paste("cat.png"))
        await chat.until(lambda: chat.app._chat.composer.text == "@cat.png ")
        await chat.press("enter")
        await chat.sees("▀" * 40)
        await chat.sees("cat.png · 5 tokens")


def test_half_blocks_keep_proportions() -> None:
    file = io.BytesIO()
    Image.new("RGB", (300, 10)).save(file, "PNG")
    assert str(half_blocks(file.getvalue())) == "▀" * 40
    assert "is not one that can be read" in str(half_blocks(b"x"))
