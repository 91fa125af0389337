"""Instructions of a project: AGENTS.md in the system message, and skills, which the model reads on demand.

Sources: https://agents.md, https://agentskills.io/specification. Both are files of a repository, so they may be
hostile: they are bounded, and links out of the repository are not followed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from localllm.agent_tools.file_edits import confined, decoded_text, read_confined
from localllm.agent_tools.tool import AgentTool, IsStopped, stoppable, storable, text_argument, text_parameters
from localllm.errors import UsageError, path_text

#: File names.
AGENTS_FILE, SKILL_FILE = "AGENTS.md", "SKILL.md"
#: The folder of skills in a working folder.
SKILLS = Path(".agents", "skills")
#: Maximum bytes of all AGENTS.md files together, and of a file of a skill.
MAX_INSTRUCTIONS, MAX_SKILL_FILE = 32 << 10, 256 << 10
#: Maximum number of skills, of entries of a folder of skills, of listed files of a skill, and of warnings.
_MAX_SKILLS, _MAX_ENTRIES, _MAX_LISTED, _MAX_WARNINGS = 50, 1000, 100, 5
#: Maximum characters of a description and of a name, as in the specification, and lines of front matter.
_MAX_DESCRIPTION, _MAX_LINES = 1024, 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEY = re.compile(r"([A-Za-z][\w-]*):(?:\s+(.*))?")


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill. ``folder`` is resolved, and contains `SKILL_FILE`."""

    name: str
    description: str
    folder: Path


@dataclass(frozen=True, slots=True)
class ProjectInstructions:
    """The texts of AGENTS.md files by path, outermost first; skills; and reasons why files are not used."""

    files: Mapping[Path, str]
    skills: Mapping[str, Skill]
    warnings: tuple[str, ...] = ()

    @property
    def system_text(self) -> str:
        """The text for the system message; empty without instructions and skills."""
        parts = [f"Instructions from {path_text(path)}:\n\n{text.strip()}" for path, text in self.files.items()]
        if self.skills:
            listed = [f"- {skill.name}: {skill.description}" for skill in self.skills.values()]
            parts.append("\n".join(["Skills. If a task matches one, call read_skill before you start:", *listed]))
        return "\n\n".join(parts)

    @property
    def summary(self) -> str:
        """A sentence for the user about the files that the model gets; empty without files."""
        parts = [f"{path_text(path)} ({len(text):,} characters)" for path, text in self.files.items()]
        if self.skills:
            parts.append(f"{len(self.skills)} skill{'s' * (len(self.skills) > 1)} ({', '.join(self.skills)})")
        return f"the system message contains {', '.join(parts)}" if parts else ""

    @property
    def tools(self) -> list[AgentTool]:
        """The tool read_skill if there are skills."""
        if not self.skills:
            return []
        parameters = text_parameters(
            "name", name="name of the skill", file=f"a file of the skill; default: {SKILL_FILE}"
        )
        parameters["properties"]["name"]["enum"] = list(self.skills)
        scope = " ".join(str(skill.folder) for skill in self.skills.values())
        run = partial(_read_skill, self.skills)
        description = "Reads the instructions of a skill, or another of its files."
        return [stoppable(AgentTool("read_skill", description, parameters, run, scope=scope))]


def read_instructions(folder: Path | None, skills_folder: Path | None = None) -> ProjectInstructions:
    """Read the instructions for a working folder, a resolved path.

    AGENTS.md files are in the folder and its parents, up to the root of its repository. Skills are in the folder's
    `SKILLS` and in ``skills_folder``, the user's folder of skills.
    """
    warnings: list[str] = []
    files = {} if folder is None else _agents_files(folder, warnings)
    skills: dict[str, Skill] = {}
    if folder is not None:
        try:
            skills |= {skill.name: skill for skill in _skills(folder / SKILLS, folder, warnings)}
        except UsageError as error:
            warnings.append(f"the skills in {SKILLS.as_posix()} are not used: {error}")
    if skills_folder is not None:
        skills = {skill.name: skill for skill in _skills(skills_folder, None, warnings)} | skills
    if len(skills) > _MAX_SKILLS:
        warnings.append(f"there are {len(skills)} skills: only the first {_MAX_SKILLS} are used")
    return ProjectInstructions(
        files, dict(islice(skills.items(), _MAX_SKILLS)), tuple(map(storable, warnings[:_MAX_WARNINGS]))
    )


# -- AGENTS.md -------------------------------------------------------------------------------------------------------


def _agents_files(folder: Path, warnings: list[str]) -> dict[Path, str]:
    parents = [folder, *folder.parents]
    root = next((at for at, path in enumerate(parents) if (path / ".git").exists()), 0)
    files: dict[Path, str] = {}
    n_left = MAX_INSTRUCTIONS
    for path in reversed(parents[: root + 1]):
        file = path / AGENTS_FILE
        if not os.path.lexists(file):
            continue
        try:
            text = decoded_text(read_confined(parents[root], str(file), 1 << 20), path_text(file))
        except UsageError as error:
            warnings.append(f"{AGENTS_FILE} is not used: {error}")
            continue
        data = text.encode()
        if len(data) > n_left:
            warnings.append(f"{file} is cut off: the model gets at most {MAX_INSTRUCTIONS:,} bytes of {AGENTS_FILE}")
            text = data[:n_left].decode(errors="ignore")
        n_left = max(0, n_left - len(data))
        if text.strip():
            files[file] = text
    return files


# -- Skills ----------------------------------------------------------------------------------------------------------


def _skills(folder: Path, within: Path | None, warnings: list[str]) -> Iterator[Skill]:
    """Yield the skills of a folder, sorted by name. With ``within``, links out of that folder are refused."""
    try:
        with os.scandir(folder if within is None else confined(within, str(folder))) as entries:
            names = sorted(entry.name for entry in islice(entries, _MAX_ENTRIES))
    except OSError:  # most projects have no skills
        return
    used: set[str] = set()
    for name in names:
        path = folder / name
        try:
            path = path.resolve() if within is None else confined(within, str(path))
            if os.path.lexists(path / SKILL_FILE):
                text = decoded_text(read_confined(path, SKILL_FILE, MAX_SKILL_FILE), SKILL_FILE)
                skill = _skill(path, front_matter(text))
                if skill.name in used:
                    raise UsageError(f"another skill in this folder has the name {skill.name}: rename one")
                used.add(skill.name)
                yield skill
        except (OSError, UsageError) as error:
            warnings.append(f"the skill {name!r:.80} is not used: {error}")


def _skill(folder: Path, values: Mapping[str, str]) -> Skill:
    name, description = values.get("name", ""), " ".join(values.get("description", "").split())
    if not _NAME.fullmatch(name):
        raise UsageError(f"its name is {name!r:.80}, but must be at most 64 letters, digits, - and _")
    if not description or len(description) > _MAX_DESCRIPTION:
        raise UsageError(f"its description must have 1 to {_MAX_DESCRIPTION:,} characters, not {len(description):,}")
    return Skill(name, description, folder)


def front_matter(text: str) -> dict[str, str]:
    """Return the values of the lines ``key: value`` between lines ``---`` at the start of ``text``.

    Indented lines continue a value. Other YAML is not supported: a list or a mapping becomes text. Raises UsageError
    if the front matter is missing or too long.
    """
    lines = text.replace("\r\n", "\n").split("\n", _MAX_LINES + 1)
    end = next((i for i, line in enumerate(lines[1 : _MAX_LINES + 1], 1) if line.rstrip() == "---"), 0)
    if lines[0].rstrip() != "---" or not end:
        raise UsageError(f"{SKILL_FILE} must start with a line ---, then lines such as name: NAME, then a line ---")
    values: dict[str, str] = {}
    key = ""
    for line in lines[1:end]:
        match = _KEY.fullmatch(line.rstrip())
        if match is not None:
            key, value = match[1], (match[2] or "").strip()
            values[key] = "" if value in (">", ">-", "|", "|-") else _unquoted(value)
        elif key and line[:1].isspace():
            values[key] = f"{values[key]} {line.strip()}".strip()
    return values


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value


def _read_skill(skills: Mapping[str, Skill], arguments: Mapping[str, Any], is_stopped: IsStopped) -> str:
    """Return a file of a skill. The main file is followed by the names of the skill's other files."""
    name, file = text_argument(arguments, "name"), text_argument(arguments, "file", "") or SKILL_FILE
    if name not in skills:
        raise UsageError(f"there is no skill {name!r:.80}: the skills are {', '.join(skills)}")
    folder = skills[name].folder
    text = decoded_text(read_confined(folder, file, MAX_SKILL_FILE), file)
    if file != SKILL_FILE:
        return text
    others = sorted(islice(_files(folder), _MAX_LISTED))
    return f"{text}\n\nOther files of this skill: {', '.join(others)}" if others else text


def _files(folder: Path) -> Iterator[str]:
    for at, _, names in os.walk(folder):
        for name in names:
            path = (Path(at) / name).relative_to(folder).as_posix()
            if path != SKILL_FILE:
                yield path
