"""Files with texts of users are readable only by their owner, whatever the umask."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.agent_tools.tool import AgentTool
from localllm.agent_tools.toolbox import Toolbox
from localllm.engine import saved_prompts
from localllm.files import NewFile, create_private, private_folder, private_opener
from localllm.server.response_store import ResponseStore, StoredResponse
from localllm.tui.storage.chats import Store
from localllm.tui.storage.prompt_history import PromptHistory, _rewrite

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="lacks POSIX permissions")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """Set a umask that allows everybody to read and write."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_file_is_private_or_ordinary(tmp_path: Path) -> None:
    for name, is_private in (("private", True), ("ordinary", False)):
        path = tmp_path / name
        path.with_name(f"{name}.part").write_bytes(b"an earlier, unfinished file")
        path.with_name(f"{name}.part").chmod(0o644)
        with NewFile(path, 1, is_private=is_private) as file:
            file.put(b"x")
        assert mode(path) == (0o600 if is_private else 0o644)
    with NewFile(tmp_path / "new", 1) as file:
        file.put(b"x")
    assert mode(tmp_path / "new") == 0o666


def test_saved_prompts_are_private(tmp_path: Path) -> None:
    path = tmp_path / "a.prompts"
    path.write_bytes(b"an earlier file")
    path.chmod(0o644)
    empty = ([], 0), []
    answers = iter(empty)
    saved_prompts.save(lambda work: next(answers), path, "key")  # type: ignore[arg-type,return-value]
    assert path.read_bytes().startswith(saved_prompts.MAGIC)
    assert mode(path) == 0o600


def test_chats_histories_responses_and_permissions_are_private(tmp_path: Path) -> None:
    Store(tmp_path / "data" / "chats.sqlite3").close()
    history = PromptHistory(tmp_path / "history" / "history")
    history.save("hello")
    assert history.path is not None
    _rewrite(history.path, ["hello"], history.path.stat().st_size)
    ResponseStore(tmp_path / "responses").put("resp_" + "0" * 32, StoredResponse("", [], {}))
    Toolbox({}, tmp_path / "allowed").allow(AgentTool("a", "", {}, lambda arguments, is_stopped: ""))
    create_private(tmp_path / "created")
    with open(tmp_path / "opened", "w", encoding="utf-8", opener=private_opener):
        pass
    found = [path for path in tmp_path.rglob("*") if path != tmp_path]
    assert len([path for path in found if path.is_file()]) >= 6
    assert {path.name: mode(path) for path in found} == {
        path.name: 0o700 if path.is_dir() else 0o600 for path in found
    }


def test_a_folder_that_others_can_read_is_warned_about(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert private_folder(tmp_path / "new") is None
    assert mode(tmp_path / "new") == 0o700
    assert private_folder(tmp_path / "new") is None
    (tmp_path / "old").mkdir(mode=0o755)
    assert private_folder(tmp_path / "old") == (
        f"other users can read {tmp_path / 'old'}, which contains your texts: run chmod go= {tmp_path / 'old'}"
    )
    ResponseStore(tmp_path / "old")
    assert "warning: other users can read" in capfd.readouterr().err
