"""Docstrings, comments, messages and Markdown use plain English.

`tests/data/prose.toml` lists phrases that readers stumble over.  A single use may be right; the frequency is limited.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.data import ROOT

PHRASES: dict[str, str] = tomllib.loads((ROOT / "tests" / "data" / "prose.toml").read_text("utf-8"))
PHRASE = re.compile(rf"\b(?:{'|'.join(f'({phrase})' for phrase in PHRASES)})\b".replace(" ", r"\s+"), re.IGNORECASE)
#: First words of a docstring without a verb or noun.
FRAGMENT = re.compile(r"(?:Of|That|Those|What|Which|The same|Where|As|Whose|By|None|Nothing|So)\b")

#: Phrases per 1,000 words.
LIMITS = {"quant": 4, "kernels": 4, "models": 4, "localllm": 4, "tui": 4, "docs": 4, "README.md": 4, "tests": 8}
#: Limit for every longer file of the source and the docs.
FILE_LIMIT, FILE_WORDS = 8, 150

PYTHON = re.compile(
    r'^[ \t]*r?"""(?P<docstring>(?:(?!""").)*)"""[ \t]*$'
    r'|"""(?P<lines>(?:(?!""").)*)"""'
    r'|"(?P<message>(?:\\.|[^"\\\n])*)"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|#:? *(?P<comment>[^\n]*)",
    re.DOTALL | re.MULTILINE,
)
CUDA = re.compile(r"//[/!]?(?P<comment>[^\n]*)|/\*(?P<block>.*?)\*/", re.DOTALL)
#: Parts of prose that are not prose: code, quotations, addresses, placeholders, instructions to tools.
NOT_PROSE = re.compile(
    r"``[^`]*``|`[^`]*`|\"[^\"]*\"|https?://\S+|\{[^{}]*\}|(?:noqa|type: ?ignore|fmt:|ruff:)[^\n]*"
)
FENCE = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Hit:
    line: int
    phrase: str
    advice: str


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """Replace every match by spaces, so that line numbers stay the same."""
    return pattern.sub(lambda match: re.sub(r"\S", " ", match[0]), text)


def is_message(line: str) -> bool:
    """Return whether a string is a sentence and not data or code."""
    return len(re.findall(r"\b[a-z]{2,}\b", line)) >= 4 and not re.search(r"[<>=|\\_;{}]", line)


def prose(source: str, suffix: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (offset, text, whether it is a docstring) for every passage of prose."""
    if suffix == ".md":
        yield 0, blanked(NOT_PROSE, blanked(FENCE, source)), False
        return
    for match in (PYTHON if suffix == ".py" else CUDA).finditer(source):
        kind = match.lastgroup
        if kind is None:
            continue
        text, offset = blanked(NOT_PROSE, match[kind]), match.start(kind)
        if kind not in ("message", "lines"):
            yield offset, text, kind == "docstring"
            continue
        for line in text.splitlines(keepends=True):
            if is_message(line):
                yield offset, line, False
            offset += len(line)


def measure(source: str, suffix: str) -> tuple[int, list[Hit]]:
    """Return the number of words in the prose of a file, and the phrases found."""
    n_words, hits = 0, []
    for offset, text, is_docstring in prose(source, suffix):
        n_words += len(re.findall(r"[A-Za-z']+", text))
        matches = [(match, list(PHRASES.values())[match.lastindex - 1]) for match in PHRASE.finditer(text)]  # type: ignore[operator]
        if is_docstring and (match := FRAGMENT.match(text)):
            matches.insert(0, (match, "start a docstring with a verb or a noun"))
        for match, advice in matches:
            hits.append(Hit(source.count("\n", 0, offset + match.start()) + 1, match[0], advice))
    return n_words, hits


@cache
def files(root: str) -> dict[Path, tuple[int, list[Hit]]]:
    """Return the words and hits of every file in a folder."""
    path = ROOT / root
    paths = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".md", ".cu", ".cuh"))
    )
    return {each: measure(each.read_text("utf-8"), each.suffix) for each in paths}


def report(measured: dict[Path, tuple[int, list[Hit]]]) -> str:
    return "\n".join(
        f"{path.relative_to(ROOT)}:{hit.line}: {' '.join(hit.phrase.split())!r}: {hit.advice}"
        for path, (_, hits) in measured.items()
        for hit in hits
    )


@pytest.mark.parametrize("root", LIMITS)
def test_a_folder_uses_plain_english(root: str) -> None:
    n_words = sum(words for words, _ in files(root).values())
    rate = 1000 * sum(len(hits) for _, hits in files(root).values()) / n_words
    assert rate <= LIMITS[root], f"{root}: {rate:.1f} phrases per 1,000 words\n{report(files(root))}"


@pytest.mark.parametrize("root", [root for root in LIMITS if root != "tests"])
def test_every_file_uses_plain_english(root: str) -> None:
    hard = {
        path: (n_words, hits)
        for path, (n_words, hits) in files(root).items()
        if n_words > FILE_WORDS and 1000 * len(hits) > FILE_LIMIT * n_words
    }
    assert not hard, report(hard)


@pytest.mark.parametrize(
    ("source", "suffix", "expected"),
    [
        ('def f():\n    """Of a page: what is\n    behind it."""\n', ".py", ["2 Of", "2 what is", "3 behind"]),
        ("x = 1  # the ones that come\n#: somebody\n", ".py", ["1 the ones that", "2 somebody"]),
        ('raise E(f"{n} is beyond the size of the file")\n', ".py", ["1 beyond"]),
        ('S = """\nx = beyond(1)\n"""\nd = {"behind": "so many"}\n', ".py", []),
        ('"""Return `behind` and "told"."""\n# `so many`  # noqa: said\n', ".py", []),
        ("It\nsays so.\n\n```sh\nbegin told\n```\n\nIt goes\non.\n", ".md", ["2 says", "8 goes on"]),
        ("int x;  // of them\n/* a\n   text beside */\n", ".cu", ["1 of them", "3 beside"]),
    ],
)
def test_phrases_are_found_in_prose_only(source: str, suffix: str, expected: list[str]) -> None:
    assert [f"{hit.line} {' '.join(hit.phrase.split())}" for hit in measure(source, suffix)[1]] == expected
