"""The command line's grammar: declarations of commands and flags, and the parsers built from them."""

from __future__ import annotations

import argparse
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from localllm.cli import commands
from localllm.cli.argument_types import model_file, whole
from localllm.errors import UsageError
from localllm.version import __version__

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

#: The help of a flag that is not listed.
HIDDEN = argparse.SUPPRESS

#: Default of a flag whose attribute does not exist, instead of being None, if the flag is absent.
LEFT_OUT = argparse.SUPPRESS

#: The most important commands.  The others follow in alphabetical order.
_FIRST = ("generate", "chat", "serve", "models", "pull")


class Flag(NamedTuple):
    """A flag or positional argument: names and keywords of argparse's ``add_argument``."""

    names: Sequence[str]
    keywords: Mapping[str, Any]


#: Flags, titles of the following flags, and lists of mutually exclusive flags.
Flags = Sequence["Flag | str | list[Flag]"]


class Positionals(NamedTuple):
    """Positional arguments.  They set the arguments that no flag has set, in order."""

    shown: str  # the words in the help
    help: str
    names: Sequence[str]  # the arguments that they set; the first ``n_needed`` are required
    n_needed: int = 0


@dataclass(frozen=True)
class Command:
    """A command of the command line, as its file in `localllm.cli.commands` declares it."""

    usage: str  # text after the command's name
    summary: str  # a short description
    flags: Flags
    run: Callable[[argparse.Namespace], int | None]  # runs the command; returns the exit code, None for 0
    details: str = ""  # paragraphs below the flags in its help
    words: Positionals | None = None
    aliases: str = ""  # names in other programs, separated by spaces
    forwards: bool = False  # whether the words after -- are ``arguments.forwarded``, for another program


def flag(names: str, help: str, read: Callable[[str], Any] | None = None, **more: Any) -> Flag:
    """Declare a flag in the notation of the help: "-t --threads N", without a value a switch.

    "texts TEXT" is a positional argument.  ``read`` parses the value.  ``more``: keywords of argparse's
    ``add_argument``; a default is added to the help.
    """
    *flags, last = names.split()
    default = more.get("default")
    if help != HIDDEN and default not in (None, LEFT_OUT, "", {}):
        help += f" (default: {default[0] if isinstance(default, list) else default})"
    if last.startswith("-"):
        return Flag((*flags, last), {"action": "store_true", "help": help} | more)
    choices = {"choices": last.split("|")} if "|" in last else {}
    return Flag(flags, {"metavar": last, "type": read, "help": help} | choices | more)


def several(names: str, help: str, read: Callable[[str], Any] | None = None, **more: Any) -> Flag:
    """Declare a flag that may be given several times."""
    help = help if help == HIDDEN else f"{help}; may be given several times"
    names_, keywords = flag(names, help, read, **more)
    return Flag(names_, {"default": [], **keywords} | {"action": "append"})


def command_names() -> list[str]:
    names = {module.name for module in pkgutil.iter_modules(commands.__path__)}
    return [*_FIRST, *sorted(names - set(_FIRST))]


def command_of(name: str) -> Command:
    command: Command = import_module(f"{commands.__name__}.{name}").COMMAND
    return command


def command_aliases() -> dict[str, str]:
    """Return the names of commands by their aliases from other programs."""
    return {alias: name for name in command_names() for alias in command_of(name).aliases.split()}


class Parser(argparse.ArgumentParser):
    """The parser of a command.  It reports errors as `UsageError`."""

    def __init__(self, name: str, command: Command) -> None:
        summary = command.summary
        super().__init__(
            prog=f"localllm {name}",
            usage=f"localllm {name} {command.usage}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=command.details,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        # typed: flags of other programs that the user typed, by localllm's flag
        self.command, self.typed = command, dict[str, str]()
        if (words := command.words) is not None:
            self.add_argument("words", nargs="*", metavar=words.shown, help=words.help)
        _add(self, command.flags)
        self.add_argument("--version", action="version", version=f"localllm {__version__}", help=HIDDEN)
        self.add_argument("--debug", action="store_true", help="show a traceback after an error")

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def name_of(self) -> dict[str, str]:
        """The argument's name by flag."""
        return {flag: action.dest for flag, action in self._option_string_actions.items()}

    def error(self, message: str) -> NoReturn:
        if (flag := re.match(r"argument ([^:/]+)[^:]*:", message)) and flag[1] in self.typed:
            message = f"argument {self.typed[flag[1]]}{message[flag.end() - 1 :]}"
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Prints help or the version.  argparse's method ignores errors of writing."""
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
        else:
            print(message, end="", file=file, flush=True)

    def assign_positionals(self, words: Sequence[str], arguments: argparse.Namespace) -> None:
        """Assigns positional words to the command's arguments."""
        assert self.command.words is not None
        _, _, attributes, n_needed = self.command.words
        names = [name for name in attributes if vars(arguments).get(name) is None]
        if not words or not words[-1].isdigit():
            names = [name for name in names if name != "threads"]
        if len(words) > len(names):
            meanings = " or ".join(_MEANINGS[name] for name in attributes if name in _MEANINGS and name not in names)
            hint = f": {meanings} is named twice, remove one of the names" if meanings else ""
            self.error(f"too many arguments, starting with {words[len(names)]!r}{hint}")
        if any(name in attributes[:n_needed] for name in names[len(words) :]):
            self.error(f"arguments are missing: write {self.usage}")
        for name, word in zip(names, words, strict=False):
            try:
                setattr(arguments, name, _READERS.get(name, str)(word))
            except argparse.ArgumentTypeError as fault:
                self.error(str(fault))
        for name in names[len(words) :]:
            setattr(arguments, name, None)


#: Descriptions of positional arguments that flags can set too.
_MEANINGS = {"model": "the model", "output": "the file to write"}
_READERS: dict[str, Callable[[str], Any]] = {"model": model_file, "output": Path, "threads": whole(0)}


class _Formatter(argparse.HelpFormatter):
    """A formatter with wide columns for long flags, which preserves line breaks of the text at the end."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(super(_Formatter, self)._fill_text(p, width, indent) for p in text.split("\n\n"))


def _add(container: argparse._ActionsContainer, flags: Flags) -> None:
    group = container
    for entry in flags:
        if isinstance(entry, str):
            group = container.add_argument_group(entry)
        elif isinstance(entry, list):
            _add(group.add_mutually_exclusive_group(), entry)
        else:
            group.add_argument(*entry.names, **entry.keywords)


def parser_of(name: str) -> Parser:
    return Parser(name, command_of(name))


def main_parser() -> argparse.ArgumentParser:
    """Return the parser of a line without a command.  Its help lists the commands."""
    parser = argparse.ArgumentParser("localllm", description="Run large language models on your own computer.")
    parser.add_argument("--version", action="version", version=f"localllm {__version__}")
    parser.add_argument("--list-devices", action="store_true", help="list the devices that --device can use here")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in command_names():
        subparsers.add_parser(name, help=command_of(name).summary)
    return parser
