"""Files in a working folder: reading, searching, editing and undo, with hostile paths and odd contents."""

from __future__ import annotations

import codecs
import os
import random
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from localllm.agent_tools import file_edits, file_tools, tool
from localllm.agent_tools.file_edits import apply_edit, diff, edited, undo_edit, written
from localllm.agent_tools.tool import FileEdit, IsStopped, ToolOutput, call_tool, preview_of
from localllm.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "secret.txt").write_text("plums")
    return (tmp_path / "project").resolve()


def called(folder: Path, name: str, **arguments: Any) -> ToolOutput:
    tools = {tool.name: tool for tool in file_tools.file_tools(folder, is_writable=True)}
    return call_tool(tools[name], arguments, lambda: False)


# -- Editing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"one\ntwo\n", "two", "2", b"one\n2\n"),
        (b"one\r\ntwo\r\nthree\r\n", "two\nthree", "2\nx\n3", b"one\r\n2\r\nx\r\n3\r\n"),
        (b"one\r\ntwo", "two", "2\r\n3", b"one\r\n2\r\n3"),
        (b"a\r\nb\nc\n", "b\nc", "x\ny", b"a\r\nx\ny\n"),
        (b"a\nb\r\nc\n", "b\nc", "x\ny", b"a\nx\r\ny\n"),
        (codecs.BOM_UTF8 + "é\n".encode(), "é", "ü", codecs.BOM_UTF8 + "ü\n".encode()),
        (b"a(b)*[c]\\1\n", "(b)*[c]\\1", "\\g<0>", b"a\\g<0>\n"),
        (b"x\n", "x\n", "", b""),
        (b"a\rb", "b", "c", b"a\rc"),
    ],
)
def test_an_edit_keeps_line_ends_and_encoding(folder: Path, before: bytes, old: str, new: str, after: bytes) -> None:
    path = folder / "a.txt"
    path.write_bytes(before)
    output = called(folder, "edit_file", path="a.txt", old_text=old, new_text=new)
    assert (output.text, path.read_bytes()) == ("a.txt is changed", after)
    assert output.edit is not None
    undo_edit(output.edit)
    assert path.read_bytes() == before
    assert os.listdir(folder) == ["a.txt"]  # no temporary file


@pytest.mark.posix("has no modes")
def test_an_edit_keeps_the_mode_and_a_link(folder: Path) -> None:
    (folder / "run.sh").write_text("echo 1\n")
    (folder / "run.sh").chmod(0o750)
    (folder / "link").symlink_to("run.sh")
    called(folder, "edit_file", path="link", old_text="1", new_text="2")
    assert (folder / "link").is_symlink()
    assert (folder / "run.sh").read_text() == "echo 2\n"
    assert stat.S_IMODE((folder / "run.sh").stat().st_mode) == 0o750
    before = os.umask(0o027)
    called(folder, "write_file", path="deep/new.txt", content="x")
    os.umask(before)
    assert stat.S_IMODE((folder / "deep" / "new.txt").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("old", "error"),
    [
        ("", "old_text is empty"),
        ("def f():\nreturn 1", "white space differs. Copy the text exactly from line 3:\ndef f():\n    return 1"),
        ("retrun 1", "most similar line is line 4: return 1"),
        ("zebra", "read the file again"),
        ("#", "old_text occurs 3 times in a.py (lines 1, 2, 5): add lines around it"),
        ("aa", "old_text occurs 2 times in a.py (lines 6)"),  # overlapping
    ],
)
def test_a_missing_or_ambiguous_text_is_explained(folder: Path, old: str, error: str) -> None:
    content = "# a\n# b\ndef f():\n    return 1\n# c\naaa\n"
    (folder / "a.py").write_text(content)
    output = called(folder, "edit_file", path="a.py", old_text=old, new_text="new")
    assert output.text.startswith("error: ")
    assert error in output.text
    assert output.edit is None
    assert (folder / "a.py").read_text() == content


def test_a_similar_line_among_thousands_is_found_quickly(folder: Path) -> None:
    """Comparing all of these lines exactly takes minutes."""
    choose = random.Random(1)
    lines = ["".join(choose.choices("ab", k=199)) for _ in range(2000)]
    (folder / "a.txt").write_text("\n".join(lines))
    old = lines[1234][:100] + "c" + lines[1234][101:]
    output = called(folder, "edit_file", path="a.txt", old_text=old, new_text="new")
    assert "The most similar line is line 1235: " in output.text


def test_an_edit_that_is_there_already_is_reported(folder: Path) -> None:
    (folder / "b.py").write_bytes(b"x\r\ny")
    for output in (
        called(folder, "edit_file", path="b.py", old_text="x\ny", new_text="x\r\ny"),
        called(folder, "write_file", path="b.py", content="x\ny"),
    ):
        assert "b.py has this content already" in output.text
    (folder / "a.py").write_bytes(b"x = 2\r\ny = 3\r\n")
    output = called(folder, "edit_file", path="a.py", old_text="x = 1\ny = 1", new_text="x = 2\ny = 3")
    assert "may have this change already" in output.text


@pytest.mark.parametrize(
    "arguments", [{}, {"path": "a"}, {"path": 5, "old_text": "a", "new_text": "b"}, {"path": "a", "old_text": None}]
)
def test_wrong_arguments_are_errors(folder: Path, arguments: dict[str, Any]) -> None:
    (folder / "a").write_text("a")
    for name in ("edit_file", "write_file"):
        assert called(folder, name, **arguments).text.startswith("error: ")
    assert os.listdir(folder) == ["a"]


def test_what_is_not_text_is_not_edited(folder: Path) -> None:
    contents = {"latin": b"caf\xe9", "binary": b"a\0b", "big": b"a" * (file_edits.MAX_EDITED + 1)}
    for name, data in contents.items():
        (folder / name).write_bytes(data)
        for output in (
            called(folder, "edit_file", path=name, old_text="a", new_text="x"),
            called(folder, "write_file", path=name, content="x"),
        ):
            assert output.text.startswith("error: ")
        assert (folder / name).read_bytes() == data
    assert "NUL character" in called(folder, "write_file", path="new", content="a\0b").text
    assert "not valid Unicode" in called(folder, "write_file", path="new", content="\ud800").text
    assert "larger than 1 MiB" in called(folder, "write_file", path="new", content="é" * (1 << 20)).text
    assert not (folder / "new").exists()


def test_a_whole_file_is_written_with_its_line_ends(folder: Path) -> None:
    (folder / "a.txt").write_bytes(codecs.BOM_UTF8 + b"a\r\nb\r\n")
    output = called(folder, "write_file", path="a.txt", content="c\nd\n")
    assert (folder / "a.txt").read_bytes() == codecs.BOM_UTF8 + b"c\r\nd\r\n"
    called(folder, "write_file", path="a.txt", content="\ufeffe\n")
    assert (folder / "a.txt").read_bytes() == codecs.BOM_UTF8 + b"e\r\n"
    output = called(folder, "write_file", path="deep/er/b.txt", content="c\r\nd")
    assert output.text == "deep/er/b.txt is created"
    assert (folder / "deep" / "er" / "b.txt").read_bytes() == b"c\r\nd"
    assert output.edit is not None
    undo_edit(output.edit)
    assert not (folder / "deep" / "er" / "b.txt").exists()


# -- Confinement ---------------------------------------------------------------------------------------------------


def test_paths_out_of_the_folder_are_refused(folder: Path) -> None:
    if sys.platform != "win32":  # links need rights
        (folder / "link").symlink_to(folder.parent / "secret.txt")
        (folder / "up").symlink_to("..")
        (folder / "new").symlink_to(folder.parent / "created")
        (folder / "cycle").symlink_to("cycle")
    names = [
        "../secret.txt",
        str(folder.parent / "secret.txt"),
        "link",
        "up/secret.txt",
        "new",
        "cycle",
        "\0",
        "x" * 5000,
    ]
    for name in [*names, "a/../../secret.txt", "../project2/x", "~/x/../../../../../../etc/x"]:
        assert called(folder, "read_file", path=name).text.startswith("error: ")
        assert called(folder, "edit_file", path=name, old_text="plums", new_text="x").text.startswith("error: ")
        assert called(folder, "write_file", path=name, content="x").text.startswith("error: ")
    assert (folder.parent / "secret.txt").read_text() == "plums"
    assert sorted(os.listdir(folder.parent)) == ["project", "secret.txt"]
    assert called(folder, "search_files", text="plums").text == "nothing found"


def test_paths_of_other_machines_are_not_looked_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "resolve", lambda self: pytest.fail("looked up"))
    for name in ("//server/share/a.txt", "../a", "/etc/passwd"):
        with pytest.raises(UsageError, match="is outside the folder"):
            file_edits.confined(folder, name)


@pytest.mark.parametrize(
    "name",
    ["CON", "nul.txt", "sub/com1", "LPT².a.b", "a.txt:stream", ".git./config", "a ", ".git::$INDEX_ALLOCATION"],
)
def test_names_that_windows_reads_differently_are_refused(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_edits, "_IS_WINDOWS", True)
    for output in (called(folder, "read_file", path=name), called(folder, "write_file", path=name, content="x")):
        assert output.text.startswith("error: ")
    assert os.listdir(folder) == []
    for good in ("console.txt", "com", "lpt10", ".gitignore", "a b.txt"):
        assert called(folder, "write_file", path=good, content="x").text == f"{good} is created"


def test_names_with_line_breaks_or_surrogates_are_refused(folder: Path) -> None:
    for name in ("a\n+++ b", "a\x1b[2J", "\udcff.txt", "\ud800"):
        for output in (
            called(folder, "write_file", path=name, content="x"),
            called(folder, "edit_file", path=name, old_text="a", new_text="x"),
        ):
            assert output.text.startswith("error: ")
    assert os.listdir(folder) == []


@pytest.mark.posix("has no pipes")
def test_special_files_do_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for output in (
        called(folder, "read_file", path="pipe"),
        called(folder, "write_file", path="pipe", content="x"),
        called(folder, "edit_file", path="pipe", old_text="a", new_text="b"),
    ):
        assert "it is not a regular file" in output.text
    assert called(folder, "search_files", text="x").text == "nothing found"
    (folder / "sub").mkdir()
    assert "it is a folder" in called(folder, "write_file", path="sub", content="x").text


def test_files_of_git_are_not_changed(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("a")
    for name in (".git/hooks/pre-commit", "./.git/config", "sub/.GIT/config"):
        assert "belongs to git" in called(folder, "write_file", path=name, content="x").text
    assert "belongs to git" in called(folder, "edit_file", path=".git/config", old_text="a", new_text="x").text


@pytest.mark.posix("links need rights")
def test_a_predictable_name_is_not_written(folder: Path) -> None:
    """A repository may contain links whose names are the names of temporary files of other programs."""
    for name in ("a.txt.part", "a.txt.tmp", ".a.txt.swp", "a.txt~"):
        (folder / name).symlink_to(folder.parent / "secret.txt")
    (folder / "a.txt").write_text("1")
    called(folder, "edit_file", path="a.txt", old_text="1", new_text="2")
    assert (folder.parent / "secret.txt").read_text() == "plums"


@pytest.mark.posix("links need rights")
def test_a_folder_that_becomes_a_link_is_noticed(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "secret.txt").write_text("plums")
    edit = edited(folder, "sub/secret.txt", "plums", "x")
    (folder / "sub" / "secret.txt").unlink()
    (folder / "sub").rmdir()
    (folder / "sub").symlink_to("..")
    for act in (apply_edit, undo_edit):
        with pytest.raises(UsageError, match="is a link now"):
            act(edit)
    assert (folder.parent / "secret.txt").read_text() == "plums"


@pytest.mark.posix("has no modes")
@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root may write all files")
def test_a_read_only_file_is_not_replaced(folder: Path) -> None:
    (folder / "a").write_text("1")
    (folder / "a").chmod(0o444)
    assert "is read-only" in called(folder, "edit_file", path="a", old_text="1", new_text="2").text


# -- Undo ----------------------------------------------------------------------------------------------------------


def test_undo_refuses_a_file_that_has_changed(folder: Path) -> None:
    path = folder / "a.txt"
    path.write_text("1")
    first = called(folder, "edit_file", path="a.txt", old_text="1", new_text="2").edit
    second = called(folder, "edit_file", path="a.txt", old_text="2", new_text="3").edit
    assert first is not None
    assert second is not None
    with pytest.raises(UsageError, match="has changed since the edit"):
        undo_edit(first)
    undo_edit(second)
    undo_edit(first)
    assert path.read_text() == "1"
    path.unlink()
    with pytest.raises(UsageError, match="has changed since"):
        undo_edit(first)


def test_an_edit_is_not_applied_to_a_changed_file(folder: Path) -> None:
    (folder / "a.txt").write_text("1")
    edits = [edited(folder, "a.txt", "1", "2"), written(folder, "b.txt", "new")]
    (folder / "a.txt").write_text("1 and more")
    (folder / "b.txt").write_text("other")
    for edit in edits:
        with pytest.raises(UsageError, match="has changed in the meantime"):
            apply_edit(edit)
    assert (folder / "a.txt").read_text() == "1 and more"


def test_edits_at_the_same_time_do_not_replace_each_other(folder: Path) -> None:
    (folder / "a.txt").write_text("".join(f"line {i}.\n" for i in range(20)))
    with ThreadPoolExecutor(20) as threads:
        edits = [
            threads.submit(called, folder, "edit_file", path="a.txt", old_text=f"line {i}.", new_text=f"new {i}.")
            for i in range(20)
        ]
    n_changed = sum(future.result().edit is not None for future in edits)
    assert n_changed == (folder / "a.txt").read_text().count("new") > 0


def test_a_stopped_call_changes_nothing(folder: Path) -> None:
    tools = {tool.name: tool for tool in file_tools.file_tools(folder, is_writable=True)}
    output = call_tool(tools["write_file"], {"path": "a.txt", "content": "x"}, lambda: True)
    assert "stopped before it was run" in output.text
    assert os.listdir(folder) == []


def test_the_thread_of_a_call_ends_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def run(arguments: object, is_stopped: IsStopped) -> str:
        while not is_stopped():
            time.sleep(0.01)
        ended.set()
        return ""

    monkeypatch.setattr(tool, "CALL_SECONDS", 0.1)
    waiting = tool.stoppable(tool.AgentTool("wait", "Waits.", {}, run))
    assert "it takes too long" in call_tool(waiting, {}, lambda: False).text
    assert ended.wait(60)


def test_a_failed_write_leaves_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.txt").write_text("1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in called(folder, "edit_file", path="a.txt", old_text="1", new_text="2").text
    assert os.listdir(folder) == ["a.txt"]
    assert (folder / "a.txt").read_text() == "1"


# -- Diffs ---------------------------------------------------------------------------------------------------------


def test_a_diff_shows_the_change(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"".join(b"line %d\r\n" % i for i in range(1, 100)))
    tools = {tool.name: tool for tool in file_tools.file_tools(folder, is_writable=True)}
    change = preview_of(tools["edit_file"], {"path": "a.txt", "old_text": "line 50", "new_text": "fifty\n50a"})
    assert change == (
        "--- a.txt\n+++ a.txt\n@@ -47,7 +47,8 @@\n line 47\n line 48\n line 49\n-line 50\n+fifty\n+50a\n line 51\n"
        " line 52\n line 53"
    )
    new = preview_of(tools["write_file"], {"path": "b.txt", "content": "x\ny"})
    assert new == "--- (new file)\n+++ b.txt\n@@ -0,0 +1,2 @@\n+x\n+y\n\\ No newline at end of file"
    assert not (folder / "b.txt").exists()
    with pytest.raises(UsageError, match="most similar line"):
        preview_of(tools["edit_file"], {"path": "a.txt", "old_text": "line 500", "new_text": "x"})
    assert preview_of(tools["read_file"], {"path": "a.txt"}) == ""


@pytest.mark.posix("has no patch")
def test_random_diffs_are_understood_by_patch(tmp_path: Path) -> None:
    try:
        subprocess.run(["patch", "--version"], capture_output=True, check=True)
    except OSError:
        pytest.skip("the program patch is not installed")
    choose = random.Random(1)
    for _ in range(30):
        a, b = ("".join(choose.choices(["a\n", "b\n", "c\n"], k=choose.randrange(30))) for _ in range(2))
        a, b = (text[: len(text) - choose.randrange(2)] for text in (a, b))
        if a == b:
            continue
        path = tmp_path / "f.txt"
        path.write_text(a)
        change = diff(FileEdit(path, "f.txt", a.encode(), b.encode()))
        subprocess.run(["patch", "-s", "f.txt"], input=f"{change}\n", text=True, cwd=tmp_path, check=True)
        assert path.read_text() == b


def test_a_diff_of_many_lines_is_quick(tmp_path: Path) -> None:
    a, b = (b"".join(b"%d\n" % (i * factor) for i in range(100_000)) for factor in (3, 5))
    lines = diff(FileEdit(tmp_path / "a", "a", a, b)).splitlines()
    assert len(lines) > 190_000
    assert lines[2] == "@@ -1,100000 +1,100000 @@"


# -- Reading and searching -----------------------------------------------------------------------------------------


def test_a_long_file_is_read_in_parts(folder: Path) -> None:
    lines = [f"line {i}" for i in range(1, 5001)]
    (folder / "a.txt").write_text("\n".join(lines), newline="\r\n")
    text, read = "", 1
    for _ in range(9):
        part = called(folder, "read_file", path="a.txt", first_line=read).text
        body, mark, rest = part.rpartition("\n(lines ")
        text += body + "\n" if mark else part
        if not mark:
            break
        read = int(rest.partition("first_line ")[2].split()[0])
    assert text.split("\n") == lines
    for first, error in ((0, "at least 1"), ("x", "at least 1"), (5001, "only 5,000 lines"), (10**30, "only")):
        assert error in called(folder, "read_file", path="a.txt", first_line=first).text
    assert called(folder, "read_file", path="a.txt", first_line="5000").text == "line 5000"


def test_folders_and_images_are_read(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "cat.PNG").write_bytes(b"pixels")
    assert called(folder, "read_file", path=".").text == "cat.PNG\nsub/"
    assert called(folder, "read_file", path="cat.PNG") == ToolOutput("the image cat.PNG", (b"pixels",))


@pytest.mark.posix("links need rights")
def test_a_cycle_of_links_is_listed(folder: Path) -> None:
    (folder / "cycle").symlink_to("cycle")
    assert called(folder, "read_file", path=".").text == "cycle"


def test_deep_folders_are_searched_to_a_level(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tools, "_MAX_LEVELS", 3)
    deep = folder / "1" / "2" / "3" / "4"
    deep.mkdir(parents=True)
    for path in (folder, *deep.relative_to(folder).parents, deep):
        (folder / path / "a.txt").write_text("pears")
    names = [f"{path}a.txt:1: pears" for path in ("", "1/", "1/2/", "1/2/3/")]
    assert called(folder, "search_files", text="pears").text.split("\n") == names


def test_a_pdf_file_without_text_is_an_error(folder: Path) -> None:
    pytest.importorskip("pypdf")
    Image.new("RGB", (9, 9)).save(folder / "a.pdf")
    assert "PDF file of images without text" in called(folder, "read_file", path="a.pdf").text


def test_files_and_lines_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"a.py": "Pears\nplums\n", "docs/b.md": "pears", ".git/c": "pears", "d.bin": "pears\0"}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    assert called(folder, "search_files", text="PEARS").text == "a.py:1: Pears\ndocs/b.md:1: pears"
    assert called(folder, "search_files", files="*.md").text == "docs/b.md"
    assert called(folder, "search_files", files="docs/*").text == "docs/b.md"
    assert called(folder, "search_files", text="p", files="*.py").text == "a.py:1: Pears\na.py:2: plums"
    assert called(folder, "search_files").text == "a.py\nd.bin\ndocs/b.md"
    assert "shorter pattern" in called(folder, "search_files", files="*" * 300).text
    monkeypatch.setattr(file_tools, "_MAX_RESULTS", 1)
    assert called(folder, "search_files", text="p").text.endswith("search for a more specific text or pattern)")
    monkeypatch.setattr(file_tools, "_MAX_FILES", 1)
    assert "choose a smaller folder" in called(folder, "search_files", text="zebra").text


def test_without_write_access_nothing_can_be_changed(folder: Path) -> None:
    tools = file_tools.file_tools(folder, is_writable=False)
    assert [tool.name for tool in tools] == ["read_file", "search_files"]
