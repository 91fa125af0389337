"""AGENTS.md and skills, including hostile ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from localllm.agent_tools import instructions
from localllm.agent_tools.instructions import front_matter, read_instructions
from localllm.agent_tools.tool import call_tool
from localllm.errors import UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "AGENTS.md").write_text("outside of the repository")
    root = (tmp_path / "repository").resolve()
    (root / "sub" / "folder").mkdir(parents=True)
    return root


def skill(folder: Path, name: str, text: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "SKILL.md").write_text(text, encoding="utf-8")
    return folder / name


def front(name: str, description: str = "draws pears") -> str:
    return f"---\nname: {name}\ndescription: {description}\n---\n\nTake a pencil.\n"


def test_instructions_come_from_the_root_of_the_repository_to_the_folder(root: Path) -> None:
    (root / ".git").mkdir()
    (root / "AGENTS.md").write_bytes("\ufeffUse tabs. ä\r\n".encode())
    (root / "sub" / "folder" / "AGENTS.md").write_text("Use spaces.")
    project = read_instructions(root / "sub" / "folder")
    assert list(project.files) == [root / "AGENTS.md", root / "sub" / "folder" / "AGENTS.md"]
    assert project.system_text == (
        f"Instructions from {root / 'AGENTS.md'}:\n\nUse tabs. ä\n\n"
        f"Instructions from {root / 'sub' / 'folder' / 'AGENTS.md'}:\n\nUse spaces."
    )
    assert project.summary.startswith(f"the system message contains {root / 'AGENTS.md'} (13 characters), ")
    assert project.tools == []
    assert read_instructions(None).system_text == read_instructions(None).summary == ""


def test_without_a_repository_parents_are_not_read(root: Path) -> None:
    (root / "AGENTS.md").write_text("a parent")
    assert read_instructions(root / "sub").files == {}
    assert list(read_instructions(root).files) == [root / "AGENTS.md"]


def test_long_instructions_are_cut(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "MAX_INSTRUCTIONS", 10)
    (root / ".git").mkdir()
    (root / "AGENTS.md").write_text("éééé", encoding="utf-8")
    (root / "sub" / "AGENTS.md").write_text("éééé", encoding="utf-8")
    project = read_instructions(root / "sub")
    assert list(project.files.values()) == ["éééé", "é"]
    assert "is cut off: the model gets at most 10 bytes" in project.warnings[0]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are Unicode")
def test_a_folder_whose_name_is_not_unicode_can_be_stored(root: Path) -> None:
    folder = root / os.fsdecode(b"pears\xff")
    folder.mkdir()
    (folder / "AGENTS.md").write_text("Use tabs.")
    project = read_instructions(folder)
    assert "pears\\udcff" in project.system_text.encode().decode()
    assert "pears\\udcff" in project.summary.encode().decode()
    (folder / "AGENTS.md").write_bytes(b"\xff")
    (warning,) = read_instructions(folder).warnings
    assert "pears\\udcff" in warning


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\0b", b"x" * (2 << 20)])
def test_odd_instructions_are_not_used(root: Path, data: bytes) -> None:
    (root / "AGENTS.md").write_bytes(data)
    project = read_instructions(root)
    assert project.files == {}
    assert "AGENTS.md is not used" in project.warnings[0]


@pytest.mark.posix("links and pipes need rights")
def test_links_out_of_the_repository_and_pipes_are_not_read(root: Path) -> None:
    (root / "AGENTS.md").symlink_to(root.parent / "AGENTS.md")
    os.mkfifo(root / "sub" / "AGENTS.md")
    for folder in (root, root / "sub"):
        project = read_instructions(folder)
        assert project.files == {}
        assert len(project.warnings) == 1


def test_a_skill_is_listed_and_read_on_demand(root: Path, tmp_path: Path) -> None:
    folder = skill(root / ".agents" / "skills", "draw", front("draw"))
    (folder / "scripts").mkdir()
    (folder / "scripts" / "a.py").write_text("print()")
    skill(tmp_path / "mine", "draw", front("draw", "of the user"))
    skill(tmp_path / "mine", "write", front("write", '"writes: texts"'))
    project = read_instructions(root, tmp_path / "mine")
    assert project.system_text.splitlines()[1:] == ["- draw: draws pears", "- write: writes: texts"]
    assert project.summary == "the system message contains 2 skills (draw, write)"
    (tool,) = project.tools
    assert tool.parameters["properties"]["name"]["enum"] == ["draw", "write"]

    def read(**arguments: str) -> str:
        return call_tool(tool, arguments, lambda: False).text

    assert read(name="draw").endswith("Take a pencil.\n\n\nOther files of this skill: scripts/a.py")
    assert read(name="draw", file="scripts/a.py") == "print()"
    assert "Take a pencil." in read(name="write")
    for arguments in (
        {"name": "draw", "file": "../../../AGENTS.md"},
        {"name": "x"},
        {},
        {"name": "draw", "file": "b"},
    ):
        assert read(**arguments).startswith("error: ")
    assert list(read_instructions(None, tmp_path / "mine").skills) == ["draw", "write"]


@pytest.mark.posix("links need rights")
def test_skills_of_a_repository_are_in_the_repository(root: Path, tmp_path: Path) -> None:
    secret = skill(tmp_path / "elsewhere", "secret", front("secret"))
    (root / ".agents" / "skills").mkdir(parents=True)
    (root / ".agents" / "skills" / "secret").symlink_to(secret)
    project = read_instructions(root)
    assert project.skills == {}
    assert "is outside the folder" in project.warnings[0]
    (root / ".agents" / "skills" / "secret").unlink()
    (root / ".agents" / "skills").rmdir()
    (root / ".agents" / "skills").symlink_to(tmp_path / "elsewhere")
    project = read_instructions(root)
    assert project.skills == {}
    assert len(project.warnings) == 1
    assert list(read_instructions(root, tmp_path / "elsewhere").skills) == ["secret"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "x").symlink_to(secret)  # the user's own link
    assert list(read_instructions(None, tmp_path / "links").skills) == ["secret"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "must start with a line ---"),
        ("name: x", "must start with a line ---"),
        ("---\nname: x\ndescription: y\n", "must start with a line ---"),
        ("---\n" + "a: b\n" * 200 + "---\n", "must start with a line ---"),
        ("---\ndescription: y\n---", "its name is ''"),
        ("---\nname: ../x\ndescription: y\n---", "its name is '../x'"),
        ("---\nname: \x1b[2J\ndescription: y\n---", "its name is '\\x1b[2J'"),
        ("---\nname: x\n---", "its description must have"),
        ("---\nname: x\ndescription: " + "y" * 2000 + "\n---", "its description must have"),
        ("---\nname: x\0\ndescription: y\n---", "is not UTF-8 text"),
    ],
)
def test_a_wrong_skill_is_reported(root: Path, text: str, error: str) -> None:
    skill(root / ".agents" / "skills", "bad", text)
    skill(root / ".agents" / "skills", "good", front("good"))
    project = read_instructions(root)
    assert list(project.skills) == ["good"]
    (warning,) = project.warnings
    assert warning.startswith("the skill 'bad' is not used: ")
    assert error in warning


def test_the_first_of_two_skills_with_a_name_is_used(root: Path) -> None:
    skill(root / ".agents" / "skills", "a", front("draw", "first"))
    skill(root / ".agents" / "skills", "b", front("draw", "second"))
    project = read_instructions(root)
    assert project.skills["draw"].description == "first"
    assert project.warnings == (
        "the skill 'b' is not used: another skill in this folder has the name draw: rename one",
    )


def test_the_number_of_skills_and_warnings_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "_MAX_SKILLS", 3)
    for i in range(9):
        skill(root / ".agents" / "skills", f"s{i}", front(f"s{i}"))
        skill(root / ".agents" / "skills", f"t{i}", "")
    project = read_instructions(root)
    assert list(project.skills) == ["s0", "s1", "s2"]
    assert len(project.warnings) == 5


def test_front_matter_has_simple_values() -> None:
    text = (
        "---\r\n# comment\r\nname: 'a: b'\r\ndescription: >-\r\n  two\r\n  lines\r\nlicense:\r\nlist:\r\n  - x\r\n"
        "metadata: {a: &a [*a]}\r\nodd line\r\n---\r\nname: not this\r\n"
    )
    assert front_matter(text) == {
        "name": "a: b",
        "description": "two lines",
        "license": "",
        "list": "- x",
        "metadata": "{a: &a [*a]}",
    }


@given(st.text(alphabet="-\n: abé>'\"\t&*!{}[]\\", max_size=60))
def test_any_front_matter_is_parsed_or_refused(text: str) -> None:
    try:
        values = front_matter(f"---\n{text}\n---\n")
    except UsageError:
        return
    assert all(isinstance(value, str) and "\n" not in value for value in values.values())
