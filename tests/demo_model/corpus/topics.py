"""Questions and answers from the text files in this folder, expanded into phrasings.

A file is a list of topics.  The lines of a topic:

    # name          starts a topic, or a comment if it is not one lower-case word
    ? pattern       a phrasing of the question; (a|b|) is one of the alternatives, {name} one word of a list; nestable
    ?? question     a phrasing held out from training, which measures whether paraphrases are understood
    ! answer        one of the good answers
    = a | b         contents of a right answer (all; for `alternatives` below, any)
    {name} = a | b  a list for {name} in patterns of this file
"""

import random
import re
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
FILES = ("about.txt", "smalltalk.txt", "unknown.txt")

# Topics whose `=` line lists alternatives; a right answer needs one.
ALTERNATIVES = frozenset({"joke", "how_are_you", "what_can_you_do"})

_GROUP = re.compile(r"\(([^()]*\|[^()]*)\)")
_LIST = re.compile(r"\{(\w+)\}")


@dataclass
class Topic:
    """A fact: phrasings of the question, answers, and the contents of a right answer."""

    name: str
    patterns: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    key_facts: list[str] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)

    def sample_question(self, rng: random.Random) -> str:
        """Return a random phrasing, never a held-out one."""
        held_out = {normalise(question) for question in self.held_out}
        while True:
            question = sample_pattern(rng.choice(self.patterns), self.lists, rng)
            if normalise(question) not in held_out:
                return question

    def accepts(self, answer: str) -> bool:
        """Return whether an answer contains the key facts."""
        found = [fact in answer.lower() for fact in self.key_facts]
        return any(found) if self.name in ALTERNATIVES else all(found)


def normalise(question: str) -> str:
    """Return a question without case and punctuation, for comparisons."""
    return re.sub(r"[^a-z0-9 ]", "", question.lower()).strip()


def sample_pattern(pattern: str, lists: dict[str, list[str]], rng: random.Random) -> str:
    """Draw one text from a pattern."""
    while (match := _GROUP.search(pattern)) is not None:
        choice = rng.choice(match.group(1).split("|"))
        pattern = pattern[: match.start()] + choice + pattern[match.end() :]
    while (match := _LIST.search(pattern)) is not None:
        pattern = pattern[: match.start()] + rng.choice(lists[match.group(1)]) + pattern[match.end() :]
    return re.sub(r" +", " ", pattern).strip()


def read_lists(path: Path) -> dict[str, list[str]]:
    """Return the lists `{name} = a | b` of a file."""
    lines = (line.partition(" = ") for line in path.read_text(encoding="utf-8").splitlines())
    return {
        name[1:-1]: [word.strip() for word in words.split(" | ")] for name, _, words in lines if _LIST.fullmatch(name)
    }


def read_topics(path: Path) -> list[Topic]:
    """Return the topics of one file; raise ValueError if one is incomplete."""
    topics: list[Topic] = []
    lists = read_lists(path)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        mark, _, rest = line.partition(" ")
        if mark == "#":
            if re.fullmatch(r"[a-z0-9_]+", rest):
                topics.append(Topic(rest, lists=lists))
        elif mark == "?":
            topics[-1].patterns.append(rest)
        elif mark == "??":
            topics[-1].held_out.append(rest)
        elif mark == "!":
            topics[-1].answers.append(rest)
        elif mark == "=":
            topics[-1].key_facts.extend(fact.strip().lower() for fact in rest.split(" | "))
        elif line and not _LIST.fullmatch(mark):
            raise ValueError(f"{path.name}, line {number}: this is no line of a topic: {line!r}")
    for topic in topics:
        if not (topic.patterns and topic.held_out and topic.answers and topic.key_facts):
            raise ValueError(f"{path.name}: topic {topic.name} is incomplete")
        for answer in topic.answers:
            if not topic.accepts(answer):
                raise ValueError(f"{path.name}: an answer of {topic.name} lacks its own key facts: {answer!r}")
    return topics


def all_topics() -> list[Topic]:
    """Return every topic of every file."""
    return [topic for name in FILES for topic in read_topics(FOLDER / name)]
