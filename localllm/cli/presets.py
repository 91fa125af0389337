"""Options per model: a TOML file with a section per model, whose keys are names of flags.

::

    [qwen]
    model = "qwen2.5-7b-q4_k_m.gguf"    # default: the section's name
    context = 8192
    temperature = 0.6
    lora = ["style.gguf=0.5"]
    alias = ["gpt-4o"]
    ttl = 600
    group = "chat"                      # serve: models of a group share the memory
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.cli.parser import Parser, parser_of
from localllm.errors import UsageError, path_text, shown
from localllm.files import expanded, read_text
from localllm.options.settings import settings_path

#: Placeholders of flags whose values are files.  Relative paths start at the folder of the presets file.
_FILES = ("FILE", "ADAPTER[=X]")

#: Keys that are not flags, and the meaning of their values.
_NO_FLAGS = {"model": "name of a file", "group": "name of a group", "system": "system message"}

#: Groups and flags of ``serve`` that apply to the whole server, or name the model.
_OF_THE_SERVER = ("access", "output")
_NO_KEYS = {"models", "downloads", "presets", "prompts", "quiet", "verbose", "help", "version", "debug"}


def preset_of(name: str, file: Path | None) -> dict[str, Any] | None:
    """Return the section of a file of presets, or else the options of Ollama's model; None if neither exists."""
    if (section := read_presets(file).get(name)) is not None:
        return section
    return None if os.path.lexists(name) else ollama_preset(name)


def ollama_preset(name: str) -> dict[str, Any] | None:
    """Return the options of Ollama's model in the form of a section of presets; None if it has no options."""
    from localllm.catalog.other_programs import ollama_model  # imported here because most command lines name a path

    model = ollama_model(name)
    return None if model is None or not model.options else {"model": name, **model.options}


def read_presets(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the sections of a file, by default ``models.toml`` next to the settings file, with absolute paths.

    `check_preset` checks a section, so that a faulty section does not affect the others.
    """
    settings = settings_path()
    path = expanded(file) if file is not None else settings and settings.parent / "models.toml"
    if path is None or (file is None and not path.is_file()):
        return {}
    import tomllib  # imported here because most users have no such file

    name_of_file, text = path_text(path), read_text(path, "the file of models")
    try:
        sections = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name_of_file} is not valid TOML: {error}") from None
    actions = _actions_of_serve()
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise UsageError(
                f"{name_of_file} has {name!r:.80} outside of a section: write [NAME] above each model's keys"
            )
        for key, value in section.items():
            action = actions.get(key.replace("-", "_"))
            if key == "model" or (action is not None and action.metavar in _FILES):
                values = [_resolved(path, item) for item in (value if isinstance(value, list) else [value])]
                section[key] = values if isinstance(value, list) else values[0]
        section.setdefault("model", name)
    return sections


def check_preset(section: Mapping[str, Any], name: str) -> None:
    """Raise UsageError if a section has a key or a value that no model can have."""
    for key, value in section.items():
        if key not in _NO_FLAGS and key.replace("-", "_") not in _actions_of_serve():
            names = [*_NO_FLAGS, *_actions_of_serve()]
            near = difflib.get_close_matches(key.replace("-", "_"), names, 1, cutoff=0.75)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            raise UsageError(f"[{name}] of the file of models has {key!r:.80}, which no model can have: {remedy}")
        if key in _NO_FLAGS and not isinstance(value, str):
            fault = f"[{name}] of the file of models has {key} = {shown(value)}"
            raise UsageError(f"{fault}: write the {_NO_FLAGS[key]} in quotes")


def _resolved(path: Path, value: Any) -> Any:
    """Return a file's name as a path if the file is in the folder of the presets file.  Adapters may end in "=X"."""
    if not isinstance(value, str):
        return value
    names = [name for name in (value, value.rpartition("=")[0]) if name]
    return str(path.parent / value) if any(os.path.lexists(path.parent / name) for name in names) else value


@functools.cache
def _actions_of_serve() -> dict[str, argparse.Action]:
    return _actions(parser_of("serve"))


def _actions(parser: Parser) -> dict[str, argparse.Action]:
    """Return the flags of a model by their keys.  A key is the name of an option or of a flag."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        title = getattr(getattr(action, "container", None), "title", None)
        if action.option_strings and title not in _OF_THE_SERVER and action.dest not in _NO_KEYS:
            for key in (action.dest, *(flag.lstrip("-").replace("-", "_") for flag in action.option_strings)):
                actions.setdefault(key, action)
    return actions


def apply_preset(parser: Parser, arguments: argparse.Namespace, section: Mapping[str, Any], name: str) -> None:
    """Sets the arguments of a section, unless the command line sets them.  Ignores flags of other commands.

    Raises UsageError if the section is invalid.
    """
    check_preset(section, name)
    flags, actions = list[str](), _actions(parser)
    for key, value in section.items():
        action = actions.get(key.replace("-", "_"))
        if key in _NO_FLAGS or action is None or value is False:
            continue
        flag = max(action.option_strings, key=len)
        if action.nargs == 0:
            flags.append(flag)
            continue
        try:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            flags += [f"{flag}={item}" for item in values]
        except (TypeError, ValueError):  # a date in a table, or a number of very many digits
            raise UsageError(f"[{name}] of the file of models has a value of {key} that no flag takes") from None
    try:
        parsed, _ = parser.parse_known_args(flags)
    except UsageError as error:
        raise UsageError(f"[{name}] of the file of models: {error}") from None
    for option, value in vars(parsed).items():
        if not hasattr(arguments, option) or getattr(arguments, option) == parser.get_default(option):
            setattr(arguments, option, value)
