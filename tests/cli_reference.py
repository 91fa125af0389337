"""Write the generated files: ``python -m tests.cli_reference``.

These are docs/cli.md, from the commands; the commands in docs/agents.md, from the declarations of agents; and the
keywords for sampling in localllm/options/keywords.py, from the table of options.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping

from localllm.cli.agent_launcher import shell_lines, steps_of
from localllm.cli.agents import AGENTS, NO_KEY, Connection
from localllm.cli.commands.config import VARIABLES
from localllm.cli.foreign_flags import ABSENT, NO_EFFECT, OTHER_COMMANDS, SAME
from localllm.cli.parser import Parser, command_aliases, command_names, main_parser, parser_of
from localllm.options.declared import Sampling, declared
from tests.helpers.data import ROOT

PATH = ROOT / "docs" / "cli.md"
KEYWORDS = ROOT / "localllm" / "options" / "keywords.py"
AGENTS_PAGE = ROOT / "docs" / "agents.md"

HEAD = """\
# The command line

`python -m tests.cli_reference` writes this file from `localllm/cli`, and a test checks it. `localllm help COMMAND`
shows the same text in the terminal.

Flags override the settings file (`localllm config`), which overrides the defaults shown here.

Exit codes: 0 success; 1 failure; 2 invalid command line. Ctrl-C ends a command by SIGINT, which shells report as 130.
"""

END_OF_FENCE = "\n```"

Row = tuple[str, str]

_BEGIN, _END = '"""The settings of `localllm.Sampling`, which describes them."""\n\n', "\n\n@describes"


def reference() -> str:
    """Return the whole file."""
    lines = [HEAD, *_table("flag", "description", _rows(main_parser()._actions))]
    seen: dict[str, list[Row]] = {}
    for name in command_names():
        lines += ["", f"## localllm {name}", "", *_command(parser_of(name), seen)]
    no_effect = {flag: reason for flag, (_, reason) in NO_EFFECT.items()}
    lines += ["", "## Environment variables", ""]
    lines += _table("variable", "meaning", [(f"`{name}`", text) for name, text in VARIABLES.items()])
    lines += ["", "## Coming from other programs"]
    for title, left, right, names in (
        ("Flags of llama.cpp and llama-cpp-python with other names", "theirs", "ours", SAME),
        ("Flags without effect, which are ignored with a warning", "flag", "why", no_effect),
        ("Flags that localllm does not have, and the advice in the error", "flag", "advice", ABSENT),
        ("Commands of Ollama and llama.cpp that localllm accepts", "theirs", "ours", command_aliases()),
        ("Commands that localllm does not have, and the advice in the error", "theirs", "advice", OTHER_COMMANDS),
    ):
        lines += ["", f"{title}:", "", *_table(left, right, _by_meaning(names))]
    return "\n".join(lines) + "\n"


def keywords() -> str:
    """Return the whole file of keywords, with the sampling options from the table."""
    before, rest = KEYWORDS.read_text("utf-8").split(_BEGIN)
    types = "\n".join(f"    {name}: {Sampling.__annotations__[name]}" for name in declared(Sampling))
    return f"{before}{_BEGIN}{types}\n{rest[rest.index(_END) :]}"


def agents() -> str:
    """Return the whole page about agents, with the commands of each agent in the first fence of its section."""
    page = AGENTS_PAGE.read_text("utf-8")
    for name, agent in AGENTS.items():
        connection = Connection("http://127.0.0.1:8080", "qwen3-8b", NO_KEY, 32_768, f"/tmp/localllm-{name}")
        lines = "\n".join(shell_lines(steps_of(agent, connection, [])))
        language = "sh" if agent.program is not None else "text"
        head, _, section = page.partition(f"\n## {agent.title}\n")
        text, fence, rest = section.partition(f"\n```{language}")
        page = f"{head}\n## {agent.title}\n{text}{fence}\n{lines}{END_OF_FENCE}{rest.partition(END_OF_FENCE)[2]}"
    return page


def _command(command: Parser, seen: dict[str, list[Row]]) -> Iterator[str]:
    """Return usage, groups of flags, and details; groups already in ``seen`` are only named."""
    yield f"    {command.format_usage().removeprefix('usage: ').strip()}"
    yield ""
    yield str(command.description)
    for group in command._action_groups:
        title = str(group.title).capitalize()
        rows = list(_rows(group._group_actions))
        if not rows:
            continue
        yield ""
        if seen.get(title) == rows:
            yield f"**{title}**: as above."
            continue
        is_named = title not in ("Options", "Positional arguments")
        if is_named:
            seen[title] = rows
            yield f"**{title}**"
            yield ""
        yield from _table("word" if title == "Positional arguments" else "flag", "description", rows)
    if command.epilog:
        yield ""
        yield command.epilog.replace(".  ", ". ").strip()


def _rows(actions: Iterable[argparse.Action]) -> Iterator[Row]:
    for action in actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            continue
        *others, last = action.option_strings or [""]
        value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ()))
        yield ", ".join(f"`{flag}`" for flag in (*others, f"{last} {value}".strip())), str(action.help)


def _by_meaning(names: Mapping[str, str]) -> list[Row]:
    """Return one row per option, with all its names."""
    return [
        (", ".join(f"`{name}`" for name, other in names.items() if other == meaning), meaning)
        for meaning in dict.fromkeys(names.values())
    ]


def _table(left: str, right: str, rows: Iterable[Row]) -> Iterator[str]:
    """Return a Markdown table; escapes only characters that are special in code (left) and text (right) cells."""
    yield f"| {left} | {right} |"
    yield "|---|---|"
    for code, text in rows:
        cells = code.replace("|", r"\|"), re.sub(r"([\\<>*|])", r"\\\1", text)
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    KEYWORDS.write_text(keywords(), "utf-8")
    PATH.write_text(reference(), encoding="utf-8")
    AGENTS_PAGE.write_text(agents(), encoding="utf-8")


if __name__ == "__main__":
    main()
