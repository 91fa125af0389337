"""Files that go with a message: folders, patterns, PDF files, and pieces of what is larger than the context."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from localllm.errors import UsageError
from localllm.tui import commands
from localllm.tui.chat import attachments
from localllm.tui.chat.attachments import attach
from localllm.tui.chat.pieces import best, cut, ranked, ranked_by_vectors
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
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
    Path(os.fsdecode(b"docs/y\xff.txt")).write_text("y")
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


def test_what_matches_a_question_comes_first() -> None:
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
    assert rank(texts, "which pet?")[:3] == [3, 0, 1]  # the last text has none of the words, and is one too many
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
    assert commands._detach(session, "") == "nothing is attached"
    assert session.store.load(session.conversation.id).path()[0].attachments == ()
    with pytest.raises(UsageError, match="nothing is attached by the name"):
        commands._detach(session, "x")


PDF = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n"
    b"3 0 obj<</Type/Page/Parent 2 0 R/Resources<</Font<</F 4 0 R>>>>/Contents 5 0 R>>endobj\n"
    b"4 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj\n"
    b"5 0 obj<</Length 41>>stream\nBT /F 12 Tf 9 9 Td (Hello from a page) Tj ET\nendstream endobj\n"
    b"trailer<</Root 1 0 R>>\nstartxref\n0\n%%EOF\n"
)


@pytest.mark.filterwarnings("ignore")
def test_the_text_of_a_pdf_is_sent(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(PDF)
    (file,) = attach(f"@{tmp_path}/a.pdf", count).files
    assert file.text.strip() == "Hello from a page"
    (tmp_path / "b.pdf").write_bytes(b"no PDF")
    with pytest.raises(UsageError, match="cannot be read as a PDF"):
        attach(f"@{tmp_path}/b.pdf", count)


async def test_the_app_tells_what_fits(folder: Path) -> None:
    (folder / "big.txt").write_text("some words " * 20_000)
    (folder / "docs" / "d.md").write_text("more")
    async with chatting(setup(AppModel(context=4000)), (100, 30)) as chat:
        await chat.type("@docs/ ")
        await chat.sees("4 files: 8 tokens; 1 that are not text are left out")
        await chat.type("@big.txt ")
        await chat.sees("the pieces that match your message best are sent")
