"""Chats continue after a restart without evaluating their messages again."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import localllm
from localllm import LLM
from localllm.engine import cache as cache_module
from localllm.tui.chat.session import ChatSession
from localllm.tui.storage.chats import Store
from tests.helpers.command_line import run_main
from tests.helpers.fake_chat import play

#: Tokens between two snapshots of a prompt in these tests.
INTERVAL = 64


@pytest.fixture(params=["demo", "qwen35"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    monkeypatch.setattr(cache_module, "SNAPSHOT_TOKENS", INTERVAL)
    if request.param == "demo":
        return None
    pytest.importorskip("torch", reason="needs the extra 'reference'")
    from tests.models.tiny import TINY, make_model, write

    entry = TINY[request.param]
    entry = replace(entry, config={**entry.config, "max_position_embeddings": 4096})
    return write(tmp_path / "model.gguf", entry, make_model(entry))


def branched(llm: LLM, store: Store) -> tuple[str, list[str]]:
    """Write a chat with five branches of two replies. Return its id, and the ids of the last replies."""
    session = ChatSession(llm, store)
    session.set_options({"temperature": 0.0, "max_tokens": 30})
    play(session.send, "Once upon a time there was a dog who wanted to fly. " * 4)
    question, ends = session.conversation.path()[0], []
    for i in range(5):
        if i:
            play(session.edit, question.id, f"Story {i}: once upon a time there was a cat. " * 4)
        play(session.send, f"And then, number {i}?")
        ends.append(session.conversation.path()[-1].id)
    return session.conversation.id, ends


def continued(llm: LLM, store: Store, id_: str, end: str) -> tuple[str, int, int]:
    """Continue a branch, and return the reply, and the number of prompt tokens that were cached and all of them."""
    session = ChatSession(llm, store, store.load(id_))
    session.switch(end)
    play(session.send, "Go on.")
    reply = session.conversation.path()[-1]
    assert reply.stats is not None
    return reply.text, reply.stats.cached_tokens, reply.stats.prompt_tokens


@pytest.mark.filterwarnings("ignore:.*has no chat template")
def test_five_branches(model: Path | None, tmp_path: Path) -> None:
    """After a restart, each branch has as many cached tokens as without a restart."""
    with localllm.load(model, context=1024, parallel=8) as llm, closing(Store(None)) as store:
        id_, ends = branched(llm, store)
        expected = [continued(llm, store, id_, end) for end in ends]
    options = {"prompt_cache": tmp_path / "cache", "context": 1024}
    with closing(Store(None)) as store:
        with localllm.load(model, **options) as llm:
            id_, ends = branched(llm, store)
        for end, (text, n_cached, n_tokens) in zip(ends, expected, strict=True):
            with localllm.load(model, **options) as llm:
                again = continued(llm, store, id_, end)
                assert llm.counts.restored_tokens >= again[1] >= 64
            assert (again[0], again[2]) == (text, n_tokens)
            assert again[1] >= n_cached - (0 if model is None else INTERVAL)


@pytest.mark.parametrize(
    ("flags", "folder"), [("", "prompt-cache"), ("--prompt-cache a", "a"), ("--no-prompt-cache", "")]
)
def test_the_chat_stores_in_its_own_folder(
    flags: str,
    folder: str,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCALLLM_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n"), encoding="utf-8"))
    flags = flags.replace(" a", f" {tmp_path / 'a'}")
    assert run_main(capfdbinary, "chat", "--plain", "-q", "-n", "3", *flags.split()).code == 0
    assert {path.parent.name for path in tmp_path.rglob("*.blocks")} == ({folder} if folder else set())
